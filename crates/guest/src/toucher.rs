//! The toucher: one access to each page of a range, for measurements of faults.

use crate::program::forward_to_program;
use crate::{GuestError, MemoryMap, Program, ProgramKind, Touch, code};
use std::ops::Range;

/// A program that touches every page of a range once per pass.
///
/// ```
/// use pageferry_guest::{Isa, MemoryMap, Touch, TouchAccess, TouchOrder, Toucher};
///
/// let map = MemoryMap::new(Isa::X86_64, 2, 16 << 20)?;
/// let touch = Touch { access: TouchAccess::Write, order: TouchOrder::Random, passes: 1 };
/// let apart = Toucher::partitioned(map, touch);
/// let all = map.data();
/// let overlapping = Toucher::new(map, vec![all.clone(), all], touch)?;
/// assert_ne!(apart.program().visited(0), overlapping.program().visited(0));
/// # Ok::<(), pageferry_guest::GuestError>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Toucher {
    program: Program,
}

forward_to_program!(Toucher);

impl Toucher {
    /// Plans a toucher. `ranges` holds the pages of every vCPU, as RAM page indices. Ranges may
    /// overlap.
    ///
    /// # Errors
    /// When the number of ranges is not the number of vCPUs, or a range is empty or leaves the data
    /// pages.
    pub fn new(map: MemoryMap, ranges: Vec<Range<u64>>, touch: Touch) -> Result<Self, GuestError> {
        if ranges.len() != map.vcpus() as usize {
            return Err(GuestError::RangeCount {
                ranges: ranges.len(),
                vcpus: map.vcpus(),
            });
        }
        let data = map.data();
        for (vcpu, range) in (0..).zip(&ranges) {
            if range.is_empty() {
                return Err(GuestError::EmptyRange { vcpu });
            }
            if range.start < data.start || range.end > data.end {
                return Err(GuestError::RangeOutsideData {
                    vcpu,
                    start: range.start,
                    end: range.end,
                    data_start: data.start,
                    data_end: data.end,
                });
            }
        }
        let code = code::toucher(map.isa(), &touch);
        let program = Program::new(ProgramKind::Toucher, map, code, ranges, touch.passes);
        Ok(Self { program })
    }

    /// A toucher whose vCPUs each touch their own share ([`MemoryMap::share`]).
    #[must_use]
    pub fn partitioned(map: MemoryMap, touch: Touch) -> Self {
        let ranges = (0..map.vcpus()).map(|vcpu| map.share(vcpu)).collect();
        Self::new(map, ranges, touch).expect("shares are not empty, and data pages")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Isa, TouchAccess, TouchOrder};

    #[test]
    fn ranges_that_cannot_be_are_named() {
        let map = MemoryMap::new(Isa::Rv64, 1, 1 << 20).unwrap();
        let touch = Touch {
            access: TouchAccess::Read,
            order: TouchOrder::Ascending,
            passes: 1,
        };
        let data = map.data();
        let refused = |range: Range<u64>| Toucher::new(map, vec![range], touch).unwrap_err();
        assert_eq!(
            refused(data.start..data.start),
            GuestError::EmptyRange { vcpu: 0 }
        );
        for (start, end) in [(data.start - 1, data.end), (data.start, data.end + 1)] {
            assert_eq!(
                refused(start..end),
                GuestError::RangeOutsideData {
                    vcpu: 0,
                    start,
                    end,
                    data_start: data.start,
                    data_end: data.end
                }
            );
        }
        assert_eq!(
            Toucher::new(map, vec![], touch).unwrap_err(),
            GuestError::RangeCount {
                ranges: 0,
                vcpus: 1
            }
        );
    }
}
