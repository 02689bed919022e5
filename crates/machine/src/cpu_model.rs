//! Models of CPUs: the features that a guest sees, on whichever host of a cluster it runs.
//!
//! A model is an upper bound: words of feature bits, of which a guest sees those that its host
//! supports. The levels of the x86-64 psABI also have features that a host must support. The result
//! on one host is a [`Cpuid`], which travels with the guest.

use crate::MachineError;

/// A leaf of CPUID, or the bound for one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CpuidLeaf {
    /// EAX of the instruction.
    pub function: u32,
    /// ECX of the instruction, if it counts. Otherwise 0.
    pub index: u32,
    /// Whether `index` counts.
    pub by_index: bool,
    /// EAX, EBX, ECX and EDX of the result.
    pub registers: [u32; 4],
}

/// The most leaves of a [`Cpuid`], and of a model.
const MAX_LEAVES: usize = 256;
/// A leaf as bytes: seven little-endian words.
const LEAF_BYTES: usize = 28;

/// The CPUID of a PC's vCPUs, without their ids.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cpuid(Vec<CpuidLeaf>);

impl Cpuid {
    #[cfg(target_arch = "x86_64")]
    pub(crate) const fn new(leaves: Vec<CpuidLeaf>) -> Self {
        Self(leaves)
    }

    /// Its leaves.
    #[must_use]
    pub fn leaves(&self) -> &[CpuidLeaf] {
        &self.0
    }

    /// The bytes that travel. For each leaf: the function, the index, 1 if the index counts or else
    /// 0, EAX, EBX, ECX, EDX, each of 32 bits and little-endian.
    #[must_use]
    pub fn to_bytes(&self) -> Vec<u8> {
        let words = |leaf: &CpuidLeaf| {
            let [eax, ebx, ecx, edx] = leaf.registers;
            let by_index = leaf.by_index.into();
            [leaf.function, leaf.index, by_index, eax, ebx, ecx, edx]
        };
        let words = self.0.iter().flat_map(words);
        words.flat_map(u32::to_le_bytes).collect()
    }

    /// Decodes [`Self::to_bytes`]. The bytes are foreign.
    ///
    /// # Errors
    /// [`MachineError::BadState`] with the fault.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, MachineError> {
        let bad = |why| Err(MachineError::BadState(why));
        let (table, rest) = bytes.as_chunks::<LEAF_BYTES>();
        if !rest.is_empty() || !(1..=MAX_LEAVES).contains(&table.len()) {
            return bad(format!(
                "its CPUID has {} bytes, expected 1 to {MAX_LEAVES} leaves of {LEAF_BYTES}",
                bytes.len()
            ));
        }
        let mut leaves: Vec<CpuidLeaf> = Vec::with_capacity(table.len());
        for bytes in table {
            let mut words = bytes
                .as_chunks()
                .0
                .iter()
                .map(|word| u32::from_le_bytes(*word));
            let [function, index, by_index, eax, ebx, ecx, edx] =
                std::array::from_fn(|_| words.next().expect("seven words"));
            let known = |leaf: &CpuidLeaf| (leaf.function, leaf.index) == (function, index);
            // KVM takes a leaf whose index does not count for any index.
            if by_index > 1 || (by_index == 0 && index != 0) || leaves.iter().any(known) {
                return bad(format!(
                    "its CPUID has leaf {function:#x}.{index} with flags {by_index:#x}, expected \
                     each leaf once, with 1 if its index counts, or else with 0 and index 0"
                ));
            }
            leaves.push(CpuidLeaf {
                function,
                index,
                by_index: by_index == 1,
                registers: [eax, ebx, ecx, edx],
            });
        }
        Ok(Self(leaves))
    }
}

/// Function, index, and the bits of EAX, EBX, ECX and EDX.
type Row = (u32, u32, [u32; 4]);

const fn bits<const N: usize>(which: [u32; N]) -> u32 {
    let (mut all, mut i) = (0, 0);
    while i < N {
        all |= 1 << which[i];
        i += 1;
    }
    all
}

