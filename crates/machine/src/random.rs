//! Random bytes of the host's kernel.

use rustix::rand::{GetRandomFlags, getrandom};

/// Fills `bytes` with random bytes of the host's kernel.
///
/// # Errors
/// The error of getrandom(2).
///
/// # Examples
/// ```
/// let mut bytes = [0; 32];
/// pageferry_machine::fill_random(&mut bytes)?;
/// assert_ne!(bytes, [0; 32]);
/// # Ok::<(), std::io::Error>(())
/// ```
pub fn fill_random(mut bytes: &mut [u8]) -> std::io::Result<()> {
    while !bytes.is_empty() {
        let filled = rustix::io::retry_on_intr(|| getrandom(&mut *bytes, GetRandomFlags::empty()))?;
        bytes = &mut bytes[filled..];
    }
    Ok(())
}
