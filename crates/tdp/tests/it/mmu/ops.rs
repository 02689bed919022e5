//! Random calls near the borders of pages, tables and masks.

use pageferry_tdp::format::{Access, Format, Writes};
use proptest::prelude::*;

const GIGA: u64 = 1 << 18;

/// A frame near a border: its region of 1 GiB (two neighbours, and the last of the format), its
/// page of 2 MiB in that region, and its frame in that page.
#[derive(Clone, Copy, Debug)]
pub(crate) struct At {
    region: u8,
    block: u8,
    page: u8,
}

const BLOCKS: [u64; 4] = [0, 1, 2, 511];
const PAGES: [u64; 8] = [0, 1, 2, 63, 64, 130, 510, 511];

impl At {
    pub(crate) fn gfn<F: Format>(self) -> u64 {
        let region = [0, GIGA, F::GFN_LIMIT.0 - GIGA][self.region as usize];
        region + BLOCKS[self.block as usize] * 512 + PAGES[self.page as usize]
    }

    pub(crate) fn all() -> impl Iterator<Item = Self> {
        let all = (0..3).flat_map(|region| (0..4).map(move |block| (region, block)));
        all.flat_map(|(region, block)| {
            (0..8).map(move |page| Self {
                region,
                block,
                page,
            })
        })
    }
}

/// A range.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Span {
    Pages(At, u64),
    Blocks(At, u64),
    /// From one frame to another, at any distance.
    Between(At, At),
    Region(At),
    All,
}

impl Span {
    /// First frame and end.
    pub(crate) fn ends<F: Format>(self) -> (u64, u64) {
        let limit = F::GFN_LIMIT.0;
        let (start, end) = match self {
            Self::Pages(at, pages) => (at.gfn::<F>(), at.gfn::<F>() + pages),
            Self::Blocks(at, blocks) => {
                let start = at.gfn::<F>() & !511;
                (start, start + blocks * 512)
            }
            Self::Between(a, b) => {
                let (a, b) = (a.gfn::<F>(), b.gfn::<F>());
                (a.min(b), a.max(b) + 1)
            }
            Self::Region(at) => {
                let start = at.gfn::<F>() & !(GIGA - 1);
                (start, start + GIGA)
            }
            Self::All => (0, limit),
        };
        (start, end.min(limit))
    }

    /// At most a few pages of 2 MiB, so that mapping all frames one by one is fast enough.
    pub(crate) fn short<F: Format>(self) -> (u64, u64) {
        let (start, end) = self.ends::<F>();
        (start, end.min(start + 3 * 512))
    }
}

/// A target without its frame.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Grant {
    pub(crate) level: u32,
    pub(crate) access: Access,
    pub(crate) writes: Writes,
    /// Another frame than the one behind the page.
    pub(crate) wrong: bool,
}

#[derive(Clone, Debug)]
pub(crate) enum Op {
    /// A guest's access: through the TLB, the tables, the fast path, and the fault.
    Guest(At, Access, Grant),
    Fault(At, Access, Grant),
    Fast(At, Access),
    Look(At, Access),
    /// A fault that found no slot.
    MarkMmio(At, u64),
    /// A mark with an earlier ticket follows it.
    ForgetMmio(At),
    Zap(Span),
    ZapAll,
    Protect(Span),
    ProtectMask(At, u64),
    Clean(Span),
    CleanMask(At, u64),
    LogByFault(Span),
    LogByFaultMask(At, u64),
    Unlog(Span),
    SetWrites(Span, Writes),
    Age(Span, bool),
    Split(Span, u32),
    Recover(Span, Grant),
    /// The ranges that a notifier takes away. A fault comes meanwhile, and one with an earlier
    /// ticket afterwards.
    Invalidate(Vec<Span>, At, Grant),
    Deferred(Vec<Op>),
    /// The steps of a log's reader: it takes the bits, protects or cleans the pages, and flushes.
    TakeLog,
    LogOn(bool),
    Flush,
    Reclaim,
    /// The number of tables that the next fault, split or fast zap can allocate.
    Starve(usize),
    /// Another worker continues.
    OtherWorker,
}

/// Few distinct places, so that calls meet.
fn any_at() -> impl Strategy<Value = At> {
    let region = prop_oneof![6 => Just(0), 1 => 0..3_u8];
    let block = prop_oneof![4 => Just(0), 2 => Just(1), 1 => 0..4_u8];
    let page = prop_oneof![3 => Just(0), 2 => Just(1), 2 => 0..8_u8];
    (region, block, page).prop_map(|(region, block, page)| At {
        region,
        block,
        page,
    })
}

