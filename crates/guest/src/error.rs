//! What can be wrong with a plan or with a control page.

use crate::layout::{MAX_MEMORY_BYTES, MAX_VCPUS};

/// Why a program cannot be planned, or a control page not be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum GuestError {
    /// No vCPU was asked for.
    #[error("a program needs at least one vCPU")]
    NoVcpus,
    /// More vCPUs than a program can have.
    #[error("{vcpus} vCPUs are more than the {MAX_VCPUS} a program can have")]
    TooManyVcpus {
        /// How many were asked for.
        vcpus: u32,
    },
    /// The memory size is not a multiple of the page size.
    #[error("memory must be a multiple of 4096 bytes, and {bytes} is not")]
    MemoryNotPageAligned {
        /// How many bytes were asked for.
        bytes: u64,
    },
    /// The memory has no room for the program and one data page a vCPU.
    #[error("{bytes} bytes of memory are too few for {vcpus} vCPUs: at least {minimum} are needed")]
    MemoryTooSmall {
        /// How many bytes were asked for.
        bytes: u64,
        /// For how many vCPUs.
        vcpus: u32,
        /// The least that would do, in bytes.
        minimum: u64,
    },
    /// More memory than a program can address.
    #[error("{bytes} bytes of memory are more than the {MAX_MEMORY_BYTES} a program can address")]
    MemoryTooLarge {
        /// How many bytes were asked for.
        bytes: u64,
    },
    /// A range of pages to touch is empty.
    #[error("the range of pages for vCPU {vcpu} is empty")]
    EmptyRange {
        /// Whose range.
        vcpu: u32,
    },
    /// A range of pages to touch leaves the data pages.
    #[error(
        "pages {start}..{end} for vCPU {vcpu} are not all data pages: those are {data_start}..{data_end}"
    )]
    RangeOutsideData {
        /// Whose range.
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
    /// There is not one range for every vCPU.
    #[error("{ranges} ranges of pages were given for {vcpus} vCPUs: one each is needed")]
    RangeCount {
        /// How many ranges were given.
        ranges: usize,
        /// How many vCPUs there are.
        vcpus: u32,
    },
    /// A control page does not start with the magic number of a program.
    #[error("a control page starts with {found:#x}, which is no program's magic number")]
    ControlMagic {
        /// Its first word.
        found: u64,
    },
    /// A field of a control page has a value no program writes.
    #[error("the field {field} of a control page cannot be {value:#x}")]
    ControlField {
        /// The field's name.
        field: &'static str,
        /// What was found in it.
        value: u64,
    },
    /// A doorbell value no program writes.
    #[error("{value:#x} is no value a program writes to the doorbell")]
    Doorbell {
        /// The value.
        value: u32,
    },
}
