//! The emulated machine: starts it, passes its console on, and bounds what it uses.

use super::Error;
use super::initrd::{ABOUT, CANNOT, ENDED, EXIT_CODE};
use super::packages::Components;
use std::io::{BufRead, BufReader, Read, Write};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// How long the emulator may use no CPU time at all.
pub(crate) const IDLE_LIMIT: Duration = Duration::from_secs(120);
/// The exit code of a run that was ended by a limit.
const LIMITED: u8 = 124;
/// The processor: one with SVM and nested paging. A second one would corrupt nested guests.
const PROCESSOR: [&str; 4] = ["-cpu", "EPYC,+svm,+npt", "-smp", "1"];
/// Each instruction takes 2^2 ns of the emulated clock, which waits for nothing.
const COUNT_INSTRUCTIONS: [&str; 4] = [
    "-accel",
    "tcg,thread=single",
    "-icount",
    "shift=2,sleep=off",
];

/// Options of the emulated kernel beside `--real-time`: its timer is periodic. At each VMRUN and
/// #VMEXIT, QEMU 10.0 changes `interrupt_request` without a lock (`svm_helper.c`). An interrupt
/// that comes then may be lost. A kernel that waits for it alone would wait for ever.
const PERIODIC_TIMER: &str = "nohz=off highres=off";

/// One run.
pub(crate) struct Machine<'a> {
    pub(crate) parts: &'a Components,
    pub(crate) initrd: &'a Path,
    pub(crate) memory_mib: u64,
    pub(crate) cpu_seconds: u64,
    pub(crate) counts_instructions: bool,
    /// An option of kvm-amd, for a kernel that has it built in.
    pub(crate) kvm_amd_option: &'a str,
    /// The number of commands, each of which has an exit code.
    pub(crate) commands: usize,
}

impl Machine<'_> {
    /// Boots, and passes the console on to stdout. Returns the first exit code that is not 0.
    pub(crate) fn run(&self) -> Result<u8, Error> {
        let mut child = self
            .command()
            .spawn()
            .map_err(Error::io("start the emulator"))?;
        let console = child.stdout.take().expect("stdout is piped");
        let ended = AtomicBool::new(false);
        let (codes, limit) = std::thread::scope(|scope| {
            let watch = scope.spawn(|| watch(&mut child, self.cpu_seconds, &ended));
            let codes = pass_on(console, self.counts_instructions);
            ended.store(true, Ordering::Release);
            (codes, watch.join())
        });
        let _ = child.kill();
        child.wait().map_err(Error::io("wait for the emulator"))?;
        if let Ok(Some(limit)) = limit {
            eprintln!("lab: {limit}");
            return Ok(LIMITED);
        }
        let codes = codes?;
        if codes.len() < self.commands {
            let mut stderr = String::new();
            if let Some(mut pipe) = child.stderr.take() {
                let _ = pipe.read_to_string(&mut stderr);
            }
            return Err(Error::Failed(format!(
                "the emulated machine ended after {} of {} commands; {}",
                codes.len(),
                self.commands,
                if stderr.is_empty() {
                    "it did not say why"
                } else {
                    stderr.trim_end()
                }
            )));
        }
        Ok(codes.into_iter().find(|&code| code != 0).unwrap_or(0))
    }

    fn command(&self) -> Command {
        let mut qemu = Command::new(&self.parts.qemu);
        qemu.env("LD_LIBRARY_PATH", &self.parts.libraries);
        for folder in &self.parts.firmware {
            qemu.arg("-L").arg(folder);
        }
        qemu.args(["-machine", "q35"]).args(PROCESSOR);
        if self.counts_instructions {
            qemu.args(COUNT_INSTRUCTIONS);
        } else {
            qemu.args(["-accel", "tcg"]);
        }
        qemu.args([
            "-display",
            "none",
            "-nodefaults",
            "-no-reboot",
            "-serial",
            "stdio",
        ])
        .args(["-m", &self.memory_mib.to_string()])
        .arg("-kernel")
        .arg(&self.parts.kernel)
        .arg("-initrd")
        .arg(self.initrd)
        .arg("-append")
        .arg(format!(
            "console=ttyS0 panic=-1 loglevel=3 tsc=reliable {} {}",
            self.kvm_amd_option,
            if self.counts_instructions {
                ""
            } else {
                PERIODIC_TIMER
            }
        ))
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
        qemu
    }
}

