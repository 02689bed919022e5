//! Limits of this host that would end a VM in the middle of its run.
//!
//! **Guarantee.** A limit that is too low for a VM is refused before the VM starts, in a sentence
//! that names the limit and what would be right. Some of them are otherwise met as a signal: a page
//! of a pool that a control group refuses is SIGBUS, a file that may not grow is SIGXFSZ.
//!
//! **Mechanism.** The limits are read where the kernel shows them. What others take meanwhile is
//! not known, so a check that passes is no promise.

use crate::cgroup::{self, Resource};
use crate::exit::{Exit, Failure};
use crate::procfs;
use pageferry_addr::PageSize;
use pageferry_harness::size::human;
use pageferry_machine::{Backing, Engine};
use rustix::process::{Resource as Rlimit, getrlimit};
use std::fs;

/// The threads of a process beside those of vCPUs: for the control socket, the channels of a
/// migration, output and metrics.
const THREADS: u64 = 48;
/// The descriptors beside those that are open and those of KVM's vCPUs.
const DESCRIPTORS: u64 = 96;
/// The descriptors without which a command that serves can say nothing: for its own sockets, their
/// clients and its output.
const LEAST_DESCRIPTORS: u64 = 32;
/// The mappings beside those that exist and those of threads.
const MAPPINGS: u64 = 512;
/// The address space beside guest memory: code, stacks and arenas.
const ADDRESSES: u64 = 256 << 20;

/// What the VMs of a command need.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Needs {
    /// The kind of guest memory.
    pub(crate) backing: Backing,
    /// The memory of one VM in bytes.
    pub(crate) bytes: u64,
    /// The number of VMs, each in its own process.
    pub(crate) machines: u64,
    /// The vCPUs of one VM.
    pub(crate) vcpus: u32,
    /// Their engine.
    pub(crate) engine: Engine,
}

/// The limits of a host, as far as a check reads them.
trait Host {
    /// What control groups leave, and the file with the limit.
    fn group(&self, resource: Resource) -> Option<(u64, String)>;
    /// The soft limit of this process.
    fn rlimit(&self, limit: Rlimit) -> Option<u64>;
    /// The text of a file of procfs.
    fn read(&self, path: &str) -> Option<String>;
    /// The open descriptors of this process.
    fn descriptors(&self) -> u64;
    /// The threads of all processes of this user.
    fn threads_of_user(&self, user: u32) -> u64;
}

/// This host.
struct Here;

impl Host for Here {
    fn group(&self, resource: Resource) -> Option<(u64, String)> {
        let left = cgroup::left(resource)?;
        Some((left.amount, left.file.display().to_string()))
    }

    fn rlimit(&self, limit: Rlimit) -> Option<u64> {
        getrlimit(limit).current
    }

    fn read(&self, path: &str) -> Option<String> {
        fs::read_to_string(path).ok()
    }

    fn descriptors(&self) -> u64 {
        fs::read_dir("/proc/self/fd").map_or(0, |found| found.count() as u64)
    }

    fn threads_of_user(&self, user: u32) -> u64 {
        let processes = fs::read_dir("/proc").into_iter().flatten().flatten();
        // Files of procfs that are no processes, and processes that have ended, have no status.
        let statuses =
            processes.filter_map(|one| fs::read_to_string(one.path().join("status")).ok());
        let of_user = statuses.filter(|status| real_user(status) == Some(user));
        of_user
            .filter_map(|status| procfs::number(&status, "Threads:"))
            .sum()
    }
}

fn real_user(status: &str) -> Option<u32> {
    procfs::number(status, "Uid:")?.try_into().ok()
}

/// Whether the kernel limits the threads of a process with this status: not those of root, nor with
/// `CAP_SYS_RESOURCE` or `CAP_SYS_ADMIN` (`copy_process` in `kernel/fork.c`).
fn threads_are_limited(status: &str) -> bool {
    // The numbers of both in `include/uapi/linux/capability.h`.
    let exempt = (1_u64 << 24) | (1 << 21);
    let effective = procfs::mask(status, "CapEff:");
    real_user(status) != Some(0) && effective.is_some_and(|has| has & exempt == 0)
}

