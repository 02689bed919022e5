//! Helpers that these tests share.

pub(crate) mod asm;
pub(crate) mod fleet;
pub(crate) mod hart;
pub(crate) mod paging;
pub(crate) mod programs;
pub(crate) mod tracked;
pub(crate) mod vm;
pub(crate) mod watched;
