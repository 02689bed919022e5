#![expect(
    unsafe_code,
    reason = "makes system calls with arguments that change nothing"
)]
//! Whether a filter (seccomp(2)) lets a VM, and a migration of it, make their system calls.
//!
//! **Guarantee.** A filter that kills the process at a call is found without the end of this one.
//!
//! **Mechanism.** A child process makes each call once, with arguments that the kernel refuses or
//! that change nothing: a filter decides before the kernel looks at them. The child names each call
//! before it makes it. If the filter kills it, another child goes on behind that call.

use super::{Finding, Grade};
use libc::c_long;
use std::io::{self, Write};
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, Stdio};

/// A call with its arguments.
struct Call {
    name: &'static str,
    number: c_long,
    arguments: [c_long; 4],
}

/// The answers of the kernel that a filter gives in its place.
const REFUSALS: [i32; 3] = [libc::ENOSYS, libc::EPERM, libc::EACCES];

const fn call(name: &'static str, number: c_long, arguments: [c_long; 4]) -> Call {
    Call {
        name,
        number,
        arguments,
    }
}

/// No descriptor, no flag and no number of anything.
const NO: c_long = -1;

/// Every call, with arguments that do not depend on this process.
const CALLS: &[Call] = &[
    // Files and memory.
    call("read", libc::SYS_read, [NO, 0, 0, 0]),
    call("write", libc::SYS_write, [NO, 0, 0, 0]),
    call("pread64", libc::SYS_pread64, [NO, 0, 0, 0]),
    call("pwrite64", libc::SYS_pwrite64, [NO, 0, 0, 0]),
    call("close", libc::SYS_close, [NO, 0, 0, 0]),
    call("openat", libc::SYS_openat, [NO, 0, 0, 0]),
    call("statx", libc::SYS_statx, [NO, 0, NO, 0]),
    call("newfstatat", libc::SYS_newfstatat, [NO, 0, 0, 0]),
    call("fstat", libc::SYS_fstat, [NO, 0, 0, 0]),
    call(
        "lseek",
        libc::SYS_lseek,
        [NO, 0, libc::SEEK_DATA as c_long, 0],
    ),
    call(
        "lseek",
        libc::SYS_lseek,
        [NO, 0, libc::SEEK_HOLE as c_long, 0],
    ),
    call("getdents64", libc::SYS_getdents64, [NO, 0, 0, 0]),
    call(
        "fcntl",
        libc::SYS_fcntl,
        [NO, libc::F_GETFD as c_long, 0, 0],
    ),
    call("ioctl", libc::SYS_ioctl, [NO, 0, 0, 0]),
    call("ftruncate", libc::SYS_ftruncate, [NO, 0, 0, 0]),
    call("fallocate", libc::SYS_fallocate, [NO, PUNCH, 0, 4096]),
    call("fchmod", libc::SYS_fchmod, [NO, 0, 0, 0]),
    call("unlinkat", libc::SYS_unlinkat, [NO, 0, 0, 0]),
    call("readlinkat", libc::SYS_readlinkat, [NO, 0, 0, 0]),
    call("memfd_create", libc::SYS_memfd_create, [0, NO, 0, 0]),
    call("mmap", libc::SYS_mmap, [0, 0, 0, 0]),
    call("munmap", libc::SYS_munmap, [0, 0, 0, 0]),
    call("mprotect", libc::SYS_mprotect, [0, 0, 0, 0]),
    call(
        "madvise",
        libc::SYS_madvise,
        [0, 0, libc::MADV_DONTNEED as c_long, 0],
    ),
    call(
        "madvise",
        libc::SYS_madvise,
        [0, 0, libc::MADV_REMOVE as c_long, 0],
    ),
    call("brk", libc::SYS_brk, [0, 0, 0, 0]),
    call("userfaultfd", libc::SYS_userfaultfd, [NO, 0, 0, 0]),
    call("membarrier", libc::SYS_membarrier, [REGISTER, 0, 0, 0]),
    call("membarrier", libc::SYS_membarrier, [EXPEDITED, 0, 0, 0]),
    // Threads, signals and time.
    call("clone3", libc::SYS_clone3, [0, 0, 0, 0]),
    call("set_robust_list", libc::SYS_set_robust_list, [0, 0, 0, 0]),
    call("rseq", libc::SYS_rseq, [0, 0, NO, 0]),
    call(
        "futex",
        libc::SYS_futex,
        [0, libc::FUTEX_WAKE as c_long, 0, 0],
    ),
    call("gettid", libc::SYS_gettid, [0; 4]),
    call("getpid", libc::SYS_getpid, [0; 4]),
    call("sched_yield", libc::SYS_sched_yield, [0; 4]),
    call(
        "sched_getaffinity",
        libc::SYS_sched_getaffinity,
        [0, 0, 0, 0],
    ),
    call(
        "sched_setaffinity",
        libc::SYS_sched_setaffinity,
        [0, 0, 0, 0],
    ),
    call("sched_getattr", libc::SYS_sched_getattr, [0, 0, 0, 0]),
    call("sched_setattr", libc::SYS_sched_setattr, [0, 0, 0, 0]),
    call("setpriority", libc::SYS_setpriority, [NO, 0, 0, 0]),
    call("prctl", libc::SYS_prctl, [NO, 0, 0, 0]),
    call("prlimit64", libc::SYS_prlimit64, [0, NO, 0, 0]),
    call("rt_sigaction", libc::SYS_rt_sigaction, [0, 0, 0, 8]),
    call("rt_sigprocmask", libc::SYS_rt_sigprocmask, [0, 0, 0, 8]),
    call("rt_sigtimedwait", libc::SYS_rt_sigtimedwait, [0, 0, 0, 8]),
    call(
        "rt_tgsigqueueinfo",
        libc::SYS_rt_tgsigqueueinfo,
        [NO, NO, 0, 0],
    ),
    call("sigaltstack", libc::SYS_sigaltstack, [0, 0, 0, 0]),
    call("tgkill", libc::SYS_tgkill, [NO, NO, 0, 0]),
    call("kill", libc::SYS_kill, [i32::MAX as c_long, 0, 0, 0]),
    call("clock_gettime", libc::SYS_clock_gettime, [0, 0, 0, 0]),
    call("clock_nanosleep", libc::SYS_clock_nanosleep, [0, 0, 0, 0]),
    call("eventfd2", libc::SYS_eventfd2, [0, NO, 0, 0]),
    // A wait for nothing, with a time that cannot be.
    call("ppoll", libc::SYS_ppoll, [0, 0, 1, 0]),
    #[cfg(target_arch = "x86_64")]
    call("poll", libc::SYS_poll, [0, 0, 0, 0]),
    call("getrandom", libc::SYS_getrandom, [0, 0, 0, 0]),
    // Sockets, and descriptors that they pass.
    call("socket", libc::SYS_socket, [NO, 0, 0, 0]),
    call("socketpair", libc::SYS_socketpair, [NO, 0, 0, 0]),
    call("bind", libc::SYS_bind, [NO, 0, 0, 0]),
    call("listen", libc::SYS_listen, [NO, 0, 0, 0]),
    call("accept4", libc::SYS_accept4, [NO, 0, 0, 0]),
    call("connect", libc::SYS_connect, [NO, 0, 0, 0]),
    call("getsockname", libc::SYS_getsockname, [NO, 0, 0, 0]),
    call("getpeername", libc::SYS_getpeername, [NO, 0, 0, 0]),
    call("getsockopt", libc::SYS_getsockopt, [NO, 0, 0, 0]),
    call("setsockopt", libc::SYS_setsockopt, [NO, 0, 0, 0]),
    call("sendto", libc::SYS_sendto, [NO, 0, 0, 0]),
    call("recvfrom", libc::SYS_recvfrom, [NO, 0, 0, 0]),
    call("sendmsg", libc::SYS_sendmsg, [NO, 0, 0, 0]),
    call("recvmsg", libc::SYS_recvmsg, [NO, 0, 0, 0]),
    call("shutdown", libc::SYS_shutdown, [NO, 0, 0, 0]),
    // Processes: a demo, and a VM in the background.
    call("execve", libc::SYS_execve, [0, 0, 0, 0]),
    call(
        "wait4",
        libc::SYS_wait4,
        [NO, 0, libc::WNOHANG as c_long, 0],
    ),
    call("pipe2", libc::SYS_pipe2, [0, 0, 0, 0]),
    call("dup3", libc::SYS_dup3, [NO, NO, 0, 0]),
    call("setsid", libc::SYS_setsid, [0; 4]),
];

