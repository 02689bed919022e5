//! Kernel features available to this process.

use super::{Finding, Grade};
use crate::procfs;
use crate::vm::deliveries_of;
use pageferry_harness::size;
use pageferry_machine::kvm::{self, DirtyTracking};
use pageferry_machine::{Backing, Delivery, Engine};
use pageferry_userfault::uffd::{Features, OpenedBy, UffdSupport};
use rustix::fs::MemfdFlags;
use std::fs;
use std::path::Path;

/// Bit of CAP_SYS_PTRACE in the capability sets (`include/uapi/linux/capability.h`).
const CAP_SYS_PTRACE: u32 = 19;

/// KVM: runs a probe VM.
pub(super) fn kvm() -> Finding {
    let parameter = |name: &str| {
        let text = fs::read_to_string(format!("/sys/module/kvm/parameters/{name}")).ok()?;
        Some(format!("{name}={}", text.trim()))
    };
    match kvm::probe_vm() {
        Ok(()) => {
            let deliveries = deliveries_of(Engine::Kvm, Backing::Shmem);
            let usable = !deliveries.is_empty();
            let how = parameter("tdp_mmu").map_or(String::new(), |tdp| format!(" ({tdp})"));
            Finding {
                name: "kvm",
                state: if usable { Grade::Good } else { Grade::Limited },
                found: format!("a probe VM runs on /dev/kvm{how}"),
                means: if usable {
                    format!(
                        "engine kvm runs guests; as a destination it delivers faults by: {}",
                        deliveries
                            .iter()
                            .map(|d| d.name())
                            .collect::<Vec<_>>()
                            .join(", ")
                    )
                } else {
                    "engine kvm runs guests and sends them away; it cannot receive any".into()
                },
                advice: (!usable).then(|| "see userfaultfd below".into()),
            }
        }
        Err(why) => Finding {
            name: "kvm",
            state: Grade::Missing,
            found: why.to_string(),
            means:
                "engine kvm is not usable; engine soft is, with guests of our own RISC-V hypervisor"
                    .into(),
            advice: Some(if Path::new("/dev/kvm").exists() {
                "give this user access to /dev/kvm (group kvm), or use --engine soft".into()
            } else {
                "load kvm_intel or kvm_amd (in a VM: have its host enable nested virtualization), or use --engine soft".into()
            }),
        },
    }
}

/// Whether KVM runs kernels, by running code in ring 0.
pub(super) fn kernels() -> Finding {
    let why = kvm::probe_kernels().err();
    Finding {
        name: "kernels",
        state: if why.is_none() {
            Grade::Good
        } else {
            Grade::Limited
        },
        means: if why.is_none() {
            "engine kvm runs ordinary Linux: `pageferry run --kernel bzImage`".into()
        } else {
            "engine kvm runs test programs only; engine soft runs riscv64 Linux".into()
        },
        found: why.map_or_else(
            || "code in ring 0 runs as fast as code in ring 3".into(),
            |why| why.to_string(),
        ),
        advice: None,
    }
}

/// The dirty log of KVM: rings for large VMs, or bitmaps only.
pub(super) fn dirty_log() -> Finding {
    let entries = kvm::dirty_ring_entries();
    let from = size::human(DirtyTracking::RINGS_FROM);
    Finding {
        name: "dirty-log",
        state: if entries.is_some() {
            Grade::Good
        } else {
            Grade::Limited
        },
        found: match entries {
            Some(entries) => format!("KVM has dirty bitmaps, and rings of {entries} entries"),
            None => "KVM has dirty bitmaps only, or cannot be used".into(),
        },
        means: if entries.is_some() {
            format!("VMs from {from} of memory log by rings, smaller ones by bitmap")
        } else {
            "the blackout of a large VM is longer: the bitmap of all its pages is copied in it"
                .into()
        },
        advice: entries
            .is_none()
            .then(|| "dirty rings need Linux 5.11 and a usable KVM".into()),
    }
}

