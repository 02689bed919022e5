//! QEMU for RV64, whose machines run this project's programs, and on KVM, where they run a kernel.
//!
//! **Guarantee.** Dropping a [`Machine`] ends its process. No call waits longer than 20 seconds.
//!
//! **Mechanism.** A machine is a process in a network namespace. Its memory is a file without a
//! name, which QEMU shares. So this process can read the guest's pages at any time, also those of a
//! machine that is receiving them: a page that has not arrived is zero.
//!
//! **Source.** Capabilities and parameters: `qapi/migration.json` of QEMU.

mod boot;
mod kernel;
mod machine;
mod monitor;
mod postcopy;
mod trace;
mod version;

pub use boot::{MAX_MEMORY, filling};
pub use kernel::{KernelMachine, KernelMove, KernelSpec};
pub use machine::{Machine, Progress};
pub use postcopy::{Pair, Streams};
pub use trace::Traced;
pub use version::{PROGRAM, Qemu};

/// Why QEMU did not do what it was asked for: one sentence.
#[derive(Debug)]
pub struct Error(String);

impl std::fmt::Display for Error {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "QEMU: {}", self.0)
    }
}

impl std::error::Error for Error {}

impl From<std::io::Error> for Error {
    fn from(why: std::io::Error) -> Self {
        Self(why.to_string())
    }
}

fn failed(why: impl Into<String>) -> Error {
    Error(why.into())
}
