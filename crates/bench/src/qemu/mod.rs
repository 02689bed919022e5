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

pub(crate) use boot::MAX_MEMORY;
pub(crate) use kernel::{KernelMachine, KernelSpec};
pub use machine::Machine;
pub(crate) use machine::Progress;
pub(crate) use postcopy::{Pair, Streams};
pub use trace::Traced;
pub use version::{PROGRAM, Qemu};

use crate::BenchError;

fn failed(why: impl Into<String>) -> BenchError {
    BenchError::Peer(format!("QEMU: {}", why.into()))
}
