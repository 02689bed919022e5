//! The address of a file at a peer.

use super::error::PeerError;
use super::shares::is_name;

/// `pageferry://HOST:PORT/NAME`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Address {
    /// The host and the port.
    pub(super) authority: String,
    /// The name of the file.
    pub(super) name: String,
}

impl Address {
    pub(super) fn parse(text: &str) -> Result<Self, PeerError> {
        let wrong = || PeerError::Address(text.escape_debug().to_string());
        let rest = text.strip_prefix("pageferry://").ok_or_else(wrong)?;
        let (authority, name) = rest.split_once('/').ok_or_else(wrong)?;
        let (host, port) = authority.rsplit_once(':').ok_or_else(wrong)?;
        let bracketed = host.starts_with('[') && host.ends_with(']');
        let is_host = !host.is_empty()
            && (bracketed || !host.contains(':'))
            && !host.contains(|c: char| c.is_whitespace() || c.is_control());
        match is_host && port.parse::<u16>().is_ok_and(|port| port > 0) && is_name(name) {
            true => Ok(Self {
                authority: authority.to_owned(),
                name: name.to_owned(),
            }),
            false => Err(wrong()),
        }
    }
}

/// The host of an authority, without the brackets of an IPv6 address.
pub(super) fn host_of(authority: &str) -> &str {
    let host = authority
        .rsplit_once(':')
        .map_or(authority, |(host, _)| host);
    host.strip_prefix('[')
        .and_then(|host| host.strip_suffix(']'))
        .unwrap_or(host)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_has_a_host_a_port_and_a_name() {
        let address = Address::parse("pageferry://store.example:7440/web/memory").unwrap();
        assert_eq!(address.authority, "store.example:7440");
        assert_eq!(address.name, "web/memory");
        assert_eq!(host_of(&address.authority), "store.example");
        let address = Address::parse("pageferry://[::1]:7/m").unwrap();
        assert_eq!(host_of(&address.authority), "::1");
        for wrong in [
            "pageferry://host/m",
            "pageferry://host:0/m",
            "pageferry://host:70000/m",
            "pageferry://:1/m",
            "pageferry://::1:1/m",
            "pageferry://host:1",
            "pageferry://host:1/",
            "pageferry://host:1//m",
            "pageferry://host:1/a/../m",
            "pageferry://host:1/./m",
            "pageferry://ho st:1/m",
            "s3://host:1/m",
        ] {
            let why = Address::parse(wrong).unwrap_err().to_string();
            assert!(why.contains("expected pageferry://HOST:PORT/NAME"), "{why}");
        }
    }
}
