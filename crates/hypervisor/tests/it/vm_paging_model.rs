//! Translation against a plain model: random tables, accesses in random views, and fences.
//!
//! [`translate`] is the specification's algorithm, step by step ("Virtual Address Translation
//! Process"). It knows no cache. The model of caching is a history: the tables after each change,
//! and the fences between. A hart may use a leaf as it was at some time, unless a fence that covers
//! the leaf came after that time. A fault, and a store that needs new rights, must agree with the
//! present tables.

use crate::support::paging::{
    A, As, D, G, Guest, Kind, MXR, Outcome, R, SUM, Scheme, U, V, W, X, pte,
};
use crate::support::vm::PAGE;
use pageferry_hypervisor::hart::Mode;
use proptest::prelude::*;

/// Pages of RAM: the code, tables, and data. Superpages of 2 MiB need aligned data.
const PAGES: u64 = 1024;
/// The tables. The first four are roots, one for each ASID; the others are for lower levels.
const TABLES: std::ops::Range<u64> = 8..18;
const ROOTS: u64 = 4;
/// The word of each page that accesses use, and the one that tells pages apart.
const WORD: u64 = 0xa00;

/// The outcome that the specification gives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Expected {
    Page(u64),
    Fault,
    /// There is no memory for a table, or for the page.
    Nothing,
}

/// A leaf on the way to an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Found {
    expected: Expected,
    level: u32,
    global: bool,
}

/// All tables at some time.
type Tables = Vec<[u64; 512]>;

/// The virtual address translation process. `tables` are those of [`TABLES`] and the fixed ones,
/// by frame.
fn translate(tables: &Tables, scheme: Scheme, root: u64, view: As, kind: Kind, va: u64) -> Found {
    let fault = |expected| Found {
        expected,
        level: 0,
        global: false,
    };
    let bits = 12 + 9 * scheme.levels();
    let sign = va >> (bits - 1);
    if sign != 0 && sign != u64::MAX >> (bits - 1) {
        return fault(Expected::Fault);
    }
    // 1. Let a be satp.ppn, and let i = LEVELS - 1.
    let (mut a, mut i) = (root, scheme.levels() - 1);
    let mut global = false;
    let entry = loop {
        // 2. Let pte be the value of the entry. If this violates a PMA check: an access fault.
        let Some(table) = tables.get(a as usize) else {
            // A frame with data, or none.
            let expected = if a < PAGES {
                Expected::Fault
            } else {
                Expected::Nothing
            };
            return fault(expected);
        };
        let pte = table[(va >> (12 + 9 * i) & 511) as usize];
        // 3. If pte.v = 0, or if pte.r = 0 and pte.w = 1, or if reserved bits are set: a fault.
        if pte & V == 0 || pte & R == 0 && pte & W != 0 || pte >> 54 != 0 {
            return fault(Expected::Fault);
        }
        global |= pte & G != 0;
        // 4. If pte.r = 1 or pte.x = 1, go to step 5. Otherwise it is a pointer.
        if pte & (R | X) != 0 {
            break pte;
        }
        if pte & (U | A | D) != 0 || i == 0 {
            return fault(Expected::Fault);
        }
        (a, i) = (pte >> 10, i - 1);
    };
    // 5. A superpage that is not aligned is a fault.
    let ppn = entry >> 10;
    let low = (1 << (9 * i)) - 1;
    if ppn & low != 0 {
        return fault(Expected::Fault);
    }
    // 6. and 7. The rights, by mode, SUM and MXR.
    let user = entry & U != 0;
    let sum = view.status & SUM != 0;
    let right_mode = match view.mode {
        Mode::User => user,
        Mode::Supervisor => !user || sum && kind != Kind::Fetch,
    };
    let readable = entry & R != 0 || view.status & MXR != 0 && entry & X != 0;
    let right = match kind {
        Kind::Load => readable,
        Kind::Store => entry & W != 0,
        Kind::Fetch => entry & X != 0,
    };
    if !right_mode || !right {
        return fault(Expected::Fault);
    }
    // 9. (Svade) If pte.a = 0, or if the access is a store and pte.d = 0: a fault.
    if entry & A == 0 || kind == Kind::Store && entry & D == 0 {
        return fault(Expected::Fault);
    }
    // 10. The translation is successful.
    let page = ppn | va >> 12 & low;
    let expected = if page < PAGES {
        Expected::Page(page)
    } else {
        Expected::Nothing
    };
    Found {
        expected,
        level: i,
        global,
    }
}

#[derive(Clone, Debug)]
enum Step {
    Set {
        table: u64,
        index: u64,
        entry: u64,
    },
    /// Sets the entry that ends the walk to `va`.
    Remap {
        asid: u64,
        va: u64,
        entry: u64,
    },
    Access {
        asid: u64,
        mode: Mode,
        status: u64,
        kind: Kind,
        va: u64,
    },
    Fence {
        va: Option<u64>,
        asid: Option<u64>,
    },
}

/// Few entries of each table are used, so that steps meet.
fn index() -> impl Strategy<Value = u64> {
    prop_oneof![8 => Just(0), 8 => Just(1), 1 => Just(2), 1 => Just(255)]
}

