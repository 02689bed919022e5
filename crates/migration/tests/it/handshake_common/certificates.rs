//! Certificates for one test, in files of a directory that goes with them.

use pageferry_migration::channel::TlsFiles;
use pageferry_migration::handshake::Protection;
use rcgen::{BasicConstraints, CertificateParams, DnType, IsCa, Issuer, KeyPair, date_time_ymd};
use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};

/// A CA of a test.
pub(crate) struct Authority {
    issuer: Issuer<'static, KeyPair>,
    pem: String,
}

/// The time for which a certificate is valid.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Validity {
    Now,
    Past,
    Future,
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

    /// Issues a certificate for `names`, and writes the files of a side.
    pub(crate) fn issue(&self, names: &[&str], validity: Validity) -> Side {
        let names: Vec<String> = names.iter().map(ToString::to_string).collect();
        let mut params = CertificateParams::new(names).unwrap();
        let (from, to) = match validity {
            Validity::Now => (2020, 4000),
            Validity::Past => (2020, 2021),
            Validity::Future => (3999, 4000),
        };
        params.not_before = date_time_ymd(from, 1, 1);
        params.not_after = date_time_ymd(to, 1, 1);
        let key = KeyPair::generate().unwrap();
        let certificate = params.signed_by(&key, &self.issuer).unwrap();
        let side = Side::new();
        side.write("cert.pem", &certificate.pem());
        side.write("key.pem", &key.serialize_pem());
        side.write("ca.pem", &self.pem);
        side
    }

    /// Makes `side` trust this CA instead of its own.
    pub(crate) fn trusted_by(&self, side: Side) -> Side {
        side.write("ca.pem", &self.pem);
        side
    }
}

/// The files of a side.
pub(crate) struct Side {
    pub(crate) directory: PathBuf,
}

impl Side {
    fn new() -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = format!("pageferry-tls-{}-{number}", std::process::id());
        let directory = std::env::temp_dir().join(name);
        std::fs::create_dir_all(&directory).unwrap();
        Self { directory }
    }

    pub(crate) fn write(&self, name: &str, text: &str) {
        std::fs::write(self.directory.join(name), text).unwrap();
    }

    pub(crate) fn read(&self, name: &str) -> String {
        std::fs::read_to_string(self.directory.join(name)).unwrap()
    }

    pub(crate) fn files(&self, peer_name: Option<&str>) -> TlsFiles {
        TlsFiles {
            cert: self.directory.join("cert.pem"),
            key: self.directory.join("key.pem"),
            ca: self.directory.join("ca.pem"),
            peer_name: peer_name.map(ToOwned::to_owned),
        }
    }

    pub(crate) fn protection(&self, peer_name: Option<&str>) -> Protection {
        Protection::Tls(self.files(peer_name).load().unwrap())
    }
}

impl Drop for Side {
    fn drop(&mut self) {
        std::fs::remove_dir_all(&self.directory).unwrap();
    }
}