/// `FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE`.
const PUNCH: c_long = (libc::FALLOC_FL_KEEP_SIZE | libc::FALLOC_FL_PUNCH_HOLE) as c_long;
/// `MEMBARRIER_CMD_REGISTER_PRIVATE_EXPEDITED` and `MEMBARRIER_CMD_PRIVATE_EXPEDITED`
/// (`include/uapi/linux/membarrier.h`).
const REGISTER: c_long = 1 << 4;
const EXPEDITED: c_long = 1 << 3;

/// The call by which a pager takes a userfaultfd out of a VMM. A VM does not need it, and
/// `@system-service` lacks it.
const TAKE: Call = call("pidfd_getfd", libc::SYS_pidfd_getfd, [NO, NO, 0, 0]);

/// The calls from a number on: those of a VM, or behind them that of a pager.
fn calls_from(first: usize) -> &'static [Call] {
    CALLS
        .get(first..)
        .filter(|calls| !calls.is_empty())
        .unwrap_or(std::slice::from_ref(&TAKE))
}

/// Whether a filter lets this process take descriptors out of others. A child tries it.
pub(crate) fn may_take() -> bool {
    let mut outcome = FilterFindings::default();
    child(CALLS.len(), &mut outcome).is_ok() && outcome == FilterFindings::default()
}