/// userfaultfd: the permission to use it, and its features.
pub(super) fn userfaultfd() -> Finding {
    let support = UffdSupport::probe();
    let name = "userfaultfd";
    if let Err(why) = &support.usable {
        return Finding {
            name,
            state: Grade::Missing,
            found: why.to_string(),
            means: "engine kvm cannot receive a VM here (it can send one); engine soft needs no userfaultfd".into(),
            advice: Some("run as root or with CAP_SYS_PTRACE, or `sysctl vm.unprivileged_userfaultfd=1`, or give access to /dev/userfaultfd".into()),
        };
    }
    let steps = [
        (
            Features::POISON,
            "poison: a vCPU leaves the guest on its own thread",
            "Linux 6.6",
        ),
        (
            Features::MINOR_SHMEM,
            "minor: pages are received into their final place",
            "Linux 5.14",
        ),
        (
            Features::MISSING_SHMEM,
            "missing: pages are copied in",
            "Linux 4.11",
        ),
    ];
    let (has, lacks): (Vec<_>, Vec<_>) = steps
        .iter()
        .partition(|step| support.features.contains(step.0));
    let words = |steps: &[&(Features, &str, &str)]| {
        steps.iter().map(|s| s.1).collect::<Vec<_>>().join("; ")
    };
    let opened = match support.opened_by {
        Some(OpenedBy::Syscall) => "opened by userfaultfd(2), ",
        Some(OpenedBy::Device) => "opened by /dev/userfaultfd, ",
        Some(_) | None => "",
    };
    Finding {
        name,
        state: if lacks.is_empty() {
            Grade::Good
        } else {
            Grade::Limited
        },
        found: format!("{opened}features: {}", support.features),
        means: format!("deliveries for engine kvm: {}", words(&has)),
        advice: lacks
            .first()
            .map(|step| format!("a newer kernel adds {} ({})", step.1, step.2)),
    }
}

/// The seams of other VMMs: whether this process may use them, and whether their own processes can
/// receive page faults.
pub(super) fn seams() -> Finding {
    let support = UffdSupport::probe();
    let minor = support.usable.is_ok() && support.features.contains(Features::MINOR_SHMEM);
    let descriptors = passes_descriptors();
    let mut works = vec!["tunnels for migration streams (QEMU, libvirt)"];
    let mut lacks = Vec::new();
    match &descriptors {
        Ok(()) => works.push("VMs of Cloud Hypervisor leave (their memfds come over a socket)"),
        Err(why) => lacks.push(format!("no VM of Cloud Hypervisor moves: {why}")),
    }
    if minor && descriptors.is_ok() {
        works.push("they arrive (userfaultfd with minor faults, if its process may use it too)");
    } else if descriptors.is_ok() {
        lacks.push("none arrives: userfaultfd has no minor faults here".into());
    }
    works.push("VMs of Firecracker leave (by a snapshot)");
    match &support.usable {
        Ok(_) => works.push("they arrive (userfaultfd, if its process may use it too)"),
        Err(_) => lacks.push("none of Firecracker arrives: userfaultfd is not usable here".into()),
    }
    let all = lacks.is_empty();
    Finding {
        name: "seams",
        state: if all { Grade::Good } else { Grade::Limited },
        found: works.join("; "),
        means: match all {
            true => "VMs of other VMMs move: see docs/bridge.md".into(),
            false => lacks.join("; "),
        },
        advice: (!all).then(|| "see `userfaultfd` and `memfd` above".into()),
    }
}

