//! The toucher: one access to each page of a range, for measurements of faults.

use crate::program::forward_to_program;
use crate::{GuestError, Layout, Program, ProgramKind, Touch, code};
use std::ops::Range;

/// A program that touches every page of a range once per pass.
///
/// ```
/// use pageferry_guest::{Isa, Layout, Touch, TouchAccess, TouchOrder, Toucher};
///
/// let layout = Layout::new(Isa::X86_64, 2, 16 << 20)?;
/// let touch = Touch { access: TouchAccess::Write, order: TouchOrder::Random, passes: 1 };
/// let apart = Toucher::partitioned(layout, touch);
/// let all = layout.data();
/// let overlapping = Toucher::new(layout, vec![all.clone(), all], touch)?;
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
    pub fn new(layout: Layout, ranges: Vec<Range<u64>>, touch: Touch) -> Result<Self, GuestError> {
        if ranges.len() != layout.vcpus() as usize {
            return Err(GuestError::RangeCount {
                ranges: ranges.len(),
                vcpus: layout.vcpus(),
            });
        }
        let data = layout.data();
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
        let code = code::toucher(layout.isa(), &touch);
        let program = Program::new(ProgramKind::Toucher, layout, code, ranges, touch.passes);
        Ok(Self { program })
    }

    /// A toucher whose vCPUs each touch their own share ([`Layout::share`]).
    #[must_use]
    pub fn partitioned(layout: Layout, touch: Touch) -> Self {
        let ranges = (0..layout.vcpus()).map(|vcpu| layout.share(vcpu)).collect();
        Self::new(layout, ranges, touch).expect("shares are not empty, and data pages")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Isa, TouchAccess, TouchOrder};

    #[test]
    fn ranges_that_cannot_be_are_named() {
        let layout = Layout::new(Isa::Rv64, 1, 1 << 20).unwrap();
        let touch = Touch {
            access: TouchAccess::Read,
            order: TouchOrder::Ascending,
            passes: 1,
        };
        let data = layout.data();
        let refused = |range: Range<u64>| Toucher::new(layout, vec![range], touch).unwrap_err();
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
            Toucher::new(layout, vec![], touch).unwrap_err(),
            GuestError::RangeCount {
                ranges: 0,
                vcpus: 1
            }
        );
    }
}
