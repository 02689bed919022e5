//! Files of a peer over loopback.