/// Checks the limits of this host.
///
/// # Errors
/// [`Exit::Delivery`] with the limit that is too low.
pub(crate) fn check(needs: &Needs) -> Result<(), Failure> {
    check_on(&Here, needs).map_err(|why| {
        let why = format!("{why} (--ignore-limits starts the VM all the same)");
        Failure::new(Exit::Delivery, why)
    })
}

/// Checks what every command needs that serves others, before it begins.
///
/// # Errors
/// [`Exit::Delivery`] with the limit that is too low.
pub(crate) fn check_service() -> Result<(), Failure> {
    check_descriptors(&Here, LEAST_DESCRIPTORS).map_err(|why| Failure::new(Exit::Delivery, why))
}

fn check_on(host: &dyn Host, needs: &Needs) -> Result<(), String> {
    let all = needs.bytes.saturating_mul(needs.machines);
    if needs.backing.is_hugetlb() {
        let size = match needs.backing.page_size() {
            PageSize::Size1G => "1GB",
            _ => "2MB",
        };
        if let Some((left, file)) = host.group(Resource::HugePages(size))
            && left < all
        {
            return Err(format!(
                "{} of huge pages are needed and the control group leaves {}: raise {file} by {}",
                human(all),
                human(left),
                human(all - left)
            ));
        }
    }
    check_commit(host, needs, all)?;
    check_threads(host, needs)?;
    check_process(host, needs)
}

/// Strict accounting of memory (mode 2) refuses a page when a guest touches it first.
fn check_commit(host: &dyn Host, needs: &Needs, all: u64) -> Result<(), String> {
    let mode = host.read("/proc/sys/vm/overcommit_memory");
    if needs.backing.is_hugetlb() || mode.is_none_or(|mode| mode.trim() != "2") {
        return Ok(());
    }
    let info = host.read("/proc/meminfo").unwrap_or_default();
    let field = |name| procfs::kib(&info, name);
    if let (Some(limit), Some(used)) = (field("CommitLimit:"), field("Committed_AS:")) {
        let left = limit.saturating_sub(used);
        if left < all {
            return Err(format!(
                "vm.overcommit_memory is 2 and leaves {} to commit, of {} that are needed: raise \
                 vm.overcommit_ratio, or choose a smaller --memory",
                human(left),
                human(all)
            ));
        }
    }
    Ok(())
}

fn check_threads(host: &dyn Host, needs: &Needs) -> Result<(), String> {
    let threads = (u64::from(needs.vcpus) + THREADS).saturating_mul(needs.machines);
    if let Some((left, file)) = host.group(Resource::Threads)
        && left < threads
    {
        return Err(format!(
            "{threads} threads are needed and the control group leaves {left}: raise {file} by {}",
            threads - left
        ));
    }
    check_threads_of_user(host, threads)?;
    let maps = host.read("/proc/self/maps").unwrap_or_default();
    // A thread has a stack and its guard.
    let mappings = maps.lines().count() as u64 + 2 * (u64::from(needs.vcpus) + THREADS) + MAPPINGS;
    let most = host.read("/proc/sys/vm/max_map_count");
    match most.and_then(|text| text.trim().parse::<u64>().ok()) {
        Some(most) if most < mappings => Err(format!(
            "vm.max_map_count is {most} and {mappings} mappings are needed: raise it"
        )),
        _ => Ok(()),
    }
}

/// The limit of threads counts those of all processes of the user.
fn check_threads_of_user(host: &dyn Host, needed: u64) -> Result<(), String> {
    let status = host.read("/proc/self/status").unwrap_or_default();
    let limited = || threads_are_limited(&status);
    let Some(most) = host.rlimit(Rlimit::Nproc).filter(|_| limited()) else {
        return Ok(());
    };
    let used = real_user(&status).map_or(0, |user| host.threads_of_user(user));
    let all = used.saturating_add(needed);
    if most < all {
        return Err(format!(
            "RLIMIT_NPROC (ulimit -u, LimitNPROC=) is {most}, {needed} threads are needed, and this \
             user's processes have {used}: raise it to {all} at least"
        ));
    }
    Ok(())
}

