//! From names of hosts to addresses of sockets, and back.

use rustix::net::{AddressFamily, SocketType, netdevice, socket};
use std::io;
use std::net::{IpAddr, SocketAddr, SocketAddrV6, ToSocketAddrs};

use super::OpenError;
use super::connection::is_loopback;
use crate::address::Address;

/// Returns the addresses of a host, at least one.
///
/// # Errors
/// [`OpenError::Unresolved`], also for a zone that is no interface of this host.
pub fn resolve(host: &str, port: u16) -> Result<Vec<SocketAddr>, OpenError> {
    let unresolved = |source| OpenError::Unresolved {
        host: host.to_owned(),
        source,
    };
    if let Some(found) = literal(host, port).map_err(unresolved)? {
        return Ok(vec![found]);
    }
    let found: Vec<SocketAddr> = (host, port)
        .to_socket_addrs()
        .map_err(unresolved)?
        .collect();
    if found.is_empty() {
        return Err(unresolved(io::Error::other("the host has no address")));
    }
    Ok(found)
}

/// Returns the address if `host` is one, which no resolver has to be asked for.
pub(super) fn literal(host: &str, port: u16) -> io::Result<Option<SocketAddr>> {
    let (ip, zone) = match host.split_once('%') {
        Some((ip, zone)) => (ip, Some(zone)),
        None => (host, None),
    };
    Ok(match (ip.parse(), zone) {
        (Ok(IpAddr::V6(ip)), Some(zone)) => {
            Some(SocketAddrV6::new(ip, port, 0, interface(zone)?).into())
        }
        (Ok(ip), None) => Some(SocketAddr::new(ip, port)),
        _ => None,
    })
}

/// Whether `address` is one of another host, and no name.
pub(crate) fn is_elsewhere(address: &Address) -> bool {
    match address {
        Address::Unix(_) => false,
        Address::Tcp { host, port } => literal(host, *port)
            .is_ok_and(|found| found.is_some_and(|found| !is_loopback(found.ip()))),
    }
}

/// Returns the number of an interface by its name. A number is taken as it is.
fn interface(zone: &str) -> io::Result<u32> {
    if let Ok(number) = zone.parse() {
        return Ok(number);
    }
    let any = socket(AddressFamily::UNIX, SocketType::DGRAM, None)?;
    netdevice::name_to_index(any, zone).map_err(|errno| match errno {
        rustix::io::Errno::NODEV => {
            io::Error::other(format!("this host has no interface called `{zone}`"))
        }
        errno => errno.into(),
    })
}

/// Returns the address of a socket with the zone that a link-local one needs.
pub(super) fn address_of(found: SocketAddr) -> Address {
    let host = match found {
        SocketAddr::V6(v6) if v6.scope_id() != 0 => {
            let any = socket(AddressFamily::UNIX, SocketType::DGRAM, None);
            let name = any.and_then(|any| netdevice::index_to_name(any, v6.scope_id()));
            let zone = name.unwrap_or_else(|_| v6.scope_id().to_string());
            format!("{}%{zone}", v6.ip())
        }
        found => found.ip().to_string(),
    };
    Address::Tcp {
        host,
        port: found.port(),
    }
}

/// The same for people, who know that it is one of TCP.
pub(super) fn name_of(found: SocketAddr) -> String {
    address_of(found).authority()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_zone_is_that_of_an_interface_and_comes_back() {
        let found = resolve("fe80::1%lo", 7).unwrap()[0];
        let SocketAddr::V6(v6) = found else {
            panic!("{found} is IPv6");
        };
        assert_ne!(v6.scope_id(), 0);
        assert_eq!(name_of(found), "[fe80::1%lo]:7");
        let number = format!("fe80::1%{}", v6.scope_id());
        assert_eq!(resolve(&number, 7).unwrap(), [found]);
        let why = resolve("fe80::1%no-such", 7).unwrap_err().to_string();
        assert!(why.contains("no interface called `no-such`"), "{why}");
        assert_eq!(name_of("192.0.2.1:8".parse().unwrap()), "192.0.2.1:8");
    }
}
