//! The index of a cache on disk: any bytes decode, and it stays whole when it is used.

pub(crate) fn run(bytes: &[u8]) {
    pageferry_pager::stores::cache::fuzz_index(bytes);
}
