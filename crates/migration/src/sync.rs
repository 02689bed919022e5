//! The one place where atomics come from. No loom model covers this crate. Migration relies on the
//! lock-free page states and waiters of `userfault`, which have models there.

pub(crate) use std::sync::atomic::{AtomicBool, AtomicU64, Ordering, fence};
