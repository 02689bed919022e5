//! The host of a peer, for shares of places.

use std::net::{IpAddr, Ipv6Addr};

/// The host of a peer, as far as its address tells. All unix sockets are one host. So are the
/// addresses of an IPv6 network of 64 bits, since a host may have all of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Origin(Option<IpAddr>);

impl Origin {
    pub(crate) fn new(address: Option<IpAddr>) -> Self {
        Self(address.map(|address| match address.to_canonical() {
            IpAddr::V6(address) => {
                let network = address.to_bits() & !u128::from(u64::MAX);
                Ipv6Addr::from_bits(network).into()
            }
            address => address,
        }))
    }
}
