//! PEM texts, from files or from memory.

use core::fmt;
use std::path::{Path, PathBuf};

use super::TlsError;
use super::file::read_regular_file;

/// The largest PEM file in bytes: far more than the CAs of a system's own collection.
const MAX_PEM_BYTES: u64 = 4 << 20;

/// A PEM text and its name. The bytes are overwritten when it is dropped, and never printed.
#[derive(Clone, PartialEq, Eq)]
pub struct Pem {
    name: String,
    bytes: Vec<u8>,
}

impl Pem {
    /// The text of these bytes. Errors call it `name`, such as `vault:cert`.
    #[must_use]
    pub fn new(name: impl Into<String>, bytes: impl Into<Vec<u8>>) -> Self {
        Self {
            name: name.into(),
            bytes: bytes.into(),
        }
    }

    /// Reads a PEM file. No file can hold this up: one that is a FIFO or a device is refused.
    fn read(path: &Path) -> Result<Self, TlsError> {
        let name = path.display().to_string();
        match read_regular_file(path, MAX_PEM_BYTES) {
            Ok(bytes) => Ok(Self { name, bytes }),
            Err(source) => Err(TlsError::File { path: name, source }),
        }
    }

    pub(super) fn name(&self) -> &str {
        &self.name
    }

    pub(super) fn bytes(&self) -> &[u8] {
        &self.bytes
    }
}

impl fmt::Debug for Pem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Pem({:?}, {} bytes)", self.name, self.bytes.len())
    }
}

impl Drop for Pem {
    fn drop(&mut self) {
        self.bytes.fill(0);
        // Keeps the compiler from removing the writes.
        std::hint::black_box(&self.bytes);
    }
}

/// The certificates of a side in memory, all in PEM.
///
/// ```
/// use pageferry_transport::{Pem, TlsPem};
///
/// # let (cert, key, ca) = (*b"", *b"", *b"");
/// let tls = TlsPem {
///     cert: Pem::new("vault:cert", cert),
///     key: Pem::new("vault:key", key),
///     ca: Pem::new("vault:ca", ca),
///     peer_name: None,
/// };
/// let why = tls.load().unwrap_err();
/// assert_eq!(
///     why.to_string(),
///     "vault:cert has no certificate: it is empty",
/// );
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TlsPem {
    /// The certificate of this side. Certificates of intermediate CAs may follow it.
    pub cert: Pem,
    /// The private key of `cert`.
    pub key: Pem,
    /// The certificates of the CAs that sign the peer's certificate.
    pub ca: Pem,
    /// The name for which the peer's certificate must be valid: a DNS name or an IP address.
    ///
    /// Without it, a source requires the host that it dials, and a destination accepts every name.
    pub peer_name: Option<String>,
}

/// The files with a side's certificates, all in PEM.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TlsFiles {
    /// The certificate of this side. Certificates of intermediate CAs may follow it.
    pub cert: PathBuf,
    /// The private key of `cert`.
    pub key: PathBuf,
    /// The certificates of the CAs that sign the peer's certificate.
    pub ca: PathBuf,
    /// As [`TlsPem::peer_name`].
    pub peer_name: Option<String>,
}

impl TlsFiles {
    /// Reads the files.
    ///
    /// # Errors
    /// [`TlsError::File`].
    pub fn read(&self) -> Result<TlsPem, TlsError> {
        Ok(TlsPem {
            cert: Pem::read(&self.cert)?,
            key: Pem::read(&self.key)?,
            ca: Pem::read(&self.ca)?,
            peer_name: self.peer_name.clone(),
        })
    }
}

/// The place of a side's certificates.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Tls {
    /// Files, which each session reads anew at its start. So renewed certificates are used.
    Files(TlsFiles),
    /// Memory.
    Pem(TlsPem),
}

impl From<TlsFiles> for Tls {
    fn from(files: TlsFiles) -> Self {
        Self::Files(files)
    }
}

impl From<TlsPem> for Tls {
    fn from(pem: TlsPem) -> Self {
        Self::Pem(pem)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_is_not_printed() {
        let pem = Pem::new("a key", *b"secret");
        assert_eq!(format!("{pem:?}"), "Pem(\"a key\", 6 bytes)");
    }
}