fn span() -> impl Strategy<Value = Span> {
    prop_oneof![
        3 => (any_at(), 1..140_u64).prop_map(|(at, pages)| Span::Pages(at, pages)),
        3 => (any_at(), 1..4_u64).prop_map(|(at, blocks)| Span::Blocks(at, blocks)),
        2 => (any_at(), any_at()).prop_map(|(a, b)| Span::Between(a, b)),
        1 => any_at().prop_map(Span::Region),
        1 => Just(Span::All),
    ]
}

fn access() -> impl Strategy<Value = Access> {
    prop_oneof![
        3 => Just(Access::READ),
        4 => Just(Access::READ_WRITE),
        1 => Just(Access::READ_EXECUTE),
        1 => Just(Access::ALL),
    ]
}

fn writes() -> impl Strategy<Value = Writes> {
    prop_oneof![
        1 => Just(Writes::HostForbids),
        1 => Just(Writes::MmuForbids),
        6 => Just(Writes::Allowed),
        3 => Just(Writes::AllowedLoggedByFault),
    ]
}

fn grant() -> impl Strategy<Value = Grant> {
    let access = prop_oneof![
        4 => Just(Access::ALL),
        1 => Just(Access::READ_EXECUTE),
        1 => Just(Access::READ_WRITE),
        1 => Just(Access::READ),
    ];
    let wrong = prop_oneof![30 => Just(false), 1 => Just(true)];
    (1..4_u32, access, writes(), wrong).prop_map(|(level, access, writes, wrong)| Grant {
        level,
        access,
        writes,
        wrong,
    })
}

fn generation() -> impl Strategy<Value = u64> {
    prop_oneof![3 => 0..3_u64, 1 => any::<u64>()]
}

fn mask() -> impl Strategy<Value = u64> {
    prop_oneof![
        Just(u64::MAX),
        Just(1),
        Just(1 << 63),
        any::<u64>(),
        Just(0),
        Just(0xff00)
    ]
}

/// Calls that may come inside `deferred`. The main case is a fault after something was taken away.
fn plain() -> impl Strategy<Value = Op> {
    prop_oneof![
        6 => (any_at(), access(), grant()).prop_map(|(at, access, grant)| Op::Fault(at, access, grant)),
        1 => (any_at(), access()).prop_map(|(at, access)| Op::Fast(at, access)),
        1 => (any_at(), access()).prop_map(|(at, access)| Op::Look(at, access)),
        4 => (any_at(), generation()).prop_map(|(at, generation)| Op::MarkMmio(at, generation)),
        1 => any_at().prop_map(Op::ForgetMmio),
        3 => span().prop_map(Op::Zap),
        2 => span().prop_map(Op::Protect),
        2 => (any_at(), mask()).prop_map(|(at, mask)| Op::ProtectMask(at, mask)),
        2 => span().prop_map(Op::Clean),
        2 => (any_at(), mask()).prop_map(|(at, mask)| Op::CleanMask(at, mask)),
        1 => span().prop_map(Op::LogByFault),
        1 => (any_at(), mask()).prop_map(|(at, mask)| Op::LogByFaultMask(at, mask)),
        1 => span().prop_map(Op::Unlog),
        1 => (span(), writes()).prop_map(|(span, writes)| Op::SetWrites(span, writes)),
        2 => (span(), any::<bool>()).prop_map(|(span, clear)| Op::Age(span, clear)),
        3 => (span(), 1..4_u32).prop_map(|(span, to)| Op::Split(span, to)),
        3 => (span(), grant()).prop_map(|(span, grant)| Op::Recover(span, grant)),
    ]
}

pub(crate) fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        24 => (any_at(), access(), grant()).prop_map(|(at, access, grant)| Op::Guest(at, access, grant)),
        30 => plain(),
        1 => Just(Op::ZapAll),
        3 => (prop::collection::vec(span(), 1..3), any_at(), grant())
            .prop_map(|(spans, at, grant)| Op::Invalidate(spans, at, grant)),
        5 => prop::collection::vec(plain(), 2..6).prop_map(Op::Deferred),
        4 => Just(Op::TakeLog),
        2 => any::<bool>().prop_map(Op::LogOn),
        1 => Just(Op::Flush),
        1 => Just(Op::Reclaim),
        2 => (0..4_usize).prop_map(Op::Starve),
        2 => Just(Op::OtherWorker),
    ]
}
