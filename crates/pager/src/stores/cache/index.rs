//! The index of a cache on disk: which slot has which block.
//!
//! **Guarantee.** Any bytes decode. A record that was not written whole, or belongs to another
//! slot, is passed over. A block has one slot at most.
//!
//! **Mechanism.** A record of 64 bytes a slot, with a checksum that covers the number of the slot.
//! The checksum of the block's bytes is in the record: a slot whose bytes are others is a miss.

use std::collections::{BTreeMap, HashMap};
use xxhash_rust::xxh3::xxh3_64_with_seed;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, little_endian};

/// The bytes of a record.
pub(super) const RECORD: u64 = size_of::<Record>() as u64;
/// Another number makes all records of older versions misses.
const VERSION: u64 = 0x7066_6361_6368_6501;

/// A record on disk.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct Record {
    key: [u8; 16],
    block: little_endian::U64,
    len: little_endian::U64,
    sum: little_endian::U64,
    used: little_endian::U64,
    reserved: [u8; 8],
    check: little_endian::U64,
}

/// A source, as the cache knows it.
pub(super) type Key = u128;

/// The contents of a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Entry {
    pub(super) key: Key,
    pub(super) block: u64,
    pub(super) len: u64,
    /// XXH3-64 of the bytes.
    pub(super) sum: u64,
    /// The place in the order of uses.
    used: u64,
}

impl Entry {
    fn record(&self, slot: u32) -> Record {
        let mut record = Record {
            key: self.key.to_le_bytes(),
            block: self.block.into(),
            len: self.len.into(),
            sum: self.sum.into(),
            used: self.used.into(),
            reserved: [0; 8],
            check: 0.into(),
        };
        record.check = check(&record, slot).into();
        record
    }
}

fn check(record: &Record, slot: u32) -> u64 {
    let covered = record.as_bytes().len() - size_of::<u64>();
    xxh3_64_with_seed(
        &record.as_bytes()[..covered],
        VERSION.wrapping_add(slot.into()),
    )
}

/// The slots of a cache.
#[derive(Debug)]
pub(super) struct Index {
    slots: u32,
    by_block: HashMap<(Key, u64), u32>,
    entries: HashMap<u32, Entry>,
    by_use: BTreeMap<u64, u32>,
    /// Slots that were given back.
    free: Vec<u32>,
    /// The first slot that was never used.
    fresh: u32,
    uses: u64,
}

impl Index {
    /// Decodes the index of a cache with this many slots, of which each has `block` bytes.
    pub(super) fn decode(bytes: &[u8], slots: u32, block: u64) -> Self {
        let mut index = Self {
            slots,
            by_block: HashMap::new(),
            entries: HashMap::new(),
            by_use: BTreeMap::new(),
            free: Vec::new(),
            fresh: 0,
            uses: 0,
        };
        let mut found = Vec::new();
        let records = bytes.chunks_exact(size_of::<Record>());
        for (slot, bytes) in (0..slots).zip(records) {
            let Ok(record) = Record::read_from_bytes(bytes) else {
                continue;
            };
            index.fresh = slot + 1;
            let entry = Entry {
                key: Key::from_le_bytes(record.key),
                block: record.block.get(),
                len: record.len.get(),
                sum: record.sum.get(),
                used: record.used.get(),
            };
            let whole = record.check.get() == check(&record, slot);
            if whole && (1..=block).contains(&entry.len) {
                found.push((slot, entry));
            } else {
                index.free.push(slot);
            }
        }
        // Counted anew: no number in a file may leave no room for more uses.
        found.sort_by_key(|(_, entry)| entry.used);
        for (slot, mut entry) in found {
            index.remove(entry.key, entry.block);
            entry.used = index.uses;
            index.insert(slot, entry);
        }
        index
    }

    fn insert(&mut self, slot: u32, entry: Entry) {
        self.uses += 1;
        self.by_block.insert((entry.key, entry.block), slot);
        self.by_use.insert(entry.used, slot);
        self.entries.insert(slot, entry);
    }

    /// All records, for a file that is written anew.
    pub(super) fn encode(&self) -> Vec<u8> {
        let mut bytes = vec![0; self.fresh as usize * size_of::<Record>()];
        for (slot, entry) in &self.entries {
            let at = *slot as usize * size_of::<Record>();
            bytes[at..at + size_of::<Record>()].copy_from_slice(entry.record(*slot).as_bytes());
        }
        bytes
    }

    /// The slot of a block. It counts as used now.
    pub(super) fn find(&mut self, key: Key, block: u64) -> Option<(u32, Entry)> {
        let slot = *self.by_block.get(&(key, block))?;
        let entry = self.entries.get_mut(&slot)?;
        self.by_use.remove(&entry.used);
        entry.used = self.uses;
        self.by_use.insert(self.uses, slot);
        self.uses += 1;
        Some((slot, *entry))
    }

