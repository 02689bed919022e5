//! Linux on QEMU, which translates code.
//!
//! **Mechanism.** The machine is `virt` with the same harts as ours: RV64IMA, and C for QEMU's own
//! firmware. `sstc` is off, so that the timer costs an SBI call, as ours does. Firmware older than
//! OpenSBI 1.3 (QEMU before 8.1) has no debug console. A kernel writes to it only with
//! `CONFIG_RISCV_SBI_V01`, or else nothing comes before the deadline.

use super::figures::{Figures, Listener};
use super::{Guest, MEASURE, MEMORY, go_on};
use crate::BenchError;
use pageferry_testkit::qemu::Qemu;
use std::io::Read;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

/// QEMU's harts.
const CPU: &str =
    "rv64,f=false,d=false,v=false,zba=false,zbb=false,zbc=false,zbs=false,h=false,sstc=false";
/// Extensions that QEMU before 9.0 does not know by these names, or has off.
const CPU_9: &str = ",zawrs=false,zfa=false,svadu=false";
/// Device trees of QEMU before 9.0 have the harts' extensions in one word only.
const FALLBACK: &str = "riscv_isa_fallback";
/// The starts of QEMU. It was seen to end by itself, once in many runs with 4 vCPUs.
const TRIES: u32 = 3;
/// The longest wait for text.
const INTERVAL: Duration = Duration::from_millis(20);

/// A QEMU process. Dropping this kills it and reaps it.
struct Process {
    child: Child,
    text: Receiver<Vec<u8>>,
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Process {
    fn start(mut command: Command) -> Result<Self, BenchError> {
        let failed = |e: std::io::Error| BenchError::Peer(format!("QEMU: {e}"));
        let mut child = command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(failed)?;
        let output = child.stdout.take();
        let (to, text) = channel();
        let process = Self { child, text };
        let mut output =
            output.ok_or_else(|| BenchError::Peer("QEMU's output is not a pipe".into()))?;
        // It ends with the process.
        std::thread::Builder::new()
            .name("qemu".into())
            .spawn(move || {
                let mut bytes = [0; 4096];
                while let Ok(read @ 1..) = output.read(&mut bytes) {
                    if to.send(bytes[..read].to_vec()).is_err() {
                        return;
                    }
                }
            })
            .map_err(failed)?;
        Ok(process)
    }
}

impl Guest {
    /// Starts Linux on `vcpus` vCPUs of QEMU, and reads its figures. A QEMU that ends early says
    /// nothing about our own hypervisor, and is started again.
    pub(super) fn measure_qemu(&self, qemu: &Qemu, vcpus: u32) -> Result<Figures, BenchError> {
        for _ in 0..TRIES {
            if let Some(figures) = self.try_qemu(qemu, vcpus)? {
                return Ok(figures);
            }
        }
        let why = format!("QEMU ended {TRIES} times before Linux was done");
        Err(BenchError::Peer(why))
    }

    /// `None` if QEMU has ended early.
    fn try_qemu(&self, qemu: &Qemu, vcpus: u32) -> Result<Option<Figures>, BenchError> {
        let newer = if qemu.is_at_least(9, 0) { CPU_9 } else { "" };
        let mut command = Command::new(qemu.file());
        command
            .args(["-machine", "virt", "-cpu", &format!("{CPU}{newer}")])
            .args(["-accel", "tcg,thread=multi"])
            .args(["-smp", &vcpus.to_string()])
            .args(["-m", &format!("{}M", MEMORY >> 20)])
            .args(["-display", "none", "-nodefaults", "-no-reboot"])
            .args(["-serial", "stdio"])
            .arg("-kernel")
            .arg(&self.files.kernel)
            .arg("-initrd")
            .arg(&self.files.initrd)
            .args(["-append", &format!("{MEASURE} {FALLBACK}")]);
        let mut listener = Listener::new();
        let process = Process::start(command)?;
        let deadline = Instant::now() + super::LIMIT;
        loop {
            match process.text.recv_timeout(INTERVAL) {
                Ok(text) if listener.take(&text)? => return listener.figures().map(Some),
                Ok(_) => {}
                Err(RecvTimeoutError::Timeout) => go_on(deadline, "Linux on QEMU")?,
                Err(RecvTimeoutError::Disconnected) => return Ok(None),
            }
        }
    }
}
