//! The real programs: their processes, their APIs, and what their guest says.
//!
//! **Guarantee.** A call of the API has a limit. A process is killed when its test ends.
//!
//! **Mechanism.** The guest of `guest.c` says on the serial port what it has found. The serial port
//! is the standard output of its VMM at both ends.

use crate::support::{Dir, Process};
use pageferry_testkit::{LIMIT, netns, skip, wait_for, wait_until};
use rustix::process::Signal;
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::io::{Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

/// The memory of a VM. The guest works in 16 MiB of it.
pub(super) const MEMORY_MIB: u64 = 32;

/// The options of the C compiler for `guest.c`.
const GUEST: &[&str] = &[
    "-O1",
    "-Wall",
    "-Wextra",
    "-Werror",
    "-ffreestanding",
    "-fno-pie",
    "-no-pie",
    "-mno-red-zone",
    "-mgeneral-regs-only",
    "-fno-stack-protector",
    "-fcf-protection=none",
    "-nostdlib",
    "-static",
    "-Wl,-Ttext-segment=0x200000",
    "-Wl,--build-id=none",
];

/// One of the programs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Firecracker,
    CloudHypervisor,
}
use Kind::{CloudHypervisor, Firecracker};

impl Kind {
    /// The name of the API's scheme in addresses of `pageferry`.
    pub(super) fn scheme(self) -> &'static str {
        match self {
            Firecracker => "fc",
            CloudHypervisor => "ch",
        }
    }

    /// The words by which a destination refuses a VM. Cloud Hypervisor tells nobody its reason.
    pub(super) fn says(self, firecracker: &'static str) -> &'static str {
        match self {
            Firecracker => firecracker,
            CloudHypervisor => "Cloud Hypervisor refused to load State",
        }
    }

    /// The program that the environment names, with `more` at the variable's end. `None` after a
    /// skip.
    #[track_caller]
    pub(super) fn program(self, more: &str) -> Option<PathBuf> {
        let (resource, variable) = match self {
            Firecracker => ("firecracker", "PAGEFERRY_FIRECRACKER"),
            CloudHypervisor => ("cloud-hypervisor", "PAGEFERRY_CLOUD_HYPERVISOR"),
        };
        let variable = format!("{variable}{more}");
        let Some(path) = std::env::var_os(&variable).filter(|path| !path.is_empty()) else {
            skip(resource, format_args!("{variable} names no program"));
            return None;
        };
        if let Err(why) = pageferry_machine::kvm::probe_vm() {
            skip("kvm", why);
            return None;
        }
        assert!(Path::new(&path).is_file(), "{variable} is {path:?}");
        Some(path.into())
    }
}

/// The devices of a VM. The guest uses none of them.
#[derive(Clone, Debug, Default)]
pub(super) struct Devices {
    pub(super) tap: Option<String>,
    pub(super) disk: Option<PathBuf>,
    pub(super) vsock: Option<PathBuf>,
}

/// What the guest has said.
#[derive(Clone, Debug, Default)]
pub(super) struct Said {
    /// The numbers of its ticks.
    pub(super) ticks: BTreeSet<u64>,
    /// Its sweeps over all of its pages, at the last tick.
    pub(super) sweeps: u64,
    /// The pages that it found wrong, by the last tick.
    pub(super) wrong: u64,
}

impl Said {
    fn parse(text: &str) -> Self {
        let mut said = Self::default();
        for line in text.lines() {
            // The program may have written in the midst of a line.
            let words: Vec<_> = line.split(' ').collect();
            let ["tick", tick, "sweeps", sweeps, "wrong", wrong] = words[..] else {
                continue;
            };
            let numbers = [tick, sweeps, wrong].map(str::parse);
            if let [Ok(tick), Ok(sweeps), Ok(wrong)] = numbers {
                said.ticks.insert(tick);
                (said.sweeps, said.wrong) = (sweeps, wrong);
            }
        }
        said
    }
}

/// A program behind its API socket, or the double of one.
pub(super) struct Api(pub(super) Kind, pub(super) PathBuf);

/// A running program, with or without a VM.
pub(super) struct Vmm {
    api: Api,
    process: Process,
    guest: PathBuf,
}

impl std::ops::Deref for Vmm {
    type Target = Api;
    fn deref(&self) -> &Api {
        &self.api
    }
}

impl Api {
    /// Its name for `pageferry`.
    pub(super) fn address(&self) -> String {
        format!("{}:{}", self.0.scheme(), self.1.display())
    }