/// Sends a memfd over a socket and looks at it, as a VMM does.
fn passes_descriptors() -> Result<(), String> {
    use rustix::fs::{MemfdFlags, fstat, ftruncate, memfd_create};
    use rustix::net::{
        RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
        SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
    };
    use std::io::{IoSlice, IoSliceMut};
    use std::os::fd::AsFd;
    let told = |what: &'static str| move |why: rustix::io::Errno| format!("{what}: {why}");
    let memfd = memfd_create("probe", MemfdFlags::CLOEXEC).map_err(told("memfd_create"))?;
    ftruncate(&memfd, 4096).map_err(told("ftruncate"))?;
    let sockets = std::os::unix::net::UnixStream::pair();
    let (near, far) = sockets.map_err(|why| format!("socketpair: {why}"))?;
    let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let fds = [memfd.as_fd()];
    let mut sends = SendAncillaryBuffer::new(&mut space);
    sends.push(SendAncillaryMessage::ScmRights(&fds));
    let sent = sendmsg(&near, &[IoSlice::new(&[0])], &mut sends, SendFlags::empty());
    sent.map_err(told("sendmsg"))?;
    let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut comes = RecvAncillaryBuffer::new(&mut space);
    let mut byte = [0];
    let flags = RecvFlags::CMSG_CLOEXEC;
    let came = recvmsg(&far, &mut [IoSliceMut::new(&mut byte)], &mut comes, flags);
    came.map_err(told("recvmsg"))?;
    let fds = comes.drain().find_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut fds) => fds.next(),
        _ => None,
    });
    let fd = fds.ok_or("no descriptor came over a socket")?;
    match fstat(&fd).map_err(told("fstat"))?.st_size {
        4096 => Ok(()),
        other => Err(format!("another file came over a socket, of {other} bytes")),
    }
}

/// KVM Userfault, by its effect on a scratch VM.
pub(super) fn kvm_userfault() -> Finding {
    let works = deliveries_of(Engine::Kvm, Backing::Shmem).contains(&Delivery::Userfault);
    Finding {
        name: "kvm-userfault",
        state: if works { Grade::Good } else { Grade::Missing },
        found: if works {
            "a vCPU left the guest at a page whose bit was set".into()
        } else {
            "KVM does not leave the guest at pages of a bitmap (KVM_MEM_USERFAULT)".into()
        },
        means: if works {
            "delivery userfault for engine kvm, without markers in guest memory".into()
        } else {
            "the deliveries above are used; memory of a guest_memfd serves none: a vCPU would read \
             zeros where a page is missing"
                .into()
        },
        advice: (!works).then(|| {
            "no released kernel has it; lab/kernel of Pageferry's source has patches for Linux 6.12"
                .into()
        }),
    }
}

/// This process's privileges, as far as Pageferry needs them.
pub(super) fn privileges() -> Finding {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let effective = procfs::mask(&status, "CapEff:").unwrap_or(0);
    let ptrace = effective >> CAP_SYS_PTRACE & 1 == 1;
    let sysctl = UffdSupport::probe().unprivileged_sysctl;
    let allowed = ptrace || sysctl == Some(true);
    let sysctl = match sysctl {
        Some(true) => "vm.unprivileged_userfaultfd=1",
        Some(false) => "vm.unprivileged_userfaultfd=0",
        None => "vm.unprivileged_userfaultfd is not there",
    };
    Finding {
        name: "privileges",
        state: if allowed { Grade::Good } else { Grade::Limited },
        found: format!(
            "user id {}, CAP_SYS_PTRACE {}, {sysctl}",
            rustix::process::geteuid().as_raw(),
            if ptrace { "held" } else { "not held" }
        ),
        means: if allowed {
            "userfaultfd may serve faults of the kernel, as KVM needs".into()
        } else {
            "userfaultfd for KVM needs /dev/userfaultfd; everything else needs no privilege".into()
        },
        advice: None,
    }
}

/// memfd, the backing of guest memory.
pub(super) fn memfd() -> Finding {
    let name = "memfd";
    match rustix::fs::memfd_create(
        "pageferry-probe",
        MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING,
    ) {
        Ok(_) => Finding {
            name,
            state: Grade::Good,
            found: "can be made and sealed".into(),
            means: "guest memory can be mapped twice: by the guest and by the migration".into(),
            advice: None,
        },
        Err(why) => Finding {
            name,
            state: Grade::Missing,
            found: format!("cannot be made: {why}"),
            means: "no engine has guest memory without it".into(),
            advice: Some(
                "Linux 3.17 or later is needed, and a sandbox that lets memfd_create(2) pass"
                    .into(),
            ),
        },
    }
}
