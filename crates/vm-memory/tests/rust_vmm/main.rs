//! `vm-memory`'s own memory and ours, side by side: every test of this file runs the same generic code against
//! both, or compares the two.

mod behaviour;
mod kinds;
mod layouts;
mod snapshots;
