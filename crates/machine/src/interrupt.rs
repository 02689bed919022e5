//! Interrupt lines of a machine, for its devices.

/// An interrupt line. Each call of [`Interrupt::raise`] is an edge: the guest gets at least one
/// interrupt behind it.
pub trait Interrupt: Send + Sync {
    /// Interrupts the guest. It never waits. A paused guest gets the interrupt when it runs.
    fn raise(&self);
}
