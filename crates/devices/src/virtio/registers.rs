//! The registers of a transport, and their bytes in a state: little-endian, of a fixed length.

use virtio_queue::{Queue, QueueState};

/// The most entries of a queue.
pub(super) const MOST_ENTRIES: u16 = 256;

/// The registers, as a driver has set them.
#[derive(Clone, Default, Debug, PartialEq, Eq)]
pub(super) struct Registers {
    pub(super) device_half: u32,
    pub(super) driver_half: u32,
    pub(super) selected: u32,
    pub(super) status: u32,
    pub(super) interrupt: u32,
    pub(super) features: u64,
    /// All requests of a queue are answered in order: its positions in both rings are equal.
    pub(super) queues: Vec<QueueState>,
}

const QUEUE: usize = 29;
const HEAD: usize = 28;
/// The bits of the status, without the one that is reserved for later.
const STATUS: u32 = 0xcf;

/// A queue that no driver has set up.
const UNUSED: QueueState = QueueState {
    max_size: MOST_ENTRIES,
    next_avail: 0,
    next_used: 0,
    event_idx_enabled: false,
    size: MOST_ENTRIES,
    ready: false,
    desc_table: 0,
    avail_ring: 0,
    used_ring: 0,
};

impl Registers {
    /// Those of a device with so many queues, after a reset.
    pub(super) fn new(queues: usize) -> Self {
        Self {
            queues: vec![UNUSED; queues],
            ..Self::default()
        }
    }

    /// Forgets what a driver has set.
    pub(super) fn reset(&mut self) {
        *self = Self::new(self.queues.len());
    }

    /// Forgets the selected queue.
    pub(super) fn reset_queue(&mut self) {
        if let Some(queue) = self.queues.get_mut(self.selected as usize) {
            *queue = UNUSED;
        }
    }

    pub(super) fn encode(&self) -> Vec<u8> {
        let words = [self.device_half, self.driver_half, self.selected];
        let words = words.into_iter().chain([self.status, self.interrupt]);
        let mut bytes: Vec<u8> = words.flat_map(u32::to_le_bytes).collect();
        bytes.extend(self.features.to_le_bytes());
        for queue in &self.queues {
            bytes.extend(queue.size.to_le_bytes());
            bytes.push(queue.ready.into());
            bytes.extend(queue.next_avail.to_le_bytes());
            for address in [queue.desc_table, queue.avail_ring, queue.used_ring] {
                bytes.extend(address.to_le_bytes());
            }
        }
        bytes
    }

    /// The registers of a device that offers `features`, and what is behind them.
    ///
    /// # Errors
    /// The words say what was wrong, and what would be right.
    pub(super) fn decode(
        bytes: &[u8],
        queues: usize,
        features: u64,
    ) -> Result<(Self, &[u8]), String> {
        let expected = HEAD + queues * QUEUE;
        let Some((head, rest)) = bytes.split_at_checked(expected) else {
            let len = bytes.len();
            return Err(format!("{len} bytes, expected at least {expected}"));
        };
        let number = |at: usize, len: usize| {
            let parts = head[at..at + len].iter().rev();
            parts.fold(0, |number, byte| number << 8 | u64::from(*byte))
        };
        let word = |at| number(at, 4) as u32;
        let mut registers = Self {
            device_half: word(0),
            driver_half: word(4),
            selected: word(8),
            status: word(12),
            interrupt: word(16),
            features: number(20, 8),
            queues: Vec::new(),
        };
        if registers.features & !features != 0 {
            let theirs = registers.features;
            return Err(format!(
                "features {theirs:#x}, expected some of {features:#x}"
            ));
        }
        if registers.status & !STATUS != 0 || registers.interrupt > 3 {
            return Err("an unknown status, expected bits of virtio 1.2".into());
        }
        for at in (HEAD..expected).step_by(QUEUE) {
            let next = number(at + 3, 2) as u16;
            let queue = QueueState {
                size: number(at, 2) as u16,
                ready: number(at + 2, 1) == 1,
                next_avail: next,
                next_used: next,
                desc_table: number(at + 5, 8),
                avail_ring: number(at + 13, 8),
                used_ring: number(at + 21, 8),
                ..UNUSED
            };
            if number(at + 2, 1) > 1 || queue.ready && Queue::try_from(queue).is_err() {
                return Err(format!("a queue is unsound: {queue:?}"));
            }
            registers.queues.push(queue);
        }
        Ok((registers, rest))
    }
}
