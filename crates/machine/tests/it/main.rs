//! The engines' integration tests: `/dev/kvm` (`kvm_*`), and the rest.

mod access;
mod adopt;
mod backing;
mod devices;
#[cfg(target_arch = "x86_64")]
mod kvm_adopt;
#[cfg(target_arch = "x86_64")]
mod kvm_backing;
#[cfg(target_arch = "x86_64")]
mod kvm_dirty;
#[cfg(target_arch = "x86_64")]
mod kvm_dirty_cost;
#[cfg(target_arch = "x86_64")]
mod kvm_dirty_random;
#[cfg(target_arch = "x86_64")]
mod kvm_emulated;
#[cfg(target_arch = "x86_64")]
mod kvm_large_pages;
#[cfg(target_arch = "x86_64")]
mod kvm_measure;
#[cfg(target_arch = "x86_64")]
mod kvm_memslots;
#[cfg(target_arch = "x86_64")]
mod kvm_mmu_stress;
#[cfg(target_arch = "x86_64")]
mod kvm_move;
#[cfg(target_arch = "x86_64")]
mod kvm_own;
#[cfg(target_arch = "x86_64")]
mod kvm_plug;
#[cfg(target_arch = "x86_64")]
mod kvm_read_only;
#[cfg(target_arch = "x86_64")]
mod kvm_registers;
mod kvm_run;
#[cfg(target_arch = "x86_64")]
mod kvm_signals;
#[cfg(target_arch = "x86_64")]
mod kvm_sleeps;
#[cfg(target_arch = "x86_64")]
mod kvm_slot_changes;
#[cfg(target_arch = "x86_64")]
mod kvm_userfault;
#[cfg(target_arch = "x86_64")]
mod kvm_userfault_flag;
mod place;
#[cfg(target_arch = "x86_64")]
mod raw;
mod soft_interrupts;
mod soft_move;
mod soft_sbi;
mod start;
#[cfg(target_arch = "x86_64")]
mod support;
mod threads;
