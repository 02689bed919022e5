//! The machine code, assembled at run time for either instruction set on any host.
//!
//! The code of a program is the same for all its vCPUs and position independent. It expects the
//! control page's address in the first argument and the doorbell's in the second. The x86-64 code
//! is short of registers, so it has the doorbell's address built in. No code pushes to the stack.

mod rv64_toucher;
mod rv64_workload;
mod x64_toucher;
mod x64_workload;

pub(crate) use rv64_workload::{
    INSTRUCTIONS_PER_PASS, INSTRUCTIONS_PER_STEP, INSTRUCTIONS_PER_VISIT,
};

use crate::Isa;
use crate::touch::Touch;

/// The workload's code for shares of `share_pages` pages.
pub(crate) fn workload(isa: Isa, share_pages: u64) -> Vec<u8> {
    match isa {
        Isa::X86_64 => x64_workload::assemble(share_pages),
        Isa::Rv64 => rv64_workload::assemble(),
    }
}

/// A toucher's code.
pub(crate) fn toucher(isa: Isa, touch: &Touch) -> Vec<u8> {
    match isa {
        Isa::X86_64 => x64_toucher::assemble(touch),
        Isa::Rv64 => rv64_toucher::assemble(touch),
    }
}

/// The spinner's code.
pub(crate) fn spin(isa: Isa) -> Vec<u8> {
    match isa {
        Isa::X86_64 => x64_toucher::assemble_spin(),
        Isa::Rv64 => rv64_toucher::assemble_spin(),
    }
}
