//! Addresses of migration peers: TCP or a unix socket.
//!
//! **Guarantee.** Every accepted text names exactly one kind of address. The displayed form of an
//! address parses to the same address.
//!
//! **Mechanism.** This module only handles text.
//! [`Connection::connect`](crate::channel::Connection::connect) resolves names.
//!
//! **Neighbours.** [`channel`](crate::channel) binds and connects. This module must not open
//! sockets.

use core::fmt;
use core::str::FromStr;
use std::path::{Path, PathBuf};

/// The longest path of a unix socket in bytes: `sun_path` of unix(7) without its final zero.
pub const MAX_UNIX_PATH_BYTES: usize = 107;

/// An address to listen on or to connect to.
///
/// ```
/// use pageferry_transport::address::Address;
/// assert_eq!("tcp:[::1]:7000".parse(), Ok(Address::Tcp { host: "::1".into(), port: 7000 }));
/// assert_eq!("./vm.sock".parse(), Ok(Address::Unix("./vm.sock".into())));
/// assert!("7000".parse::<Address>().is_err());
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Address {
    /// `tcp:HOST:PORT` or `HOST:PORT`.
    Tcp {
        /// A name or an IP address. An IPv6 address is written in brackets and stored without them.
        /// A link-local one has a zone, as in `fe80::1%eth0`.
        host: String,
        /// The port. Port 0 is for listening on a port that the system chooses.
        port: u16,
    },
    /// `unix:PATH`, or any path that contains a slash.
    Unix(PathBuf),
}

/// The reason why a text is not an address.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum AddressError {
    /// The text is empty.
    #[error("the address is empty: expected HOST:PORT or unix:PATH")]
    Empty,
    /// The text has neither a port nor a path.
    #[error("invalid address `{0}`: the port is missing; expected HOST:PORT or unix:PATH")]
    NoPort(String),
    /// The host before the port is missing.
    #[error(
        "invalid address `{0}`: the host is missing; use 127.0.0.1:PORT for this host only, 0.0.0.0:PORT for every interface"
    )]
    NoHost(String),
    /// The port is not a number from 0 to 65535.
    #[error("invalid port `{port}` in `{text}`: expected a number from 0 to 65535")]
    BadPort {
        /// The whole text.
        text: String,
        /// The text in place of the port.
        port: String,
    },
    /// An IPv6 address without brackets: the port looks like a group of the address.
    #[error("invalid address `{0}`: write an IPv6 address in brackets, as in [::1]:7000")]
    Brackets(String),
    /// A link-local address has no zone.
    #[error(
        "invalid address `{0}`: a link-local address needs its zone, the interface of this host, \
         as in [fe80::1%eth0]:7000"
    )]
    NoZone(String),
    /// The host has a character that neither a name nor an IP address may have.
    #[error("invalid host `{host}` in `{text}`: expected a host name or an IP address")]
    BadHost {
        /// The whole text.
        text: String,
        /// The text in place of the host.
        host: String,
    },
    /// The path cannot be that of a unix socket.
    #[error("invalid socket path `{}` of {len} bytes: expected 1 to {MAX_UNIX_PATH_BYTES} bytes, none of them zero", path.display())]
    BadPath {
        /// The path.
        path: PathBuf,
        /// Its length in bytes.
        len: usize,
    },
}

impl Address {
    /// The address of a unix socket.
    ///
    /// # Errors
    /// [`AddressError::BadPath`] for an empty path, one longer than [`MAX_UNIX_PATH_BYTES`], or one
    /// with a zero byte.
    pub fn unix(path: &Path) -> Result<Self, AddressError> {
        use std::os::unix::ffi::OsStrExt;
        let bytes = path.as_os_str().as_bytes();
        if bytes.is_empty() || bytes.len() > MAX_UNIX_PATH_BYTES || bytes.contains(&0) {
            return Err(AddressError::BadPath {
                path: path.to_owned(),
                len: bytes.len(),
            });
        }
        Ok(Self::Unix(path.to_owned()))
    }

    /// The address as people write it without its kind: `HOST:PORT`, or the path of a socket.
    #[must_use]
    pub fn authority(&self) -> String {
        let text = self.to_string();
        let bare = text.split_once(':').map(|(_, bare)| bare.to_owned());
        bare.unwrap_or(text)
    }