fn address() -> impl Strategy<Value = u64> {
    (prop::collection::vec(index(), 4), 0..12_u32).prop_map(|(indexes, bad)| {
        let va = indexes
            .iter()
            .enumerate()
            .fold(WORD, |va, (level, index)| va | index << (12 + 9 * level));
        // Sometimes a bit that Sv39 does not translate is set.
        if bad == 0 { va } else { va & (u64::MAX >> 26) }
    })
}

fn entry() -> impl Strategy<Value = u64> {
    let frame = prop_oneof![
        4 => TABLES,
        4 => TABLES.end..PAGES,
        // Aligned to 2 MiB, and to 1 GiB.
        3 => prop_oneof![Just(0), Just(512)],
        1 => Just(1 << 30),
    ];
    let bits = prop_oneof![
        3 => Just(V),
        1 => Just(V | G),
        8 => prop_oneof![4 => Just(0), 4 => Just(U), 1 => Just(G), 1 => Just(U | G)]
            .prop_map(|bits| bits | V | R | W | X | A | D),
        2 => (0..256_u64).prop_map(|bits| bits | V),
        1 => Just(V | X | A),
        1 => Just(V | X | A | U),
        2 => Just(0),
        1 => (54..64_u32).prop_map(|bit| V | R | A | 1_u64 << bit),
    ];
    (frame, bits).prop_map(|(frame, bits)| pte(frame, bits))
}

fn step() -> impl Strategy<Value = Step> {
    let status = prop_oneof![Just(0), Just(SUM), Just(MXR), Just(SUM | MXR)];
    let mode = prop_oneof![Just(Mode::User), Just(Mode::Supervisor)];
    // Fetches need code at the page, so the model executes loads and stores only.
    let kind = prop_oneof![Just(Kind::Load), Just(Kind::Store)];
    prop_oneof![
        1 => (TABLES, index(), entry())
            .prop_map(|(table, index, entry)| Step::Set { table, index, entry }),
        8 => (0..ROOTS, mode, status, kind, address()).prop_map(
            |(asid, mode, status, kind, va)| Step::Access { asid, mode, status, kind, va }
        ),
        3 => (0..ROOTS, address(), entry())
            .prop_map(|(asid, va, entry)| Step::Remap { asid, va, entry }),
        2 => (prop::option::of(address()), prop::option::of(0..ROOTS))
            .prop_map(|(va, asid)| Step::Fence { va, asid }),
    ]
}

struct Model {
    guest: Guest,
    scheme: Scheme,
    /// The tables after each change, by frame.
    history: Vec<Tables>,
    /// Each fence, with the number of changes before it.
    fences: Vec<(usize, Option<u64>, Option<u64>)>,
    token: u64,
}

impl Model {
    fn new(scheme: Scheme) -> Self {
        let guest = Guest::new(PAGES as usize);
        let leaf = V | R | W | X | A | D;
        // Roots, for Sv48 the level below them, and then two levels of which the upper has a
        // pointer and a superpage each.
        for asid in 0..ROOTS {
            let below = if scheme == Scheme::Sv48 { 16 } else { 12 };
            for index in 0..2 {
                guest.set(
                    TABLES.start + asid,
                    index,
                    pte(below + (index + asid) % 2, V),
                );
            }
        }
        for index in 0..2 {
            for table in 0..2 {
                guest.set(16 + table, index, pte(12 + (table + index) % 2, V));
                let page = pte(
                    100 + 2 * table + index,
                    leaf | (U * (index ^ table)) | (G * table),
                );
                guest.set(14 + table, index, page);
            }
        }
        for (table, bits) in [(0, U), (1, G)] {
            guest.set(12 + table, table, pte(14 + table, V));
            guest.set(12 + table, 1 - table, pte(512 * table, leaf | bits));
        }
        let mut tables = vec![[0; 512]; TABLES.end as usize];
        for asid in 0..ROOTS {
            guest.make_root(scheme, TABLES.start + asid);
        }
        for (page, table) in tables.iter_mut().enumerate() {
            for (index, entry) in table.iter_mut().enumerate() {
                *entry = guest.ram.get(page as u64 * PAGE + index as u64 * 8);
            }
        }
        for page in TABLES.end..PAGES {
            guest.ram.set(page * PAGE + WORD, page << 32);
        }
        Self {
            guest,
            scheme,
            history: vec![tables],
            fences: Vec::new(),
            token: 0,
        }
    }

    /// Whether a fence has ended the leaf for `va` that `found` was at time `time`.
    fn is_fenced(&self, time: usize, own: u64, va: u64, found: Found) -> bool {
        self.fences.iter().any(|&(at, address, asid)| {
            let shift = 12 + 9 * found.level;
            let covers_address = address.is_none_or(|address| address >> shift == va >> shift);
            let covers_space = asid.is_none_or(|asid| asid == own && !found.global);
            at > time && covers_address && covers_space
        })
    }