/// The limits of the process (getrlimit(2)).
fn check_process(host: &dyn Host, needs: &Needs) -> Result<(), String> {
    // A memfd is mapped twice.
    let mapped = match needs.backing {
        Backing::Anonymous => needs.bytes,
        _ => needs.bytes.saturating_mul(2),
    };
    let used = host.read("/proc/self/status").unwrap_or_default();
    let used = procfs::kib(&used, "VmSize:").unwrap_or(0);
    let addresses = used.saturating_add(mapped).saturating_add(ADDRESSES);
    let per_vcpu = match needs.engine {
        Engine::Kvm => 1,
        Engine::Soft => 0,
    };
    for (limit, name, needed) in [
        (Rlimit::As, "RLIMIT_AS (ulimit -v, LimitAS=)", addresses),
        (
            Rlimit::Fsize,
            "RLIMIT_FSIZE (ulimit -f, LimitFSIZE=)",
            needs.bytes,
        ),
    ] {
        let is_file = limit != Rlimit::Fsize || needs.backing != Backing::Anonymous;
        if let Some(most) = host.rlimit(limit).filter(|most| is_file && *most < needed) {
            return Err(format!(
                "{name} is {} and {} are needed: raise it",
                human(most),
                human(needed)
            ));
        }
    }
    check_descriptors(host, DESCRIPTORS + per_vcpu * u64::from(needs.vcpus))
}