    fn tcp(text: &str, rest: &str) -> Result<Self, AddressError> {
        let (host, port) = rest
            .rsplit_once(':')
            .ok_or_else(|| AddressError::NoPort(text.into()))?;
        let bracketed = host.strip_prefix('[').and_then(|h| h.strip_suffix(']'));
        if bracketed.is_none() && rest.starts_with('[') && rest.ends_with(']') {
            return Err(AddressError::NoPort(text.into()));
        }
        if bracketed.is_none() && host.contains(':') {
            return Err(AddressError::Brackets(text.into()));
        }
        if host.is_empty() || bracketed == Some("") {
            return Err(AddressError::NoHost(text.into()));
        }
        let digits = !port.is_empty() && port.bytes().all(|byte| byte.is_ascii_digit());
        let port = match port.parse() {
            Ok(number) if digits => number,
            _ => {
                return Err(AddressError::BadPort {
                    text: text.into(),
                    port: port.into(),
                });
            }
        };
        let name = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_');
        let good = match bracketed.map(|v6| v6.split_once('%').unwrap_or((v6, ""))) {
            Some((ip, zone)) => match ip.parse::<core::net::Ipv6Addr>() {
                Ok(ip) if ip.is_unicast_link_local() && zone.is_empty() => {
                    return Err(AddressError::NoZone(text.into()));
                }
                Ok(_) => zone.chars().all(|c| c.is_ascii_graphic() && c != '/'),
                Err(_) => false,
            },
            None => host.chars().all(name),
        };
        let host = bracketed.unwrap_or(host);
        if !good {
            return Err(AddressError::BadHost {
                text: text.into(),
                host: host.into(),
            });
        }
        Ok(Self::Tcp {
            host: host.into(),
            port,
        })
    }
}

impl FromStr for Address {
    type Err = AddressError;

    fn from_str(text: &str) -> Result<Self, AddressError> {
        if text.is_empty() {
            return Err(AddressError::Empty);
        }
        if let Some(path) = text.strip_prefix("unix:") {
            return Self::unix(Path::new(path));
        }
        if let Some(rest) = text.strip_prefix("tcp:") {
            return Self::tcp(text, rest);
        }
        if text.contains('/') {
            return Self::unix(Path::new(text));
        }
        Self::tcp(text, text)
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp { host, port } if host.contains(':') => write!(f, "tcp:[{host}]:{port}"),
            Self::Tcp { host, port } => write!(f, "tcp:{host}:{port}"),
            Self::Unix(path) => write!(f, "unix:{}", path.display()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_displayed_form_parses_to_the_same_address() {
        for text in [
            "tcp:127.0.0.1:7000",
            "localhost:1",
            "[::1]:65535",
            "[fe80::1%eth0]:9",
            "unix:vm.sock",
            "/run/vm.sock",
            "./vm.sock",
        ] {
            let address: Address = text.parse().unwrap();
            assert_eq!(address.to_string().parse(), Ok(address), "{text}");
        }
    }

    #[test]
    fn each_mistake_is_named() {
        let parse = |text: &str| text.parse::<Address>().unwrap_err();
        assert_eq!(parse(""), AddressError::Empty);
        assert!(matches!(parse("localhost"), AddressError::NoPort(_)));
        assert!(matches!(parse("[::1]"), AddressError::NoPort(_)));
        assert!(matches!(parse("::1:7000"), AddressError::Brackets(_)));
        assert!(matches!(parse(":7000"), AddressError::NoHost(_)));
        assert!(matches!(parse("tcp:[]:7000"), AddressError::NoHost(_)));
        for port in ["", "65536", "-1", "+1", "http", " 1"] {
            let text = format!("host:{port}");
            assert!(
                matches!(parse(&text), AddressError::BadPort { .. }),
                "{text}"
            );
        }
        assert!(matches!(parse("a b:1"), AddressError::BadHost { .. }));
        assert!(matches!(parse("[fe80::1]:1"), AddressError::NoZone(_)));
        assert!(matches!(parse("[fe80::1%]:1"), AddressError::NoZone(_)));
        assert!(matches!(
            parse("[fe80::1%a b]:1"),
            AddressError::BadHost { .. }
        ));
        assert!(matches!(parse("[host]:1"), AddressError::BadHost { .. }));
        assert!(matches!(
            parse("unix:"),
            AddressError::BadPath { len: 0, .. }
        ));
        let long = format!("/{}", "x".repeat(MAX_UNIX_PATH_BYTES));
        assert!(matches!(
            parse(&long),
            AddressError::BadPath { len: 108, .. }
        ));
    }
}