    /// Takes a slot out of the index, to be written: one that is free, or the one that was used
    /// least recently. `None` if all are being written.
    pub(super) fn take(&mut self, may_grow: bool) -> Option<u32> {
        if let Some(slot) = self.free.pop() {
            return Some(slot);
        }
        if self.fresh < self.slots && may_grow {
            self.fresh += 1;
            return Some(self.fresh - 1);
        }
        let (_, slot) = self.by_use.pop_first()?;
        let entry = self.entries.remove(&slot)?;
        self.by_block.remove(&(entry.key, entry.block));
        Some(slot)
    }

    /// A slot that was taken has this block now. Returns its record.
    pub(super) fn put(
        &mut self,
        slot: u32,
        key: Key,
        block: u64,
        len: u64,
        sum: u64,
    ) -> impl IntoBytes + Immutable + use<> {
        self.remove(key, block);
        let entry = Entry {
            key,
            block,
            len,
            sum,
            used: self.uses,
        };
        self.insert(slot, entry);
        entry.record(slot)
    }

    /// A slot that was taken has nothing.
    pub(super) fn give_back(&mut self, slot: u32) {
        self.free.push(slot);
    }

    /// Forgets a block.
    pub(super) fn remove(&mut self, key: Key, block: u64) {
        if let Some(slot) = self.by_block.remove(&(key, block))
            && let Some(entry) = self.entries.remove(&slot)
        {
            self.by_use.remove(&entry.used);
            self.free.push(slot);
        }
    }

    /// Forgets the block of a slot, if it is still the same. Returns whether it is.
    pub(super) fn remove_damaged(&mut self, slot: u32, damaged: &Entry) -> bool {
        let now = self.entries.get(&slot);
        let same = now.is_some_and(|now| {
            (now.key, now.block, now.sum) == (damaged.key, damaged.block, damaged.sum)
        });
        if same {
            self.remove(damaged.key, damaged.block);
        }
        same
    }
}

/// For the fuzz target: decodes an index, also with its checksums put right, and uses it.
pub(super) fn fuzz(bytes: &[u8]) {
    fuzz_one(bytes);
    let mut whole = bytes.to_vec();
    let records = whole.chunks_exact_mut(size_of::<Record>());
    for (slot, bytes) in (0..).zip(records) {
        if let Ok(mut record) = Record::read_from_bytes(bytes) {
            record.check = check(&record, slot).into();
            bytes.copy_from_slice(record.as_bytes());
        }
    }
    fuzz_one(&whole);
}

fn fuzz_one(bytes: &[u8]) {
    let (slots, block) = (16, 4096);
    let mut index = Index::decode(bytes, slots, block);
    let found: Vec<_> = index.by_block.keys().copied().collect();
    for (key, block) in found {
        let (slot, entry) = index.find(key, block).expect("it was there");
        assert!(slot < slots && (1..=4096).contains(&entry.len));
    }
    let again = Index::decode(&index.encode(), slots, block);
    assert_eq!(again.by_block, index.by_block);
    assert!(again.by_use.values().eq(index.by_use.values()));
    for number in 0..2 * slots {
        let slot = index.take(true).expect("a slot");
        assert!(slot < slots);
        let _ = index.put(slot, 0, number.into(), 1, 0);
    }
    assert_eq!(index.entries.len(), slots as usize);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with(slots: u32, blocks: u64) -> Index {
        let mut index = Index::decode(&[], slots, 4096);
        for block in 0..blocks {
            let slot = index.take(true).unwrap();
            let _ = index.put(slot, 7, block, 4096, block);
        }
        index
    }

    #[test]
    fn the_block_that_was_used_least_recently_goes_first() {
        let mut index = with(3, 3);
        assert!(index.find(7, 0).is_some());
        let slot = index.take(true).unwrap();
        let _ = index.put(slot, 7, 3, 4096, 3);
        let there: Vec<_> = (0..4).map(|block| index.find(7, block).is_some()).collect();
        assert_eq!(there, [true, false, true, true]);
    }

    #[test]
    fn a_record_that_is_damaged_or_elsewhere_is_passed_over() {
        let bytes = with(3, 3).encode();
        for at in 0..bytes.len() {
            let mut damaged = bytes.clone();
            damaged[at] ^= 1;
            let index = Index::decode(&damaged, 3, 4096);
            assert_eq!(index.entries.len(), 2, "byte {at}");
        }
        let mut moved = bytes.clone();
        moved.copy_within(0..64, 64);
        assert_eq!(Index::decode(&moved, 3, 4096).entries.len(), 2);
        assert_eq!(Index::decode(&bytes[..130], 3, 4096).entries.len(), 2);
        assert_eq!(Index::decode(&bytes, 1, 4096).entries.len(), 1);
        assert!(Index::decode(&bytes, 3, 4095).entries.is_empty());
    }

    proptest::proptest! {
        #[test]
        fn any_bytes_decode(
            bytes in proptest::collection::vec(0_u8..4, 0..1200),
            damaged in 0_usize..1024,
        ) {
            fuzz(&bytes);
            let mut bytes = with(16, 20).encode();
            bytes[damaged] = bytes[damaged].wrapping_add(1);
            fuzz(&bytes);
        }
    }
}
