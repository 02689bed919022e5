//! The programs that run inside test and demo virtual machines, without an operating system.
pub mod control;
pub mod model;
pub mod verify;
mod code;
mod error;
mod event;
mod isa;
mod layout;
mod order;
mod params;
mod program;
mod spin;
mod tables;
mod toucher;
mod workload;

pub use control::{Control, GuestReport, PageBytes, ProgramKind};
pub use error::GuestError;
pub use event::{Doorbell, ErrorKind, Event};
pub use isa::Isa;
pub use layout::{DOORBELL_GPA, HOLE_END, HOLE_START, Layout, MAX_MEMORY_BYTES, MAX_VCPUS};
pub use order::Order;
pub use program::{Program, Start};
pub use spin::Spin;
pub use toucher::{Touch, TouchAccess, TouchOrder, Toucher};
pub use verify::{PageError, PageUse, Verdict};
pub use workload::Workload;
