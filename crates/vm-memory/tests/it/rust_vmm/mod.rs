//! `vm-memory`'s own memory and ours, side by side. Every test here runs the same generic code on
//! both, or compares the two.

mod behaviour;
mod kinds;
mod layouts;
mod snapshots;
