//! The interrupt controller of soft machines: a PLIC.
//!
//! **Guarantee.** An interrupt that a device raises reaches a hart that has enabled it, unless the
//! guest turns it off. No access of a guest has another effect than on its own interrupts.
//!
//! **Mechanism.** The registers are those of the RISC-V Platform-Level Interrupt Controller
//! Specification 1.0.0. Context `n` is the supervisor mode of hart `n`. Sources take edges, as
//! [`Interrupt`] gives them: an edge that comes while its source is served stays pending. After
//! each change, the external interrupts of all harts follow from the registers.
//!
//! **Neighbours.** [`super::vcpu`] brings the harts' accesses, [`crate::board`] has the addresses.

use super::harts::Harts;
use crate::board::{PLIC, PLIC_CONTEXT_BYTES, PLIC_CONTEXTS, PLIC_SOURCES};
use crate::{Apply, Device, Interrupt, MachineError};
use pageferry_addr::Gpa;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The highest priority.
const HIGHEST: u32 = 7;
/// The sources that exist: 0 means none.
const SOURCES: u32 = !1;
const _: () = assert!(PLIC_SOURCES == 31);

/// The offsets of the registers.
const PENDING: u64 = 0x1000;
const ENABLE: u64 = 0x2000;
const ENABLE_BYTES: u64 = 0x80;
const CLAIM: u64 = 4;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Context {
    enabled: u32,
    threshold: u32,
}

/// The registers. Bit `n` of a word is source `n`.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Registers {
    pending: u32,
    /// The sources that a hart has claimed and not completed.
    claimed: u32,
    priorities: [u32; 32],
    contexts: Box<[Context]>,
}

/// The register at an offset.
enum Register {
    Priority(usize),
    Pending,
    Enabled(usize),
    Threshold(usize),
    Claim(usize),
}

impl Register {
    /// The register at `offset`, of a controller with `contexts` contexts.
    fn at(offset: u64, contexts: usize) -> Option<Self> {
        let context = |index: u64| usize::try_from(index).ok().filter(|n| *n < contexts);
        if let Some(offset) = offset.checked_sub(PLIC_CONTEXTS) {
            let context = context(offset / PLIC_CONTEXT_BYTES)?;
            return match offset % PLIC_CONTEXT_BYTES {
                0 => Some(Self::Threshold(context)),
                CLAIM => Some(Self::Claim(context)),
                _ => None,
            };
        }
        if let Some(offset) = offset.checked_sub(ENABLE) {
            let context = context(offset / ENABLE_BYTES)?;
            return offset
                .is_multiple_of(ENABLE_BYTES)
                .then_some(Self::Enabled(context));
        }
        match offset {
            PENDING => Some(Self::Pending),
            4..=0x7c if offset.is_multiple_of(4) => Some(Self::Priority(offset as usize / 4)),
            _ => None,
        }
    }
}

impl Registers {
    fn new(contexts: usize) -> Self {
        Self {
            pending: 0,
            claimed: 0,
            priorities: [0; 32],
            contexts: vec![Context::default(); contexts].into(),
        }
    }

    /// The pending source of the highest priority for `context`, and of several the first.
    fn best(&self, context: Context) -> Option<u32> {
        let waiting = self.pending & !self.claimed & context.enabled;
        let sources = (1..32).filter(|source| waiting >> source & 1 != 0);
        // Of equal ones, `max_by_key` takes the last.
        let best = sources.rev().max_by_key(|source| self.priority(*source))?;
        (self.priority(best) > 0).then_some(best)
    }

    fn priority(&self, source: u32) -> u32 {
        self.priorities[source as usize]
    }

    /// Whether the hart of `context` has an external interrupt.
    fn interrupts(&self, context: Context) -> bool {
        let best = self.best(context);
        best.is_some_and(|source| self.priority(source) > context.threshold)
    }

    fn read(&mut self, offset: u64) -> u32 {
        match Register::at(offset, self.contexts.len()) {
            Some(Register::Priority(source)) => self.priorities[source],
            Some(Register::Pending) => self.pending,
            Some(Register::Enabled(context)) => self.contexts[context].enabled,
            Some(Register::Threshold(context)) => self.contexts[context].threshold,
            // The threshold does not count here.
            Some(Register::Claim(context)) => {
                self.best(self.contexts[context]).map_or(0, |source| {
                    self.pending &= !(1 << source);
                    self.claimed |= 1 << source;
                    source
                })
            }
            None => 0,
        }
    }

    fn write(&mut self, offset: u64, value: u32) {
        match Register::at(offset, self.contexts.len()) {
            Some(Register::Priority(source)) => self.priorities[source] = value & HIGHEST,
            Some(Register::Enabled(context)) => self.contexts[context].enabled = value & SOURCES,
            Some(Register::Threshold(context)) => {
                self.contexts[context].threshold = value & HIGHEST;
            }
            // A source that is not enabled here is not completed.
            Some(Register::Claim(context)) if value < 32 => {
                self.claimed &= !(1 << value & self.contexts[context].enabled);
            }
            Some(Register::Claim(_) | Register::Pending) | None => {}
        }
    }

