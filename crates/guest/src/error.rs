//! Errors of plans and of control pages.

use crate::address_space::{MAX_MEMORY_BYTES, MAX_VCPUS};
use std::time::Duration;

/// The reason why a program cannot be planned, or a control page or doorbell value cannot be
/// parsed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum GuestError {
    /// The number of vCPUs is zero.
    #[error("a program needs at least one vCPU")]
    NoVcpus,
    /// More vCPUs than a program can have.
    #[error("{vcpus} vCPUs are more than the {MAX_VCPUS} a program can have")]
    TooManyVcpus {
        /// The requested number of vCPUs.
        vcpus: u32,
    },
    /// The memory size is not a multiple of the page size.
    #[error("memory must be a multiple of 4096 bytes, not {bytes} bytes")]
    MemoryNotPageAligned {
        /// The requested size in bytes.
        bytes: u64,
    },
    /// The memory has no room for the program and one data page per vCPU.
    #[error(
        "{bytes} bytes of memory are too few for {vcpus} vCPUs: at least {minimum} bytes are needed"
    )]
    MemoryTooSmall {
        /// The requested size in bytes.
        bytes: u64,
        /// The requested number of vCPUs.
        vcpus: u32,
        /// The smallest possible size in bytes.
        minimum: u64,
    },
    /// More memory than a program can address.
    #[error("{bytes} bytes of memory are more than the {MAX_MEMORY_BYTES} a program can address")]
    MemoryTooLarge {
        /// The requested size in bytes.
        bytes: u64,
    },
    /// A rest does not fit a doorbell value.
    #[error(
        "a rest of {rest:?} is too long: at most {:?}",
        crate::Doorbell::MAX_REST
    )]
    RestTooLong {
        /// The requested rest.
        rest: Duration,
    },
    /// A range of pages to touch is empty.
    #[error("the range of pages for vCPU {vcpu} is empty")]
    EmptyRange {
        /// The vCPU with the empty range.
        vcpu: u32,
    },
    /// A range of pages to touch leaves the data pages.
    #[error(
        "pages {start}..{end} for vCPU {vcpu} are not all data pages, which are {data_start}..{data_end}"
    )]
    RangeOutsideData {
        /// The vCPU with this range.
        vcpu: u32,
        /// First page of the range, as a RAM page index.
        start: u64,
        /// First page behind the range.
        end: u64,
        /// First data page.
        data_start: u64,
        /// First page behind the data pages.
        data_end: u64,
    },
    /// The number of ranges is not the number of vCPUs.
    #[error("{ranges} ranges of pages were given for {vcpus} vCPUs: expected one per vCPU")]
    RangeCount {
        /// The number of ranges given.
        ranges: usize,
        /// The number of vCPUs.
        vcpus: u32,
    },
    /// A control page does not start with the magic number of a program.
    #[error("unknown magic number {found:#x} at the start of a control page")]
    ControlMagic {
        /// Its first word.
        found: u64,
    },
    /// A field of a control page has a value that no program writes.
    #[error("the value {value:#x} of control page field '{field}' is out of range")]
    ControlField {
        /// The field's name.
        field: &'static str,
        /// The value found.
        value: u64,
    },
    /// A doorbell value that no program writes.
    #[error("unknown doorbell value {value:#x}")]
    Doorbell {
        /// The value.
        value: u32,
    },
}