/// The features of every x86-64 (System V psABI, "Micro-Architecture Levels"), with TSC, MSR and
/// PAE, which long mode needs.
const BASELINE: &[Row] = &[
    (1, 0, [0, 0, 0, bits([0, 4, 5, 6, 8, 15, 23, 24, 25, 26])]),
    (0x8000_0001, 0, [0, 0, 0, bits([11, 29])]),
];
/// Those that x86-64-v2 adds: SSE3, SSSE3, CMPXCHG16B, SSE4.1, SSE4.2, POPCNT; LAHF.
const V2: &[Row] = &[
    (1, 0, [0, 0, bits([0, 9, 13, 19, 20, 23]), 0]),
    (0x8000_0001, 0, [0, 0, bits([0]), 0]),
];
/// Those that x86-64-v3 adds: FMA, MOVBE, XSAVE, AVX, F16C; BMI1, AVX2, BMI2; the registers of x87,
/// SSE and AVX; LZCNT.
const V3: &[Row] = &[
    (1, 0, [0, 0, bits([12, 22, 26, 28, 29]), 0]),
    (7, 0, [0, bits([3, 5, 8]), 0, 0]),
    (0xd, 0, [bits([0, 1, 2]), 0, 0, 0]),
    (0x8000_0001, 0, [0, 0, bits([5]), 0]),
];
/// Features that a level leaves as the host has them: those that every PC has, topology, those that
/// protect the guest's kernel (SMEP, SMAP, NX, the controls of speculation), and invariant TSC. EAX
/// of the last leaf is a number: the bits of a physical address.
const AS_HOST: &[Row] = &[
    (
        1,
        0,
        [0, 0, 0, bits([1, 2, 3, 7, 11, 12, 13, 14, 16, 17, 19])],
    ),
    (7, 0, [0, bits([7, 20]), 0, bits([10, 26, 27, 31])]),
    (
        0x8000_0001,
        0,
        // On AMD, EDX repeats bits of leaf 1.
        [0, 0, bits([1, 22]), 0x0183_f3ff | bits([20])],
    ),
    (0x8000_0007, 0, [0, 0, 0, bits([8])]),
    (0x8000_0008, 0, [46, bits([12, 14, 15, 24]), 0, 0]),
];

fn add(to: &mut Vec<CpuidLeaf>, rows: &[Row]) {
    for &(function, index, more) in rows {
        let same = |leaf: &&mut CpuidLeaf| (leaf.function, leaf.index) == (function, index);
        match to.iter_mut().find(same) {
            Some(leaf) => {
                (leaf.registers.iter_mut().zip(more)).for_each(|(all, more)| *all |= more);
            }
            None => to.push(CpuidLeaf {
                function,
                index,
                by_index: true,
                registers: more,
            }),
        }
    }
}

/// A model of a CPU. The default is the host's own CPU, with all that its KVM supports.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CpuModel {
    /// The features that a host must support.
    pub(crate) required: Vec<CpuidLeaf>,
    /// The features that a guest sees at most. `None`: all.
    pub(crate) most: Option<Vec<CpuidLeaf>>,
    /// Without the features that forced poison cannot serve.
    pub(crate) for_poison: bool,
}

/// The reason why a text is no CPU model.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CpuModelError {
    /// A line has too few numbers, or too many.
    #[error("line {line} has {found} words, expected 6: LEAF SUBLEAF EAX EBX ECX EDX")]
    Words {
        /// The line, from 1.
        line: usize,
        /// The number of words.
        found: usize,
    },
    /// A word is no number.
    #[error("line {line} has '{}', expected a hexadecimal number of 32 bits", .word.escape_debug())]
    Number {
        /// The line, from 1.
        line: usize,
        /// The word, or its begin.
        word: String,
    },
    /// A leaf occurs twice.
    #[error("line {line} repeats leaf {function:#x}.{index}, expected each leaf once")]
    Twice {
        /// The line, from 1.
        line: usize,
        /// The leaf.
        function: u32,
        /// The subleaf.
        index: u32,
    },
    /// There are too many leaves.
    #[error("line {line} is beyond {MAX_LEAVES} leaves, expected at most so many")]
    TooMany {
        /// The line, from 1.
        line: usize,
    },
    /// It hides features without which no kernel runs.
    #[error(
        "it has {register} = {found:#x} in leaf {function:#x}, expected all bits of {wanted:#x}, \
         which every x86-64 processor has"
    )]
    Baseline {
        /// The leaf.
        function: u32,
        /// The register.
        register: &'static str,
        /// Its bits in the text.
        found: u32,
        /// The bits that it must have.
        wanted: u32,
    },
}

