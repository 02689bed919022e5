//! Devices whose states travel with a VM.
//!
//! **Guarantee.** A state is decoded whole before any of it is applied, and applying cannot fail.
//! So a caller with several devices applies all states or none.
//!
//! **Mechanism.** [`Device::decode`] checks every byte, and returns an [`Apply`] that has what it
//! found. [`Device::pause`] and [`Device::resume`] enclose the time in which the state stands
//! still.
//!
//! **Neighbours.** A migration calls all of this. The crate's `devices` is about another thing:
//! guest memory for devices that are written against rust-vmm's `vm-memory`.

use crate::MachineError;

/// Puts a decoded state into its device. It cannot fail.
pub type Apply<'a> = Box<dyn FnOnce() + 'a>;

/// A device of a VM, with a state that travels in a migration.
///
/// The calls of a migration, in this order:
///
/// 1. At the source: [`Device::pause`] when the vCPUs stand still, and [`Device::save`]. Memory is
///    frozen between the two. If the source takes the VM back, [`Device::resume`].
/// 2. At the destination: [`Device::pause`] before the VM's memory comes, [`Device::decode`], and
///    once the VM runs there the [`Apply`], and then [`Device::resume`].
///
/// All are part of the time in which the guest stands still, except the first `pause` of a
/// destination. None may wait for the guest, or for a page of its memory.
///
/// ```
/// use pageferry_machine::{Apply, Device, MachineError};
/// use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
///
/// struct Counter(AtomicU64);
///
/// impl Device for Counter {
///     fn name(&self) -> &str {
///         "counter.0"
///     }
///
///     fn version(&self) -> u32 {
///         1
///     }
///
///     fn pause(&self) -> Result<(), MachineError> {
///         Ok(()) // It does no work of its own.
///     }
///
///     fn resume(&self) {}
///
///     fn save(&self) -> Result<Vec<u8>, MachineError> {
///         Ok(self.0.load(Relaxed).to_le_bytes().to_vec())
///     }
///
///     fn decode<'a>(&'a self, _: u32, bytes: &[u8]) -> Result<Apply<'a>, MachineError> {
///         let refused = || MachineError::Device(format!("{} bytes, expected 8", bytes.len()));
///         let count = u64::from_le_bytes(bytes.try_into().map_err(|_| refused())?);
///         Ok(Box::new(move || self.0.store(count, Relaxed)))
///     }
/// }
///
/// let (here, there) = (Counter(41.into()), Counter(0.into()));
/// let state = here.save()?;
/// assert!(there.decode(here.version(), &state[..7]).is_err());
/// let apply = there.decode(here.version(), &state)?;
/// assert_eq!(there.0.load(Relaxed), 0);
/// apply();
/// assert_eq!(there.0.load(Relaxed), 41);
/// # Ok::<(), MachineError>(())
/// ```
pub trait Device: Send + Sync {
    /// The name of this device, which no other device of its VM has. It is the same at both ends of
    /// a migration: 1 to 64 printable ASCII characters without spaces, such as `uart.0`.
    fn name(&self) -> &str;

    /// The version of the states that [`Device::save`] returns. Another version means other bytes.
    fn version(&self) -> u32;

    /// Whether [`Device::decode`] takes states of this version.
    fn accepts(&self, version: u32) -> bool {
        version == self.version()
    }

    /// Stops the device's own work. When this returns, no thread of the device accesses guest
    /// memory or raises an interrupt, and its state stands still. Work that is under way is
    /// completed first, or is part of the state. Repeating it is harmless.
    ///
    /// # Errors
    /// When the device cannot stop soon. It then counts as paused until [`Device::resume`].
    fn pause(&self) -> Result<(), MachineError>;

    /// Lets the device work again. Repeating it is harmless.
    fn resume(&self);

    /// The state of a paused device, at most 16 MiB. It must not write guest memory, which is
    /// frozen in a migration.
    ///
    /// # Errors
    /// When the state cannot be taken.
    fn save(&self) -> Result<Vec<u8>, MachineError>;

    /// Decodes a state of a version that the device [accepts](Device::accepts), and changes
    /// nothing. The bytes come from another process, so the device checks every one. Neither this
    /// nor the [`Apply`] may access guest memory, which may not be there yet.
    ///
    /// # Errors
    /// [`MachineError::Device`] when the bytes are no state of this device and version.
    fn decode<'a>(&'a self, version: u32, bytes: &[u8]) -> Result<Apply<'a>, MachineError>;
}
