//! A VMM drives KVM itself, and moves its VM. The VM's descriptor, its memory slots, their mappings
//! and the vCPU's thread are its own. Pageferry delivers the faults on missing pages.
//!
//! The guest adds 1 to a number on each page in turn. Both ends are in this process:
//! `cargo run -p pageferry-migration --example own_kvm`. It needs KVM on x86-64, and userfaultfd.

#[cfg(target_arch = "x86_64")]
mod vmm;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    #[cfg(target_arch = "x86_64")]
    vmm::run()?;
    Ok(())
}
