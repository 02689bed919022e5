//! The VMs of other VMMs: `migrate --vm ch:..` and `receive --for ch:..`.

pub(crate) mod ch;
