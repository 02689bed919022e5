//! The abilities of KVM on this host, and limits that keep a test from hanging.

use kvm_bindings::{CpuId, KVM_MAX_CPUID_ENTRIES};
use kvm_ioctls::Kvm;
use pageferry_testkit::{LIMIT, skip};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Instant;

/// KVM, and its abilities.
pub(crate) struct Host {
    pub(crate) kvm: Kvm,
    pub(crate) cpuid: CpuId,
    /// The processor translates guest-physical addresses itself, so it walks the guest's own
    /// tables. Otherwise KVM walks them, and builds shadows of the translations.
    pub(crate) second_level_paging: bool,
}

impl Host {
    /// KVM, or `None` if there is none. Then it prints the reason, or panics if KVM is required.
    pub(crate) fn open() -> Option<Self> {
        let opened = Kvm::new().and_then(|kvm| {
            let cpuid = kvm.get_supported_cpuid(KVM_MAX_CPUID_ENTRIES)?;
            kvm.create_vm().map(|_| (kvm, cpuid))
        });
        let (kvm, cpuid) = match opened {
            Ok(opened) => opened,
            Err(why) => {
                skip("kvm", why);
                return None;
            }
        };
        let second_level_paging = ["kvm_intel/parameters/ept", "kvm_amd/parameters/npt"]
            .iter()
            .any(|name| {
                std::fs::read_to_string(format!("/sys/module/{name}"))
                    .is_ok_and(|text| matches!(text.trim(), "Y" | "1"))
            });
        let host = Self {
            kvm,
            cpuid,
            second_level_paging,
        };
        println!("the tables are walked by {}", host.walker());
        Some(host)
    }

    /// The walker of the tables.
    pub(crate) fn walker(&self) -> &'static str {
        if self.second_level_paging {
            "the processor (KVM uses EPT or NPT)"
        } else {
            "KVM's shadow MMU; the processor runs on its shadows"
        }
    }

    /// Whether pages that the program did not use may have accessed bits. Processors that walk the
    /// tables set them while they speculate. Dirty bits are exact everywhere.
    pub(crate) const fn speculates(&self) -> bool {
        self.second_level_paging
    }

    /// Whether leaves of 1 GiB are supported: CPUID `Fn8000_0001_EDX` bit 26.
    pub(crate) fn has_gib_leaves(&self) -> bool {
        self.cpuid
            .as_slice()
            .iter()
            .any(|leaf| leaf.function == 0x8000_0001 && leaf.edx & 1 << 26 != 0)
    }

    /// The levels at which leaves are supported.
    pub(crate) fn leaf_levels(&self) -> impl Iterator<Item = u32> + use<> {
        if self.has_gib_leaves() {
            1..=3
        } else {
            println!("no leaves of 1 GiB here");
            1..=2
        }
    }
}

/// Ends the process if a test takes longer than [`LIMIT`], wherever it hangs. Nothing else can end
/// a spinning wait.
pub(crate) struct Watchdog {
    done: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Watchdog {
    pub(crate) fn new() -> Self {
        let done = Arc::new(AtomicBool::new(false));
        let watched = Arc::clone(&done);
        let test = std::thread::current().name().unwrap_or("?").to_owned();
        let thread = std::thread::spawn(move || {
            let end = Instant::now() + LIMIT;
            while !watched.load(Ordering::Acquire) {
                if Instant::now() > end {
                    eprintln!("{test} did not end within {LIMIT:?}");
                    std::process::abort();
                }
                std::thread::park_timeout(end.saturating_duration_since(Instant::now()));
            }
        });
        Self {
            done,
            thread: Some(thread),
        }
    }
}

impl Drop for Watchdog {
    fn drop(&mut self) {
        self.done.store(true, Ordering::Release);
        if let Some(thread) = self.thread.take() {
            thread.thread().unpark();
            let _ = thread.join();
        }
    }
}
