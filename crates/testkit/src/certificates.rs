//! Certificates for one test, in files of a directory that goes with them.

use pageferry_transport::{Protection, TlsFiles};
use rcgen::{BasicConstraints, CertificateParams, DnType, IsCa, Issuer, KeyPair, date_time_ymd};
use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};

/// A CA of a test.
pub struct Authority {
    issuer: Issuer<'static, KeyPair>,
    pem: String,
}

/// The time for which a certificate is valid.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Validity {
    /// It is valid now.
    Now,
    /// It has expired.
    Past,
    /// It will be valid later.
    Future,
}

impl Authority {
    /// Makes a CA called `name`.
    ///
    /// # Panics
    /// When the host gives no random numbers.
    #[must_use]
    pub fn new(name: &str) -> Self {
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

    /// Issues a certificate for `names`, and writes the files of a side that trusts this CA.
    ///
    /// # Panics
    /// When the files cannot be written.
    #[must_use]
    pub fn issue(&self, names: &[&str], validity: Validity) -> Side {
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
    #[must_use]
    pub fn trusted_by(&self, side: Side) -> Side {
        side.write("ca.pem", &self.pem);
        side
    }
}

/// The files of a side: `cert.pem`, `key.pem` and `ca.pem`. Dropping it removes them.
#[derive(Debug)]
pub struct Side {
    directory: PathBuf,
}

impl Side {
    /// Its files, as a side of TLS takes them.
    #[must_use]
    pub fn files(&self, peer_name: Option<&str>) -> TlsFiles {
        TlsFiles {
            cert: self.path("cert.pem"),
            key: self.path("key.pem"),
            ca: self.path("ca.pem"),
            peer_name: peer_name.map(ToOwned::to_owned),
        }
    }

    /// TLS by its files.
    ///
    /// # Panics
    /// When the files do not serve.
    #[must_use]
    pub fn protection(&self, peer_name: Option<&str>) -> Protection {
        Protection::Tls(self.files(peer_name).load().unwrap())
    }

    fn new() -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = format!("pageferry-certificates-{}-{number}", std::process::id());
        let directory = std::env::temp_dir().join(name);
        std::fs::create_dir_all(&directory).unwrap();
        Self { directory }
    }

    /// The path of a file: `cert.pem`, `key.pem` or `ca.pem`.
    #[must_use]
    pub fn path(&self, name: &str) -> PathBuf {
        self.directory.join(name)
    }

    /// Replaces a file.
    ///
    /// # Panics
    /// When it cannot be written.
    pub fn write(&self, name: &str, text: &str) {
        std::fs::write(self.path(name), text).unwrap();
    }

    /// Reads a file.
    ///
    /// # Panics
    /// When it cannot be read.
    #[must_use]
    pub fn read(&self, name: &str) -> String {
        std::fs::read_to_string(self.path(name)).unwrap()
    }
}

impl Drop for Side {
    fn drop(&mut self) {
        std::fs::remove_dir_all(&self.directory).unwrap();
    }
}
