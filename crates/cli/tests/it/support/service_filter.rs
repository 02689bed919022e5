#![expect(
    unsafe_code,
    reason = "installs a filter of system calls between fork and exec"
)]

//! `pageferry` under the filter of system calls that a hardened service has.

use super::PAGEFERRY;
use std::os::unix::process::CommandExt;
use std::process::Command;

/// The calls that `SystemCallFilter=@system-service` of systemd 252 allows on x86-64, as ranges of
/// numbers. Source: the names of `systemd-analyze syscall-filter @system-service` and of
/// `@default`, which a unit always allows, with the numbers of `asm/unistd_64.h`.
#[rustfmt::skip]
const ALLOWED: &[(u32, u32)] = &[
    (0, 26), (28, 100), (102, 102), (104, 133), (135, 135), (137, 138), (140, 152), (157, 158),
    (160, 160), (162, 162), (186, 211), (213, 226), (228, 235), (237, 245), (247, 297),
    (299, 299), (302, 303), (306, 312), (314, 316), (318, 319), (322, 328), (332, 334),
    (424, 427), (434, 437), (439, 441), (449, 450),
];

/// `AUDIT_ARCH_X86_64` (`include/uapi/linux/audit.h`).
const ARCH: u32 = 0xc000_003e;
/// The places of the number and of the architecture in `struct seccomp_data`.
const NR_AT: u32 = 0;
const ARCH_AT: u32 = 4;

fn instruction(code: u32, k: u32, jt: u8, jf: u8) -> libc::sock_filter {
    let code = u16::try_from(code).unwrap();
    libc::sock_filter { code, jt, jf, k }
}

/// A program that allows the calls of [`ALLOWED`] but these, and does `otherwise` at any other.
fn program(but: &[libc::c_long], otherwise: u32) -> Vec<libc::sock_filter> {
    let load = |at| instruction(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, at, 0, 0);
    let equal = |k, jt, jf| instruction(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, k, jt, jf);
    let end = |k| instruction(libc::BPF_RET | libc::BPF_K, k, 0, 0);
    let mut program = vec![
        load(ARCH_AT),
        equal(ARCH, 1, 0),
        end(libc::SECCOMP_RET_KILL_PROCESS),
        load(NR_AT),
    ];
    let allowed = ALLOWED.iter().flat_map(|(first, last)| *first..=*last);
    for number in allowed.filter(|number| !but.contains(&(*number).into())) {
        program.push(equal(number, 0, 1));
        program.push(end(libc::SECCOMP_RET_ALLOW));
    }
    program.push(end(otherwise));
    program
}

/// Runs `command` under the filter, which kills the process at other calls, as systemd does.
pub(crate) fn restrict(command: &mut Command) -> &mut Command {
    install(command, program(&[], libc::SECCOMP_RET_KILL_PROCESS))
}

/// A command that starts `pageferry` under the filter without these calls. With an error, a call
/// fails by it; else it kills the process.
pub(crate) fn filtered_without(but: &[libc::c_long], error: Option<u32>) -> Command {
    let otherwise = match error {
        Some(errno) => libc::SECCOMP_RET_ERRNO | errno,
        None => libc::SECCOMP_RET_KILL_PROCESS,
    };
    let mut command = Command::new(PAGEFERRY);
    install(&mut command, program(but, otherwise));
    command
}

fn install(command: &mut Command, program: Vec<libc::sock_filter>) -> &mut Command {
    let install = move || {
        let filter = libc::sock_fprog {
            len: u16::try_from(program.len()).unwrap_or(0),
            filter: program.as_ptr().cast_mut(),
        };
        // SAFETY: prctl(2) is safe between fork and exec. It reads the program, which lives, and
        // writes nothing.
        let refused = unsafe {
            libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0
                || libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &filter) != 0
        };
        match refused {
            true => Err(std::io::Error::last_os_error()),
            false => Ok(()),
        }
    };
    // SAFETY: the closure allocates nothing and takes no lock.
    unsafe { command.pre_exec(install) }
}

/// A command that starts `pageferry` under the filter.
pub(crate) fn filtered() -> Command {
    let mut command = Command::new(PAGEFERRY);
    restrict(&mut command);
    command
}
