//! The channels of a migration that is measured.

use clap::Args;
use pageferry_migration::{Tls, TlsFiles};
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// The channels for pages.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Channels {
    /// The number of bulk channels.
    pub(crate) bulk: u16,
    /// The files for TLS, the same at both ends.
    pub(crate) tls: Option<TlsFlags>,
}

impl Default for Channels {
    fn default() -> Self {
        Self { bulk: 1, tls: None }
    }
}

/// The files for TLS of a benchmark, as flags and for the other process.
#[derive(Clone, Debug, Default, PartialEq, Eq, Args, Serialize, Deserialize)]
pub(crate) struct TlsFlags {
    /// Measure with TLS too: the certificate of both ends (PEM)
    #[arg(long, value_name = "FILE", requires_all = ["tls_key", "tls_ca", "peer_name"])]
    tls_cert: Option<PathBuf>,
    /// The key of the certificate (PEM)
    #[arg(long, value_name = "FILE", requires = "tls_cert")]
    tls_key: Option<PathBuf>,
    /// The authority that signed the certificate (PEM)
    #[arg(long, value_name = "FILE", requires = "tls_cert")]
    tls_ca: Option<PathBuf>,
    /// The name in the certificate
    #[arg(long, value_name = "NAME", requires = "tls_cert")]
    peer_name: Option<String>,
}

impl TlsFlags {
    /// These flags, if the user has given them.
    pub(crate) fn given(&self) -> Option<Self> {
        self.tls_cert.is_some().then(|| self.clone())
    }
}

impl From<TlsFlags> for Tls {
    fn from(flags: TlsFlags) -> Self {
        // The flags need each other, so all are there.
        TlsFiles {
            cert: flags.tls_cert.unwrap_or_default(),
            key: flags.tls_key.unwrap_or_default(),
            ca: flags.tls_ca.unwrap_or_default(),
            peer_name: flags.peer_name,
        }
        .into()
    }
}
