//! The instruction sets of the programs.

use std::fmt;

/// An instruction set, with the mode its programs run in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Isa {
    /// x86-64: 64-bit mode, ring 3, flat page tables in the program's image.
    X86_64,
    /// RV64IMA: VS-mode with `vsatp` = Bare, so without page tables in the guest.
    Rv64,
}

impl Isa {
    /// Both.
    pub const ALL: [Self; 2] = [Self::X86_64, Self::Rv64];

    /// The name used in reports.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::X86_64 => "x86-64",
            Self::Rv64 => "rv64",
        }
    }
}

impl fmt::Display for Isa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