    /// The state of its VM in its own words, or what kept it from saying that.
    pub(super) fn state(&self) -> String {
        let answer = match self.0 {
            Firecracker => self.call("GET", "", None),
            CloudHypervisor => self.call("GET", "vm.info", None),
        };
        answer.map_or_else(|why| why, |info| info["state"].as_str().unwrap().to_owned())
    }

    pub(super) fn pause(&self) {
        match self.0 {
            Firecracker => self.call("PATCH", "vm", Some(&json!({"state": "Paused"}))),
            CloudHypervisor => self.put("vm.pause", &Value::Null),
        }
        .unwrap();
    }

    pub(super) fn resume(&self) {
        match self.0 {
            Firecracker => self.call("PATCH", "vm", Some(&json!({"state": "Resumed"}))),
            CloudHypervisor => self.put("vm.resume", &Value::Null),
        }
        .unwrap();
    }

    /// Writes a snapshot of the paused VM to a new directory.
    pub(super) fn snapshot(&self, to: &Path) {
        std::fs::create_dir(to).unwrap();
        match self.0 {
            Firecracker => {
                let files =
                    json!({"snapshot_path": to.join("state"), "mem_file_path": to.join("memory")});
                self.put("snapshot/create", &files)
            }
            CloudHypervisor => {
                let url = format!("file://{}", to.display());
                self.put("vm.snapshot", &json!({"destination_url": url}))
            }
        }
        .unwrap();
    }

    /// Calls its API by PUT.
    pub(super) fn put(&self, path: &str, body: &Value) -> Result<Value, String> {
        self.call("PUT", path, Some(body).filter(|body| !body.is_null()))
    }

    /// Calls its API. An error has the program's own words.
    fn call(&self, method: &str, path: &str, body: Option<&Value>) -> Result<Value, String> {
        let prefix = match self.0 {
            Firecracker => "",
            CloudHypervisor => "api/v1/",
        };
        let body = body.map_or_else(String::new, Value::to_string);
        let length = body.len();
        let request = format!(
            "{method} /{prefix}{path} HTTP/1.1\r\nHost: vmm\r\nContent-Length: {length}\r\n\r\n{body}"
        );
        let failed = |why: std::io::Error| why.to_string();
        let mut stream = UnixStream::connect(&self.1).map_err(failed)?;
        stream.set_read_timeout(Some(LIMIT)).map_err(failed)?;
        stream.write_all(request.as_bytes()).map_err(failed)?;
        let (mut answer, mut part) = (String::new(), [0; 4096]);
        loop {
            let got = stream.read(&mut part).map_err(failed)?;
            answer.push_str(&String::from_utf8_lossy(&part[..got]));
            if let Some((head, body)) = answer.split_once("\r\n\r\n") {
                let length = head.lines().find_map(|line| {
                    let (name, value) = line.split_once(": ")?;
                    name.eq_ignore_ascii_case("content-length")
                        .then(|| value.parse::<usize>().unwrap())
                });
                if body.len() >= length.unwrap_or(0) {
                    let is_good = head.starts_with("HTTP/1.1 2");
                    let value = serde_json::from_str(body).unwrap_or(Value::Null);
                    return if is_good { Ok(value) } else { Err(answer) };
                }
            }
            if got == 0 {
                return Err(format!("the API closed its connection behind '{answer}'"));
            }
        }
    }
}

impl Vmm {
    /// Starts `program` without a VM, in the network namespace `host` if there is one. Its API
    /// socket is `name` in `dir`.
    pub(super) fn start(
        kind: Kind,
        program: &Path,
        dir: &Dir,
        name: &str,
        host: Option<&str>,
    ) -> Self {
        let mut command = host.map_or_else(
            || Command::new(program),
            |host| netns::command(host, program),
        );
        let api = dir.path(name);
        let guest = compile(dir, "guest", include_str!("guest.c"), GUEST);
        match kind {
            Firecracker => {
                command.arg("--api-sock").arg(&api);
                command.args(["--level", "Error"]);
            }
            CloudHypervisor => {
                let source = include_str!("no_nested_state.c");
                let preload = compile(dir, "preload", source, &["-O1", "-shared", "-fPIC"]);
                command.arg("--api-socket").arg(&api);
                command.args(["--seccomp", "false"]);
                command.env("LD_PRELOAD", preload);
            }
        }
        let vmm = Self {
            api: Api(kind, api),
            process: Process::spawn(command),
            guest,
        };
        wait_until("its API", || UnixStream::connect(&vmm.api.1).is_ok());
        vmm
    }

