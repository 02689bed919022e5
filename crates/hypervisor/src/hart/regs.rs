//! The integer registers.

use super::op::SINK;
use core::ops::{Index, IndexMut};

/// `x0` to `x31`, and a register that takes writes to `x0`.
///
/// There are 256 places, so that indexing by a `u8` needs no bounds check. The decoder never yields
/// 0 as a destination, so nothing writes `x0`.
#[derive(Clone)]
pub(super) struct Regs([u64; 256]);

impl Regs {
    pub(super) const fn new() -> Self {
        Self([0; 256])
    }

    pub(super) fn all(&self) -> [u64; 32] {
        let mut x = [0; 32];
        x.copy_from_slice(&self.0[..32]);
        x
    }

    /// Sets register `index` (0 to 31). A write to `x0` has no effect.
    pub(super) const fn set(&mut self, index: u8, value: u64) {
        self.0[if index == 0 { SINK } else { index & 31 } as usize] = value;
    }
}

impl Index<u8> for Regs {
    type Output = u64;

    #[inline(always)]
    fn index(&self, index: u8) -> &u64 {
        &self.0[index as usize]
    }
}

impl IndexMut<u8> for Regs {
    #[inline(always)]
    fn index_mut(&mut self, index: u8) -> &mut u64 {
        &mut self.0[index as usize]
    }
}