    /// All pages that the access may reach, and whether it may fail, and how.
    fn outcomes(&self, own: u64, view: As, kind: Kind, va: u64) -> (Vec<u64>, Option<Expected>) {
        let root = TABLES.start + own;
        let now = self.history.len() - 1;
        let mut pages = Vec::new();
        for (time, tables) in self.history.iter().enumerate() {
            let found = translate(tables, self.scheme, root, view, kind, va);
            if let Expected::Page(page) = found.expected
                && (time == now || !self.is_fenced(time, own, va, found))
            {
                pages.push(page);
            }
            // A global leaf may have come by the tables of another address space.
            for other in 0..ROOTS {
                let root = TABLES.start + other;
                let found = translate(tables, self.scheme, root, view, kind, va);
                if let Expected::Page(page) = found.expected
                    && found.global
                    && (time == now || !self.is_fenced(time, own, va, found))
                {
                    pages.push(page);
                }
            }
        }
        let found = translate(&self.history[now], self.scheme, root, view, kind, va);
        let failure = match found.expected {
            Expected::Page(_) => None,
            failure => Some(failure),
        };
        (pages, failure)
    }

    fn access(&mut self, own: u64, view: As, kind: Kind, va: u64) -> Result<(), TestCaseError> {
        let (pages, failure) = self.outcomes(own, view, kind, va);
        // A store into a table would change the tables: its page's word is no entry in use.
        self.token += 1;
        let token = self.token;
        let outcome = self.guest.access(view, kind, va, token);
        let (page_fault, access_fault) = match kind {
            Kind::Load => (13, 5),
            _ => (15, 7),
        };
        let reached = |page: &&u64| {
            let word = self.guest.ram.get(**page * PAGE + WORD);
            match (kind, outcome) {
                (Kind::Load, Outcome::Done(value)) => value == word,
                (_, Outcome::Done(_)) => word == token,
                _ => false,
            }
        };
        let page = pages.iter().find(reached).copied();
        let as_failed = match outcome {
            Outcome::Done(_) => page.is_some(),
            Outcome::Trap(cause, stval) if stval == va => match failure {
                Some(Expected::Fault) => cause == page_fault,
                Some(Expected::Nothing) => cause == access_fault,
                _ => false,
            },
            // A device at the frame 2^30.
            Outcome::Exit(_) => failure == Some(Expected::Nothing),
            Outcome::Trap(..) => false,
        };
        prop_assert!(
            as_failed,
            "{kind:?} {view:x?} {va:#x}: {outcome:x?}, expected one of {pages:x?} or {failure:?}"
        );
        if kind == Kind::Store
            && let Some(page) = page
        {
            self.guest.ram.set(page * PAGE + WORD, page << 32);
        }
        Ok(())
    }

    fn set(&mut self, table: u64, index: u64, entry: u64) {
        self.guest.set(table, index, entry);
        let mut tables = self.history.last().unwrap().clone();
        tables[table as usize][index as usize] = entry;
        self.history.push(tables);
    }

    /// The table and index of the first entry for `va` that is no pointer to a table.
    fn end_of_walk(&self, asid: u64, va: u64) -> (u64, u64) {
        let tables = self.history.last().unwrap();
        let mut table = TABLES.start + asid;
        for level in (0..self.scheme.levels()).rev() {
            let index = va >> (12 + 9 * level) & 511;
            let entry = tables[table as usize][index as usize];
            if level == 0 || entry & (V | R | X) != V || !TABLES.contains(&(entry >> 10)) {
                return (table, index);
            }
            table = entry >> 10;
        }
        unreachable!("level 0 ends the walk")
    }

    fn step(&mut self, step: &Step) -> Result<(), TestCaseError> {
        let satp = |asid| self.scheme.satp(asid, TABLES.start + asid);
        match *step {
            Step::Set {
                table,
                index,
                entry,
            } => self.set(table, index, entry),
            Step::Remap { asid, va, entry } => {
                let (table, index) = self.end_of_walk(asid, va);
                if TABLES.contains(&table) {
                    self.set(table, index, entry);
                }
            }
            Step::Access {
                asid,
                mode,
                status,
                kind,
                va,
            } => {
                let view = As {
                    satp: satp(asid),
                    mode,
                    status,
                };
                self.access(asid, view, kind, va)?;
            }
            Step::Fence { va, asid } => {
                self.guest.fence(satp(asid.unwrap_or(0)), va, asid);
                self.fences.push((self.history.len() - 1, va, asid));
            }
        }
        Ok(())
    }
}

fn run(scheme: Scheme, steps: &[Step]) -> Result<(), TestCaseError> {
    let mut model = Model::new(scheme);
    steps.iter().try_for_each(|step| model.step(step))
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 768, ..ProptestConfig::default() })]

    #[test]
    fn a_hart_translates_like_the_specification_in_sv39(
        steps in prop::collection::vec(step(), 1..200),
    ) {
        run(Scheme::Sv39, &steps)?;
    }

    #[test]
    fn a_hart_translates_like_the_specification_in_sv48(
        steps in prop::collection::vec(step(), 1..200),
    ) {
        run(Scheme::Sv48, &steps)?;
    }
}