    /// Starts a VM, and waits until its guest has written all of its pages.
    pub(super) fn boot(&self, devices: &Devices) {
        let put = |path: &str, body| {
            self.put(path, &body).unwrap();
        };
        match self.0 {
            Firecracker => {
                let machine = json!({"vcpu_count": 1, "mem_size_mib": MEMORY_MIB});
                put("machine-config", machine);
                put("boot-source", json!({"kernel_image_path": self.guest}));
                if let Some(tap) = &devices.tap {
                    let body = json!({"iface_id": "eth0", "host_dev_name": tap});
                    put("network-interfaces/eth0", body);
                }
                if let Some(disk) = &devices.disk {
                    let body =
                        json!({"drive_id": "d", "path_on_host": disk, "is_root_device": false});
                    put("drives/d", body);
                }
                if let Some(vsock) = &devices.vsock {
                    put("vsock", json!({"guest_cid": 3, "uds_path": vsock}));
                }
                put("actions", json!({"action_type": "InstanceStart"}));
            }
            CloudHypervisor => {
                let mut config = json!({
                    "cpus": {"boot_vcpus": 1, "max_vcpus": 1, "nested": false},
                    "memory": {"size": MEMORY_MIB << 20, "shared": true},
                    "payload": {"kernel": self.guest},
                    "serial": {"mode": "Tty"},
                    "console": {"mode": "Off"},
                });
                if let Some(tap) = &devices.tap {
                    config["net"] = json!([{"tap": tap}]);
                }
                if let Some(disk) = &devices.disk {
                    config["disks"] = json!([{"path": disk, "image_type": "Raw"}]);
                }
                if let Some(vsock) = &devices.vsock {
                    config["vsock"] = json!({"cid": 3, "socket": vsock});
                }
                put("vm.create", config);
                put("vm.boot", Value::Null);
            }
        }
        self.process.wait_until_said("READY");
        self.wait_for_progress();
    }

    /// What its guest has said so far.
    pub(super) fn said(&self) -> Said {
        Said::parse(&self.process.said())
    }

    /// Its state and all of its output but ticks, for the message of a test that fails.
    pub(super) fn report(&self) -> String {
        let text = self.process.said();
        let lines: Vec<_> = text.lines().filter(|l| !l.starts_with("tick ")).collect();
        let (state, errors) = (self.state(), self.process.said_on_stderr());
        let last = self.said().ticks.last().copied();
        format!(
            "{state}, last tick {last:?}: {}\n{errors}",
            lines.join("\n")
        )
    }

    /// Whether its guest makes progress now.
    pub(super) fn runs(&self) -> bool {
        let (began, before) = (Instant::now(), self.said().ticks.len());
        while began.elapsed() < Duration::from_millis(500) {
            if self.said().ticks.len() > before + 1 {
                return true;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        false
    }

    #[track_caller]
    fn wait_for_progress(&self) {
        wait_until("the guest's progress", || self.runs());
    }

    /// The guest goes over all of its memory again, and none of it has ever been wrong.
    #[track_caller]
    pub(super) fn assert_whole(&self) {
        let sweeps = || Some(self.said()).filter(|said| !said.ticks.is_empty());
        let before = super::within("a first tick", sweeps, || self.report()).sweeps;
        let swept = || sweeps().filter(|said| said.sweeps > before + 1);
        let said = super::within("two sweeps of the guest", swept, || self.report());
        assert_eq!(said.wrong, 0, "{}", self.report());
    }

    pub(super) fn pid(&self) -> u32 {
        self.process.pid()
    }

    pub(super) fn kill(&mut self) {
        if self.process.is_running() {
            self.process.signal(Signal::KILL);
        }
        wait_for("the end of the killed process", || {
            (!self.process.is_running()).then_some(())
        });
    }
}

/// Compiles a source of C to `name` in `dir`, if it is not there.
fn compile(dir: &Dir, name: &str, source: &str, options: &[&str]) -> PathBuf {
    let (from, to) = (dir.path(&format!("{name}.c")), dir.path(name));
    if !to.exists() {
        std::fs::write(&from, source).unwrap();
        let mut cc = Command::new("cc");
        let done = cc.args(options).arg("-o").arg(&to).arg(&from).output();
        let done = done.expect("a C compiler, cc");
        let errors = String::from_utf8_lossy(&done.stderr);
        assert!(done.status.success(), "{errors}");
    }
    to
}

#[test]
fn only_whole_lines_count() {
    let said = Said::parse("READY\ntick 1 sweeps 0 wrong 0\ntick 2 sweeps 3 wrong 1\ntick 3 swe");
    assert_eq!(said.ticks, BTreeSet::from([1, 2]));
    assert_eq!((said.sweeps, said.wrong), (3, 1));
}
