//! The start of a guest program that needs no values.

use pageferry_addr::Gpa;
use pageferry_machine::{StartMode, StartState, Vcpu};

/// Sets a vCPU to start a user program at `entry`, with all else 0.
pub(crate) fn start_at(vcpu: &mut dyn Vcpu, entry: u64) {
    let start = StartState {
        entry,
        stack: 0,
        args: [0; 2],
        tables: Gpa(0),
        mode: StartMode::User,
    };
    vcpu.set_start(&start).unwrap();
}