/// Ends the emulator when it has used its CPU time or does nothing. Returns which, if so.
fn watch(child: &mut Child, cpu_seconds: u64, ended: &AtomicBool) -> Option<String> {
    let (mut used, mut moved) = (Duration::ZERO, Instant::now());
    while !ended.load(Ordering::Acquire) {
        std::thread::sleep(Duration::from_millis(100));
        let now = cpu_time(child.id())?;
        if now != used {
            (used, moved) = (now, Instant::now());
        }
        let why = if used.as_secs() >= cpu_seconds {
            format!("the emulator has used {cpu_seconds} s of CPU time: ended; see --cpu-seconds")
        } else if moved.elapsed() >= IDLE_LIMIT {
            format!(
                "the machine did nothing for {} s: ended",
                IDLE_LIMIT.as_secs()
            )
        } else {
            continue;
        };
        let _ = child.kill();
        return Some(why);
    }
    None
}

/// The CPU time of a process and its threads; none once it has ended.
fn cpu_time(pid: u32) -> Option<Duration> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // Fields 14 and 15 of proc_pid_stat(5), counted behind the name, which may have spaces.
    let (_, fields) = stat.rsplit_once(") ")?;
    let mut fields = fields.split(' ').skip(11).map(str::parse::<u64>);
    let ticks = fields.next()?.ok()? + fields.next()?.ok()?;
    // Linux counts these in hundredths of a second on x86-64.
    Some(Duration::from_millis(10 * ticks))
}

/// Copies the console to stdout, but for the lab's own lines. Returns the exit codes.
fn pass_on(console: impl Read, counts_instructions: bool) -> Result<Vec<u8>, Error> {
    let mut codes = Vec::new();
    let mut stdout = std::io::stdout().lock();
    let mut lines = BufReader::new(console).split(b'\n');
    // The firmware and the boot print before the lab's first line.
    let mut booted = false;
    let mut empty = false;
    while let Some(line) = lines
        .next()
        .transpose()
        .map_err(Error::io("read the console"))?
    {
        let line = line.strip_suffix(b"\r").unwrap_or(&line);
        let text = String::from_utf8_lossy(line);
        if text == ENDED {
            break;
        } else if let Some(why) = text.strip_prefix(CANNOT) {
            return Err(Error::Failed(why.to_owned()));
        } else if let Some(code) = text.strip_prefix(EXIT_CODE) {
            codes.extend(code.trim().parse::<u8>().ok());
            empty = false;
        } else if let Some(about) = text.strip_prefix(ABOUT) {
            eprintln!("lab: {about}");
            if !booted && counts_instructions {
                eprintln!("lab: times are instruction counts, 4 ns for each");
            }
            booted = true;
        } else if booted {
            // An empty line is held back until it is known not to belong to an exit code.
            let mut out = Vec::new();
            if std::mem::replace(&mut empty, line.is_empty()) {
                out.push(b'\n');
            }
            if !line.is_empty() {
                out.extend_from_slice(line);
                out.push(b'\n');
            }
            let written = stdout.write_all(&out).and_then(|()| stdout.flush());
            written.map_err(Error::io("write to stdout"))?;
        }
    }
    Ok(codes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_failure_is_the_exit_code() {
        let console = format!(
            "BIOS\r\n{ABOUT}Linux\nout\n\n{EXIT_CODE}0\nno end\n{EXIT_CODE}7\n{ENDED}\nDown\n"
        );
        assert_eq!(pass_on(console.as_bytes(), true).unwrap(), [0, 7]);
    }

    #[test]
    fn a_machine_that_cannot_run_a_command_says_why() {
        let console = format!("BIOS\r\n{CANNOT}Linux 6.12 gives no /dev/kvm\nDown\n");
        let error = pass_on(console.as_bytes(), true).unwrap_err();
        assert_eq!(error.to_string(), "Linux 6.12 gives no /dev/kvm");
    }

    #[test]
    fn an_emulator_that_uses_its_time_is_ended() {
        let mut busy = Command::new("sh")
            .args(["-c", "while :; do :; done"])
            .spawn()
            .unwrap();
        let why = watch(&mut busy, 1, &AtomicBool::new(false)).unwrap();
        assert!(!busy.wait().unwrap().success());
        assert!(why.contains("1 s of CPU time"), "{why}");
    }

    #[test]
    fn cpu_time_is_that_of_the_process() {
        assert!(cpu_time(std::process::id()).is_some());
        assert_eq!(cpu_time(u32::MAX), None);
    }
}
