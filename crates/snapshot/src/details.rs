//! The details behind the index: its checksums, the bases, the labels, and the list of states.
//!
//! **Guarantee.** Decoded details have the checksum that the header says. Names of files are names:
//! none of them leaves its directory.

use crate::columns;
use crate::header::{Header, MAX_STATE_BYTES, SnapshotId};
use std::ffi::OsString;
use std::os::unix::ffi::{OsStrExt, OsStringExt};

/// A snapshot below a diff.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Base {
    /// Its id.
    pub id: SnapshotId,
    /// The name of its file when the diff was packed.
    pub name: OsString,
}

/// The labels of the VMM and the CPU that a snapshot needs. An empty text says nothing.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Labels {
    /// The VMM.
    pub vmm: String,
    /// Its version.
    pub version: String,
    /// The CPU.
    pub cpu: String,
}

/// The most bytes of a label.
pub(crate) const MAX_LABEL: usize = 256;

/// A state file in a snapshot: opaque bytes of a VMM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct State {
    /// Its name.
    pub name: String,
    /// Its length.
    pub bytes: u64,
    pub(crate) sum: u64,
}

/// Whether `name` can be that of a state: 1 to 64 letters, digits, `.`, `_` or `-`, not beginning
/// with a point.
pub(crate) fn is_state_name(name: &str) -> bool {
    let allowed = |c: u8| c.is_ascii_alphanumeric() || b"._-".contains(&c);
    (1..=64).contains(&name.len()) && !name.starts_with('.') && name.bytes().all(allowed)
}

/// Whether `name` names a file of a directory.
pub(crate) fn is_file_name(name: &[u8]) -> bool {
    (1..=255).contains(&name.len())
        && !name.iter().any(|byte| matches!(byte, b'/' | 0))
        && ![&b"."[..], b".."].contains(&name)
}

/// The details.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Details {
    /// For each block of the index, a checksum of each column.
    pub(crate) sums: Vec<u64>,
    pub(crate) bases: Vec<Base>,
    pub(crate) labels: Labels,
    /// Their bytes are back to back, in this order.
    pub(crate) states: Vec<State>,
}

impl Details {
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut out = Vec::new();
        for sum in &self.sums {
            out.extend_from_slice(&sum.to_le_bytes());
        }
        for base in &self.bases {
            out.extend_from_slice(&base.id.0);
            out.push(base.name.len() as u8);
            out.extend_from_slice(base.name.as_bytes());
        }
        for label in [&self.labels.vmm, &self.labels.version, &self.labels.cpu] {
            out.extend_from_slice(&(label.len() as u16).to_le_bytes());
            out.extend_from_slice(label.as_bytes());
        }
        for state in &self.states {
            out.push(state.name.len() as u8);
            out.extend_from_slice(state.name.as_bytes());
            out.extend_from_slice(&(state.bytes as u32).to_le_bytes());
            out.extend_from_slice(&state.sum.to_le_bytes());
        }
        out
    }

    /// # Errors
    /// The fault of the bytes.
    pub(crate) fn decode(bytes: &[u8], header: &Header) -> Result<Self, &'static str> {
        let mut rest = Rest(bytes);
        let sums = rest.take(columns::sums_bytes(&header.geometry) as usize)?;
        let sums = sums.as_chunks().0.iter().copied();
        let mut details = Self {
            sums: sums.map(u64::from_le_bytes).collect(),
            bases: Vec::new(),
            labels: Labels::default(),
            states: Vec::new(),
        };
        for _ in 0..header.bases {
            let id = SnapshotId(rest.array()?);
            let [length] = rest.array()?;
            let name = rest.take(length.into())?;
            if !is_file_name(name) {
                return Err("the name of a base is no file name");
            }
            let name = OsString::from_vec(name.to_vec());
            details.bases.push(Base { id, name });
        }
        let labels = &mut details.labels;
        for label in [&mut labels.vmm, &mut labels.version, &mut labels.cpu] {
            let length = u16::from_le_bytes(rest.array()?).into();
            if length > MAX_LABEL {
                return Err("a label is too long");
            }
            *label = rest.text(length)?;
        }
        let mut state_bytes = 0;
        for _ in 0..header.states {
            let [length] = rest.array()?;
            let name = rest.text(length.into())?;
            let is_new = details.states.iter().all(|state| state.name != name);
            if !is_state_name(&name) || !is_new {
                return Err("the name of a state is not allowed");
            }
            let bytes = u32::from_le_bytes(rest.array()?).into();
            if bytes > MAX_STATE_BYTES {
                return Err("a state is too long");
            }
            state_bytes += bytes;
            let sum = u64::from_le_bytes(rest.array()?);
            details.states.push(State { name, bytes, sum });
        }
        if !rest.0.is_empty() || state_bytes != header.state_bytes {
            return Err("their length does not fit what they say");
        }
        Ok(details)
    }

    /// The place of a state, from the first byte of the first.
    pub(crate) fn state_at(&self, index: usize) -> u64 {
        self.states[..index].iter().map(|state| state.bytes).sum()
    }
}

/// Bytes that are not decoded yet.
struct Rest<'a>(&'a [u8]);

impl<'a> Rest<'a> {
    fn take(&mut self, bytes: usize) -> Result<&'a [u8], &'static str> {
        let (taken, rest) = self.0.split_at_checked(bytes).ok_or("they end too early")?;
        self.0 = rest;
        Ok(taken)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], &'static str> {
        let taken = self.take(N)?;
        Ok(*taken.first_chunk().expect("as many bytes as were taken"))
    }

    fn text(&mut self, bytes: usize) -> Result<String, &'static str> {
        let text = str::from_utf8(self.take(bytes)?).map_err(|_| "a text is not UTF-8")?;
        Ok(text.to_owned())
    }
}
