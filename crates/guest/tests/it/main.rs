//! The programs against their model: on a small interpreter (`rv64`), on Pageferry's hypervisor
//! (`soft`) and on `/dev/kvm` (`kvm`).

#[cfg(all(target_os = "linux", target_arch = "x86_64"))]
mod kvm;
mod memory;
mod rv64;
mod rv64_code;
mod rv64_on_hypervisor;
mod soft;
mod suite;
mod verify;
#[cfg(all(target_os = "linux", target_arch = "x86_64"))]
mod x64_on_kvm;
