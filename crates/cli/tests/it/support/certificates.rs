//! Certificates for the hosts of one test.

use super::Dir;
use rcgen::{BasicConstraints, CertificateParams, DnType, IsCa, Issuer, KeyPair};

/// A CA of a test.
pub(crate) struct Authority {
    issuer: Issuer<'static, KeyPair>,
    pem: String,
}

impl Authority {
    pub(crate) fn new(name: &str) -> Self {
        let mut params = CertificateParams::new(Vec::<String>::new()).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.distinguished_name.push(DnType::CommonName, name);
        let key = KeyPair::generate().unwrap();
        let pem = params.self_signed(&key).unwrap().pem();
        Self {
            issuer: Issuer::new(params, key),
            pem,
        }
    }

    /// Issues a certificate for `host`. Its owner trusts this CA.
    pub(crate) fn issue(&self, host: &str) -> Files {
        let params = CertificateParams::new(vec![host.to_owned()]).unwrap();
        let key = KeyPair::generate().unwrap();
        let certificate = params.signed_by(&key, &self.issuer).unwrap();
        let files = Files(Dir::new());
        files.write("cert.pem", &certificate.pem());
        files.write("key.pem", &key.serialize_pem());
        files.write("ca.pem", &self.pem);
        files
    }
}

/// The files of a host.
pub(crate) struct Files(Dir);

impl Files {
    fn write(&self, name: &str, text: &str) {
        std::fs::write(self.0.path(name), text).unwrap();
    }

    /// Makes the host trust this CA instead of its own.
    pub(crate) fn trusting(self, authority: &Authority) -> Self {
        self.write("ca.pem", &authority.pem);
        self
    }

    /// The flags that name the files, and `peer` as the other host.
    pub(crate) fn flags(&self, peer: &str) -> Vec<String> {
        let file = |name: &str| self.0.path(name).to_str().unwrap().to_owned();
        [
            ["--tls-cert".to_owned(), file("cert.pem")],
            ["--tls-key".to_owned(), file("key.pem")],
            ["--tls-ca".to_owned(), file("ca.pem")],
            ["--peer-name".to_owned(), peer.to_owned()],
        ]
        .concat()
    }
}
