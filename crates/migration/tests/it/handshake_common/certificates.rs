//! The files of a test's certificates, as this crate takes them.

use pageferry_migration::channel::TlsFiles;
use pageferry_migration::handshake::Protection;
use pageferry_testkit::certificates::Side;

/// The files of a side for this crate.
pub(crate) trait SideFiles {
    fn files(&self, peer_name: Option<&str>) -> TlsFiles;

    fn protection(&self, peer_name: Option<&str>) -> Protection {
        Protection::Tls(self.files(peer_name).load().unwrap())
    }
}

impl SideFiles for Side {
    fn files(&self, peer_name: Option<&str>) -> TlsFiles {
        TlsFiles {
            cert: self.path("cert.pem"),
            key: self.path("key.pem"),
            ca: self.path("ca.pem"),
            peer_name: peer_name.map(ToOwned::to_owned),
        }
    }
}
