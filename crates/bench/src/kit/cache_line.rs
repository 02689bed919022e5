//! A value with a cache line of its own.

use std::ops::Deref;

/// A value that shares its cache line with no other data. It is aligned to 128 bytes, because
/// x86-64 processors prefetch lines in pairs.
#[derive(Debug, Default)]
#[repr(align(128))]
pub(crate) struct CacheLine<T>(pub T);

impl<T> Deref for CacheLine<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.0
    }
}
