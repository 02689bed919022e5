//! Tunnels between VMMs that are threads of the test.

mod scene;
mod tunnel;
mod tunnel_faults;
mod tunnel_hostile;