    /// The state: pending and claimed sources (u32 each), the priorities of the sources 0 to 31
    /// (u8 each), and for each context the enabled sources and the threshold (u32 each).
    fn encode(&self) -> Vec<u8> {
        let mut bytes = [self.pending, self.claimed].map(u32::to_le_bytes).concat();
        bytes.extend(self.priorities.map(|priority| priority as u8));
        for context in &self.contexts {
            bytes.extend(context.enabled.to_le_bytes());
            bytes.extend(context.threshold.to_le_bytes());
        }
        bytes
    }

    /// # Errors
    /// The words say what was wrong, and what would be right.
    fn decode(bytes: &[u8], contexts: usize) -> Result<Self, String> {
        let expected = 40 + 8 * contexts;
        if bytes.len() != expected {
            let has = bytes.len();
            return Err(format!("{has} bytes, expected {expected}"));
        }
        let word = |at: usize| u32::from_le_bytes(*bytes[at..].first_chunk().expect("was checked"));
        let mut found = Self::new(contexts);
        (found.pending, found.claimed) = (word(0), word(4));
        found.priorities = std::array::from_fn(|source| bytes[8 + source].into());
        for (index, context) in found.contexts.iter_mut().enumerate() {
            let at = 40 + 8 * index;
            (context.enabled, context.threshold) = (word(at), word(at + 4));
        }
        let enabled = found.contexts.iter().map(|context| context.enabled);
        let words = [found.pending, found.claimed].into_iter().chain(enabled);
        if words.into_iter().any(|word| word & !SOURCES != 0) || found.priorities[0] != 0 {
            return Err("it has a source 0, expected sources 1 to 31".into());
        }
        let thresholds = found.contexts.iter().map(|context| context.threshold);
        let mut levels = found.priorities.into_iter().chain(thresholds);
        match levels.find(|level| *level > HIGHEST) {
            Some(high) => Err(format!(
                "a priority or threshold of {high}, expected at most {HIGHEST}"
            )),
            None => Ok(found),
        }
    }
}

/// See the module.
pub(super) struct Plic {
    state: Mutex<State>,
    harts: Arc<Harts>,
}

struct State {
    registers: Registers,
    /// Which harts have been told that they have an external interrupt.
    told: Box<[bool]>,
}

impl Plic {
    pub(super) fn new(harts: &Arc<Harts>) -> Arc<Self> {
        let contexts = harts.count() as usize;
        Arc::new(Self {
            state: Mutex::new(State {
                registers: Registers::new(contexts),
                told: vec![false; contexts].into(),
            }),
            harts: Arc::clone(harts),
        })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes the registers, and the external interrupts of the harts that follow from them.
    fn change<T>(&self, change: impl FnOnce(&mut Registers) -> T) -> T {
        let State { registers, told } = &mut *self.state();
        let result = change(registers);
        for (hart, (context, told)) in (0..).zip(registers.contexts.iter().zip(told)) {
            let pending = registers.interrupts(*context);
            if *told != pending {
                *told = pending;
                self.harts.set_external(hart, pending); // Under the lock, so in order.
            }
        }
        result
    }

    /// The offset of `gpa`, if it is an address of the controller.
    pub(super) fn offset(gpa: Gpa) -> Option<u64> {
        PLIC.contains(&gpa.0).then(|| gpa.0 - PLIC.start)
    }

    /// Reads `size` bytes. Only words that are aligned have contents.
    pub(super) fn read(&self, offset: u64, size: u8) -> u64 {
        match size {
            4 => self.change(|registers| registers.read(offset)).into(),
            _ => 0,
        }
    }

    /// Writes `size` bytes of `value`. Only words that are aligned are taken.
    pub(super) fn write(&self, offset: u64, value: u64, size: u8) {
        if size == 4 {
            self.change(|registers| registers.write(offset, value as u32));
        }
    }

    /// The line of `source`, if there is one.
    pub(super) fn line(self: &Arc<Self>, source: u32) -> Option<Arc<dyn Interrupt>> {
        (1..=PLIC_SOURCES).contains(&source).then(|| {
            let plic = Arc::clone(self);
            Arc::new(Line { plic, source }) as _
        })
    }
}

struct Line {
    plic: Arc<Plic>,
    source: u32,
}

impl Interrupt for Line {
    fn raise(&self) {
        self.plic
            .change(|registers| registers.pending |= 1 << self.source);
    }
}

impl Device for Plic {
    fn name(&self) -> &str {
        "plic"
    }

    fn version(&self) -> u32 {
        1
    }

    fn pause(&self) -> Result<(), MachineError> {
        Ok(()) // It does no work of its own.
    }

    /// Tells all harts, which may have been restored since.
    fn resume(&self) {
        let State { registers, told } = &mut *self.state();
        for (hart, (context, told)) in (0..).zip(registers.contexts.iter().zip(told)) {
            *told = registers.interrupts(*context);
            self.harts.set_external(hart, *told);
        }
    }

    fn save(&self) -> Result<Vec<u8>, MachineError> {
        Ok(self.state().registers.encode())
    }

    fn decode<'a>(&'a self, _: u32, bytes: &[u8]) -> Result<Apply<'a>, MachineError> {
        let decoded = Registers::decode(bytes, self.harts.count() as usize);
        let refused = |why| MachineError::Device(format!("the interrupt controller: {why}"));
        let registers = decoded.map_err(refused)?;
        Ok(Box::new(move || self.state().registers = registers))
    }
}

#[cfg(test)]
mod tests;
