//! The entropy device: random bytes of the kernel.

use super::{Chain, Fault, VirtioDevice};

/// The most bytes of an answer.
const MOST: u64 = 4096;

/// The entropy device.
pub struct Entropy;

impl VirtioDevice for Entropy {
    fn id(&self) -> u32 {
        4
    }

    fn serve(&mut self, _: usize, chain: &Chain) -> Result<Option<u32>, Fault> {
        let mut bytes = vec![0; chain.writable().min(MOST) as usize];
        pageferry_machine::fill_random(&mut bytes).map_err(|_| Fault::Later)?;
        chain.write(0, &bytes)?;
        Ok(Some(bytes.len() as u32))
    }
}