/// Checks the limit of descriptors, `more` beside those that are open.
fn check_descriptors(host: &dyn Host, more: u64) -> Result<(), String> {
    let needed = host.descriptors() + more;
    match host.rlimit(Rlimit::Nofile) {
        Some(most) if most < needed => Err(format!(
            "RLIMIT_NOFILE (ulimit -n, LimitNOFILE=) is {most} and {needed} descriptors are needed: \
             raise it"
        )),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A host with one limit.
    #[derive(Default)]
    struct One {
        group: Option<(Resource, u64)>,
        rlimit: Option<(Rlimit, u64)>,
        files: Vec<(&'static str, &'static str)>,
    }

    impl Host for One {
        fn group(&self, resource: Resource) -> Option<(u64, String)> {
            let (limited, left) = self.group?;
            (limited == resource).then(|| (left, "/its/file".into()))
        }

        fn rlimit(&self, limit: Rlimit) -> Option<u64> {
            let (limited, most) = self.rlimit?;
            (limited == limit).then_some(most)
        }

        fn read(&self, path: &str) -> Option<String> {
            let (_, text) = self.files.iter().find(|(name, _)| *name == path)?;
            Some((*text).to_owned())
        }

        fn descriptors(&self) -> u64 {
            10
        }

        fn threads_of_user(&self, user: u32) -> u64 {
            if user == 1000 { 30 } else { 0 }
        }
    }

    const NEEDS: Needs = Needs {
        backing: Backing::Shmem,
        bytes: 64 << 20,
        machines: 1,
        vcpus: 4,
        engine: Engine::Soft,
    };
    const HUGE: Needs = Needs {
        backing: Backing::Hugetlb2M,
        ..NEEDS
    };

    #[track_caller]
    fn assert_refused(host: &One, needs: &Needs, parts: &[&str]) {
        let why = check_on(host, needs).unwrap_err();
        assert!(parts.iter().all(|part| why.contains(part)), "{why}");
    }

    #[test]
    fn a_host_without_limits_takes_every_vm() {
        assert_eq!(check_on(&One::default(), &NEEDS), Ok(()));
        assert_eq!(check_on(&One::default(), &HUGE), Ok(()));
    }

    #[test]
    fn groups_limit_huge_pages_and_threads() {
        let huge = |left| One {
            group: Some((Resource::HugePages("2MB"), left)),
            ..One::default()
        };
        assert_refused(
            &huge(32 << 20),
            &HUGE,
            &["leaves 32 MiB", "raise /its/file by 32 MiB"],
        );
        assert_eq!(check_on(&huge(64 << 20), &HUGE), Ok(()));
        assert_eq!(check_on(&huge(0), &NEEDS), Ok(()));
        let both = Needs {
            machines: 2,
            ..HUGE
        };
        assert_refused(
            &huge(64 << 20),
            &both,
            &["128 MiB of huge pages are needed"],
        );
        let threads = One {
            group: Some((Resource::Threads, 20)),
            ..One::default()
        };
        assert_refused(&threads, &NEEDS, &["52 threads are needed", "leaves 20"]);
    }

    #[test]
    fn strict_accounting_and_mappings_are_limits() {
        let strict = |mode| One {
            files: vec![
                ("/proc/sys/vm/overcommit_memory", mode),
                (
                    "/proc/meminfo",
                    "CommitLimit: 50000 kB\nCommitted_AS: 40000 kB\n",
                ),
            ],
            ..One::default()
        };
        assert_refused(
            &strict("2\n"),
            &NEEDS,
            &["vm.overcommit_memory is 2", "64 MiB"],
        );
        assert_eq!(check_on(&strict("0\n"), &NEEDS), Ok(()));
        assert_eq!(check_on(&strict("2\n"), &HUGE), Ok(()));
        let few = One {
            files: vec![("/proc/sys/vm/max_map_count", "600\n")],
            ..One::default()
        };
        assert_refused(&few, &NEEDS, &["vm.max_map_count is 600"]);
    }

    #[test]
    fn the_threads_of_a_user_count_unless_the_user_is_privileged() {
        let limited = |most, status| One {
            rlimit: Some((Rlimit::Nproc, most)),
            files: vec![("/proc/self/status", status)],
            ..One::default()
        };
        let user = "Name:\tsh\nUid:\t1000\t1000\t1000\t1000\nCapEff:\t0000000000003000\n";
        let says = ["RLIMIT_NPROC", "is 81, 52 threads", "have 30", "to 82"];
        assert_refused(&limited(81, user), &NEEDS, &says);
        assert_eq!(check_on(&limited(82, user), &NEEDS), Ok(()));
        let two = Needs {
            machines: 2,
            ..NEEDS
        };
        assert_refused(&limited(133, user), &two, &["104 threads", "to 134"]);
        for exempt in [
            "Uid:\t0\t0\t0\t0\nCapEff:\t0000000000000000\n",
            // CAP_SYS_RESOURCE, CAP_SYS_ADMIN.
            "Uid:\t1000\t1000\t1000\t1000\nCapEff:\t0000000001000000\n",
            "Uid:\t1000\t1000\t1000\t1000\nCapEff:\t0000000000200000\n",
        ] {
            assert_eq!(check_on(&limited(1, exempt), &NEEDS), Ok(()), "{exempt}");
        }
        // The effective user does not count.
        let real = "Uid:\t1000\t0\t0\t0\nCapEff:\t0000000000000000\n";
        assert_refused(&limited(81, real), &NEEDS, &says);
    }

    #[test]
    fn limits_of_the_process_count() {
        let limited = |limit, most| One {
            rlimit: Some((limit, most)),
            ..One::default()
        };
        assert_refused(
            &limited(Rlimit::As, 300 << 20),
            &NEEDS,
            &["RLIMIT_AS", "384 MiB"],
        );
        assert_eq!(check_on(&limited(Rlimit::As, 1 << 30), &NEEDS), Ok(()));
        assert_refused(&limited(Rlimit::Fsize, 1 << 20), &NEEDS, &["RLIMIT_FSIZE"]);
        let private = Needs {
            backing: Backing::Anonymous,
            ..NEEDS
        };
        assert_eq!(check_on(&limited(Rlimit::Fsize, 1 << 20), &private), Ok(()));
        assert_refused(
            &limited(Rlimit::Nofile, 64),
            &NEEDS,
            &["RLIMIT_NOFILE", "106"],
        );
        let kvm = Needs {
            engine: Engine::Kvm,
            ..NEEDS
        };
        assert_refused(&limited(Rlimit::Nofile, 107), &kvm, &["110 descriptors"]);
    }
}
