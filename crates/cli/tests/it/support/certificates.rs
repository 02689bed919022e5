//! The files of a test's certificates, as flags.

pub(crate) use pageferry_testkit::certificates::{Authority, Side, Validity::Now};

/// The files of a side for commands.
pub(crate) trait SideFlags {
    /// The flags that name the files, and `peer` as the other host.
    fn flags(&self, peer: &str) -> Vec<String>;
}

impl SideFlags for Side {
    fn flags(&self, peer: &str) -> Vec<String> {
        let file = |name: &str| self.path(name).to_str().unwrap().to_owned();
        [
            ["--tls-cert".to_owned(), file("cert.pem")],
            ["--tls-key".to_owned(), file("key.pem")],
            ["--tls-ca".to_owned(), file("ca.pem")],
            ["--peer-name".to_owned(), peer.to_owned()],
        ]
        .concat()
    }
}
