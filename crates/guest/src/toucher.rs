//! The toucher: one access to each page of a range, for measurements of faults.

use crate::program::forward_to_program;
use crate::{GuestError, Layout, Program, ProgramKind, code};
use std::ops::Range;

/// The access that a toucher makes to a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum TouchAccess {
    /// Load the page's first word, and add it to the sum in the control page.
    Read,
    /// Store the page's RAM page index plus 1 to its first word.
    Write,
}

/// The order in which a toucher visits its pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum TouchOrder {
    /// From the first to the last.
    Ascending,
    /// In the order of [`crate::Order`], a different one in each pass.
    Random,
}

/// The work of a toucher.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Touch {
    /// The access to each page.
    pub access: TouchAccess,
    /// The order of the visits.
    pub order: TouchOrder,
    /// The number of passes before [`crate::Event::Finished`]; 0 means no end.
    pub passes: u64,
}

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
    use crate::Isa;

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
