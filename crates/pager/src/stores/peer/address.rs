//! The address of a file at a peer.

use super::error::PeerError;
use super::shares::is_name;
use pageferry_transport::address::Address as Host;

/// `pageferry://HOST:PORT/NAME`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Address {
    pub(super) host: Host,
    /// The name of the file.
    pub(super) name: String,
}

impl Address {
    pub(super) fn parse(text: &str) -> Result<Self, PeerError> {
        let wrong = |why: &str| PeerError::Address {
            text: text.escape_debug().to_string(),
            why: why.to_owned(),
        };
        let rest = text.strip_prefix("pageferry://");
        let parts = rest.and_then(|rest| rest.split_once('/'));
        let (authority, name) = parts.ok_or_else(|| wrong("a part is missing"))?;
        let host: Host = format!("tcp:{authority}")
            .parse()
            .map_err(|why: pageferry_transport::address::AddressError| wrong(&why.to_string()))?;
        if matches!(host, Host::Tcp { port: 0, .. }) {
            return Err(wrong("port 0 is for listening"));
        }
        if !is_name(name) {
            return Err(wrong("the name has an empty part, `.` or `..`"));
        }
        Ok(Self {
            host,
            name: name.to_owned(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_has_a_host_a_port_and_a_name() {
        let address = Address::parse("pageferry://store.example:7440/web/memory").unwrap();
        assert_eq!(address.host.authority(), "store.example:7440");
        assert_eq!(address.name, "web/memory");
        let address = Address::parse("pageferry://[fe80::1%eth0]:7/m").unwrap();
        assert_eq!(address.host.authority(), "[fe80::1%eth0]:7");
        for (wrong, why) in [
            ("pageferry://host/m", "the port is missing"),
            ("pageferry://host:0/m", "port 0"),
            ("pageferry://host:70000/m", "invalid port"),
            ("pageferry://:1/m", "the host is missing"),
            ("pageferry://::1:1/m", "in brackets"),
            ("pageferry://[fe80::1]:1/m", "needs its zone"),
            ("pageferry://host:1", "a part is missing"),
            ("pageferry://host:1/", "the name"),
            ("pageferry://host:1//m", "the name"),
            ("pageferry://host:1/a/../m", "the name"),
            ("pageferry://host:1/./m", "the name"),
            ("pageferry://ho st:1/m", "invalid host"),
            ("s3://host:1/m", "a part is missing"),
        ] {
            let found = Address::parse(wrong).unwrap_err().to_string();
            assert!(
                found.contains("expected pageferry://HOST:PORT/NAME"),
                "{found}"
            );
            assert!(found.contains(why), "{found}");
        }
    }
}