/// The results of the calls.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct FilterFindings {
    /// The calls at which the filter kills the process.
    killed: Vec<&'static str>,
    /// The calls that the filter, or an old kernel, refuses.
    refused: Vec<&'static str>,
    /// Why the calls could not be tried.
    failed: Option<String>,
}

/// The child: makes the calls from this one on, and says what became of each.
pub(super) fn make_from(first: usize) -> io::Result<()> {
    let mut out = io::stdout();
    for (index, call) in calls_from(first).iter().enumerate() {
        write!(out, "{} ", first + index)?;
        out.flush()?;
        let [a, b, c, d] = call.arguments;
        // SAFETY: with these arguments no call reads or writes memory of this process, takes its
        // descriptors or makes anything: they name no descriptor, no address and no length.
        // `setsid` only takes this child out of its session.
        let done = unsafe { libc::syscall(call.number, a, b, c, d, 0, 0) };
        let errno = match done {
            -1 => io::Error::last_os_error().raw_os_error().unwrap_or(0),
            _ => 0,
        };
        writeln!(out, "{errno}")?;
    }
    out.flush()
}

/// Lets children make all calls.
pub(super) fn try_all() -> FilterFindings {
    let mut outcome = FilterFindings::default();
    let mut next = 0;
    while next < CALLS.len() {
        match child(next, &mut outcome) {
            Ok(reached) => next = reached,
            Err(why) => {
                outcome.failed = Some(why);
                break;
            }
        }
    }
    outcome.killed.dedup();
    outcome.refused.dedup();
    outcome
}

/// Lets a child make the calls from `first` on. Returns the one that is next.
fn child(first: usize, outcome: &mut FilterFindings) -> Result<usize, String> {
    let program = std::env::current_exe().ok().filter(|path| path.exists());
    let ended = Command::new(program.unwrap_or_else(|| "/proc/self/exe".into()))
        .args(["probe", "--calls-from", &first.to_string()])
        .stdin(Stdio::null())
        .stderr(Stdio::null())
        .output()
        .map_err(|why| format!("a child process cannot be started: {why}"))?;
    let said = String::from_utf8_lossy(&ended.stdout);
    let mut next = first;
    for line in said.lines() {
        let mut words = line.split(' ').filter(|word| !word.is_empty());
        let named = words.next().and_then(|at| at.parse().ok());
        let Some((at, call)) = named.and_then(|at: usize| Some((at, calls_from(at).first()?)))
        else {
            break;
        };
        match words.next().and_then(|errno| errno.parse::<i32>().ok()) {
            Some(errno) if REFUSALS.contains(&errno) => outcome.refused.push(call.name),
            Some(_) => {}
            None => outcome.killed.push(call.name),
        }
        next = at + 1;
    }
    if next == first {
        return Err(match ended.status.signal() {
            Some(libc::SIGSYS) => "a filter kills a child process at its start".into(),
            _ => format!("a child process said nothing: {}", ended.status),
        });
    }
    Ok(next)
}

impl FilterFindings {
    /// Whether a call may kill this process too.
    pub(super) fn kills(&self) -> bool {
        !self.killed.is_empty()
    }

    pub(super) fn finding(&self) -> Finding {
        let list = |what: &str, calls: &[&str]| match calls {
            [] => None,
            calls => Some(format!("a filter {what} {}", calls.join(", "))),
        };
        let bad = [
            list("kills the process at", &self.killed),
            list("or an old kernel refuses", &self.refused),
            self.failed.clone(),
        ];
        let bad: Vec<String> = bad.into_iter().flatten().collect();
        let (state, found, means, advice) = if bad.is_empty() {
            let found = format!("all {} calls of a VM and its migration pass", CALLS.len());
            (Grade::Good, found, "no filter stops a VM here", None)
        } else {
            let state = match self.kills() {
                true => Grade::Missing,
                false => Grade::Limited,
            };
            let means = "a VM may end or fail here at any of them, also in the middle of a move";
            let advice = "allow them in the filter of the service: SystemCallFilter=@system-service \
                          has all of them";
            (state, bad.join("; "), means, Some(advice.to_owned()))
        };
        Finding {
            name: "system-calls",
            state,
            found,
            means: means.into(),
            advice,
        }
    }
}