/// The names of [`CpuidLeaf::registers`].
pub(crate) const REGISTERS: [&str; 4] = ["EAX", "EBX", "ECX", "EDX"];

impl CpuModel {
    /// The most bytes of a text that a caller should pass to [`Self::from_text`].
    pub const MAX_TEXT_BYTES: u64 = 64 << 10;

    /// The model of this name: `host`, `x86-64-v2` or `x86-64-v3`.
    #[must_use]
    pub fn named(name: &str) -> Option<Self> {
        let levels: &[&[Row]] = match name {
            "host" => return Some(Self::default()),
            "x86-64-v2" => &[BASELINE, V2],
            "x86-64-v3" => &[BASELINE, V2, V3],
            _ => return None,
        };
        let mut required = Vec::new();
        levels.iter().for_each(|rows| add(&mut required, rows));
        let mut most = required.clone();
        add(&mut most, AS_HOST);
        Some(Self {
            required,
            most: Some(most),
            for_poison: false,
        })
    }

    /// This model without the features of KVM that [`Delivery::Poison`](crate::Delivery) cannot
    /// serve: steal time, and those that rely on it. A destination that forces poison takes such a
    /// guest.
    #[must_use]
    pub const fn for_poison(mut self) -> Self {
        self.for_poison = true;
        self
    }

    /// The model of a text with one line for each leaf: `LEAF SUBLEAF EAX EBX ECX EDX` in
    /// hexadecimal. `#` begins a comment. A guest sees no feature that is not in it. Registers
    /// without features may have any value, so a list of another host's CPUID serves.
    ///
    /// # Errors
    /// [`CpuModelError`] with the line, and what was expected.
    pub fn from_text(text: &str) -> Result<Self, CpuModelError> {
        let mut most: Vec<CpuidLeaf> = Vec::new();
        for (line, content) in (1..).zip(text.lines()) {
            let content = content.split('#').next().unwrap_or_default();
            let words: Vec<&str> = content.split_whitespace().collect();
            if words.is_empty() {
                continue;
            }
            let words: [&str; 6] = words.as_slice().try_into().map_err(|_| {
                let found = words.len();
                CpuModelError::Words { line, found }
            })?;
            let mut numbers = [0; 6];
            for (number, word) in numbers.iter_mut().zip(words) {
                *number = parse_hex(word).ok_or_else(|| CpuModelError::Number {
                    line,
                    word: word.chars().take(20).collect(),
                })?;
            }
            let [function, index, eax, ebx, ecx, edx] = numbers;
            if find(&most, function, index).is_some() {
                return Err(CpuModelError::Twice {
                    line,
                    function,
                    index,
                });
            }
            if most.len() == MAX_LEAVES {
                return Err(CpuModelError::TooMany { line });
            }
            add(&mut most, &[(function, index, [eax, ebx, ecx, edx])]);
        }
        for &(function, index, wanted) in BASELINE {
            let found = find(&most, function, index).map_or([0; 4], |leaf| leaf.registers);
            let lacks = |&reg: &usize| wanted[reg] & !found[reg] != 0;
            if let Some(reg) = (0..4).find(lacks) {
                return Err(CpuModelError::Baseline {
                    function,
                    register: REGISTERS[reg],
                    found: found[reg],
                    wanted: wanted[reg],
                });
            }
        }
        Ok(Self {
            required: Vec::new(),
            most: Some(most),
            for_poison: false,
        })
    }
}

pub(crate) fn find(leaves: &[CpuidLeaf], function: u32, index: u32) -> Option<&CpuidLeaf> {
    let same = |leaf: &&CpuidLeaf| (leaf.function, leaf.index) == (function, index);
    leaves.iter().find(same)
}

/// A number of up to 32 bits. The signs that the standard library takes are no digits.
fn parse_hex(word: &str) -> Option<u32> {
    let digits = word.strip_prefix("0x").unwrap_or(word);
    let plain = digits.bytes().all(|byte| byte.is_ascii_hexdigit());
    plain
        .then(|| u32::from_str_radix(digits, 16).ok())
        .flatten()
}

#[cfg(test)]
mod tests;
