//! `pageferry run`: a VM that can be migrated away.

use crate::args::{ConsoleTarget, KernelArgs, MetricsArgs, PlaceArgs, RunArgs, SaveArgs};
use crate::console::Shown;
use crate::control::server::Server;
use crate::exit::{Exit, Failure};
use crate::host::{Activity, Ended, Host, HostService, Jobs, check_target};
use crate::output;
use crate::signals::Interrupts;
use crate::vm::{Devices, Disks, GuestDescription, Vm, check_backing};
use crate::{detach, sockets};
use pageferry_harness::size;
use pageferry_machine::{CpuModel, Engine, EngineChoice, Linux, kvm};
use pageferry_transport::tls::read_regular_file;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Runs a VM until it has left, has shut down, or somebody asks for its end. When it runs, a
/// `detached` process leaves the command that started it.
///
/// # Errors
/// The reason why the VM does not run.
pub(crate) fn run(args: &RunArgs, detached: bool, interrupts: &Interrupts) -> Result<(), Failure> {
    let (vcpus, memory) = (args.machine.vcpus, args.machine.memory);
    let kernel = Kernel::of_args(&args.kernel, memory)?;
    let (mut guest, because) = match &kernel {
        Some(kernel) => {
            let model = args.kernel.cpu.as_deref().map(|cpu| kernel.cpu_model(cpu));
            let model = model.transpose()?;
            let (engine, because) = kernel.engine(args.machine.engine)?;
            let mut guest = GuestDescription::linux(engine, vcpus, memory);
            if let Some(model) = model {
                guest.cpuid = Some(kvm::cpuid_of(&model, vcpus)?);
            }
            (guest, because)
        }
        None => {
            let (engine, because) = pageferry_machine::select(args.machine.engine)?;
            (GuestDescription::new(engine, vcpus, memory), because)
        }
    };
    guest.workload()?;
    if kernel.is_none() {
        args.devices.check_none("the test program")?;
    }
    check_backing(&args.backing, &guest, 1)?;
    let backing = args.backing.backing;
    if let Some(directory) = &args.save.snapshot_to {
        check_target(directory)?;
    }
    let owner = Owner::start(&args.place, &args.metrics)?;
    // A guest of the soft engine has an interrupt controller only for devices that the user named.
    let devices = match guest.is_pc() || !args.devices.is_empty() {
        true => args.devices.open(Disks::Ours)?,
        false => Devices::default(),
    };
    guest.devices.clone_from(&devices.kinds);
    let vm = Vm::create(&guest, backing, None, devices)?;
    // The guest has its own copies of the files.
    let load = |vm: &Vm| match kernel {
        Some(kernel) => vm.load_linux(&kernel.linux()),
        None => vm.load(args.rest),
    };
    let keeping = Keeping {
        console: args.kernel.console.as_ref(),
        because: &because,
        save: &args.save,
        paused: false,
        detached,
    };
    owner.keep(vm, load, &keeping, interrupts)
}

/// A process that owns a VM, before it has one. It can be reached over its control socket.
pub(crate) struct Owner {
    host: Arc<Host>,
    jobs: Jobs,
    control: PathBuf,
    /// Whether the user named the socket's path.
    named: bool,
    server: Server,
    _metrics: Option<Server>,
}

/// How a VM is kept.
pub(crate) struct Keeping<'a> {
    /// The user's choice of its console.
    pub(crate) console: Option<&'a ConsoleTarget>,
    /// The reason for its engine.
    pub(crate) because: &'a str,
    /// Where it is saved when somebody asks for its end.
    pub(crate) save: &'a SaveArgs,
    /// Whether it stays paused at first.
    pub(crate) paused: bool,
    /// Whether the process leaves the command that started it.
    pub(crate) detached: bool,
}

impl Owner {
    /// Opens the control socket, and that for metrics.
    ///
    /// # Errors
    /// [`Exit::Address`] if a socket cannot be made.
    pub(crate) fn start(place: &PlaceArgs, metrics: &MetricsArgs) -> Result<Self, Failure> {
        let (host, jobs) = Host::new();
        let control = sockets::path_for(place.control.as_deref(), place.name.as_deref())?;
        let server = Server::start(&control, Arc::new(HostService(Arc::clone(&host))))?;
        Ok(Self {
            _metrics: crate::metrics::serve(metrics, {
                let host = Arc::clone(&host);
                move || crate::metrics::of(&host)
            })?,
            host,
            jobs,
            control,
            named: place.control.is_some(),
            server,
        })
    }

    /// Loads a VM and runs it until it has left, has shut down, or somebody asks for its end.
    ///
    /// # Errors
    /// When the console cannot be shown, that of `load`, or the guest cannot go on.
    pub(crate) fn keep(
        self,
        vm: Vm,
        load: impl FnOnce(&Vm) -> Result<(), Failure>,
        how: &Keeping<'_>,
        interrupts: &Interrupts,
    ) -> Result<(), Failure> {
        let vm = Arc::new(vm);
        let guest = vm.guest();
        let target = match how.console {
            Some(target) => Some(target),
            None => (!how.detached).then_some(&ConsoleTarget::Stdio),
        };
        let is_linux = vm.workload().is_none();
        let console = match (is_linux, vm.console(), target) {
            (true, Some(console), Some(target)) => Some(Shown::start(console, target, interrupts)?),
            _ => None,
        };
        load(&vm)?;
        if !how.paused {
            vm.threads().resume();
        }
        self.host.set_vm(Some(&vm));
        self.host.set_activity(Activity::Here);
        output::note(&format!(
            "a VM with {} vCPUs and {} {} on {} ({}); control socket {}",
            guest.vcpus,
            size::human(guest.memory_bytes),
            if how.paused { "is paused" } else { "runs" },
            guest.engine(),
            how.because,
            self.control.display()
        ));
        detach::ready(how.detached, &self.control, !self.named)?;
        let ended = self.host.keep(&self.jobs, interrupts, how.save)?;
        drop(self.server);
        drop(console);
        ended.check()?;
        if let Some(words) = ended.words() {
            output::note(words);
        }
        match ended {
            Ended::Migrated(arrival) => output::result(&format!("{arrival}\n")),
            Ended::Saved(directory) => {
                output::result(&format!("the VM was saved to {}\n", directory.display()));
            }
            _ => {}
        }
        Ok(())
    }
}

/// A kernel's files.
pub(crate) struct Kernel {
    kernel: Vec<u8>,
    initrd: Option<Vec<u8>>,
    /// The user's choice.
    command_line: Option<String>,
}

impl Kernel {
    /// Reads the files that the user named, if any.
    fn of_args(args: &KernelArgs, memory: u64) -> Result<Option<Self>, Failure> {
        let command_line = args.cmdline.as_deref();
        let read = |kernel| Self::read(kernel, args.initrd.as_deref(), command_line, memory);
        args.kernel.as_deref().map(read).transpose()
    }

    /// Reads the files, of which each must be smaller than the guest's memory.
    ///
    /// # Errors
    /// [`Exit::Usage`] if one cannot be read, or is larger.
    pub(crate) fn read(
        kernel: &Path,
        initrd: Option<&Path>,
        command_line: Option<&str>,
        memory: u64,
    ) -> Result<Self, Failure> {
        Ok(Self {
            kernel: read("kernel", kernel, memory)?,
            initrd: initrd
                .map(|initrd| read("initrd", initrd, memory))
                .transpose()?,
            command_line: command_line.map(str::to_owned),
        })
    }

    /// Whether the kernel is one for x86-64.
    fn is_for_pc(&self) -> bool {
        #[cfg(target_arch = "x86_64")]
        return pageferry_machine::is_pc_kernel(&self.kernel);
        #[cfg(not(target_arch = "x86_64"))]
        false
    }

    /// The CPU model that the user named.
    ///
    /// # Errors
    /// [`Exit::Usage`] if there is none, or the kernel is for another processor.
    fn cpu_model(&self, cpu: &Path) -> Result<CpuModel, Failure> {
        let usage = |why: String| Failure::new(Exit::Usage, why);
        if !self.is_for_pc() {
            return Err(usage("--cpu is for x86-64 kernels: leave it out".into()));
        }
        if let Some(model) = cpu.to_str().and_then(|cpu| cpu.strip_suffix(",poison")) {
            return self.cpu_model(Path::new(model)).map(CpuModel::for_poison);
        }
        if let Some(model) = cpu.to_str().and_then(CpuModel::named) {
            return Ok(model);
        }
        let path = cpu.display();
        let bytes = read_regular_file(cpu, CpuModel::MAX_TEXT_BYTES).map_err(|e| {
            usage(format!(
                "cannot read the CPU model {path}: {e}; expected host, x86-64-v2, x86-64-v3 or a file"
            ))
        })?;
        let unusable = |why: &dyn std::fmt::Display| {
            usage(format!("the CPU model {path} is not usable: {why}"))
        };
        let text = std::str::from_utf8(&bytes).map_err(|e| unusable(&e))?;
        CpuModel::from_text(text).map_err(|e| unusable(&e))
    }

    /// The engine that runs it, with the reason.
    ///
    /// # Errors
    /// [`Exit::Usage`] if the user chose another, [`Exit::Engine`] if KVM runs no kernels here.
    pub(crate) fn engine(&self, choice: EngineChoice) -> Result<(Engine, String), Failure> {
        if !self.is_for_pc() {
            return match choice {
                EngineChoice::Auto => Ok((Engine::Soft, "it runs riscv64 kernels".into())),
                EngineChoice::Only(Engine::Soft) => Ok((Engine::Soft, "it was requested".into())),
                EngineChoice::Only(Engine::Kvm) => Err(Failure::new(
                    Exit::Usage,
                    "the kernel is for riscv64, and runs on the soft engine: leave out --engine, \
                     or give KVM a bzImage",
                )),
            };
        }
        if choice == EngineChoice::Only(Engine::Soft) {
            return Err(Failure::new(
                Exit::Usage,
                "the kernel is for x86-64, and runs on KVM: leave out --engine, or give a riscv64 \
                 Image to the soft engine",
            ));
        }
        kvm::probe_vm()?;
        kvm::probe_kernels().map_err(|why| {
            let why = Failure::from(why);
            let soft = "a riscv64 Image runs on the soft engine of any host";
            Failure::new(why.exit, format!("{}; {soft}", why.message))
        })?;
        Ok((Engine::Kvm, "it runs x86-64 kernels".into()))
    }

    /// The argument by which the kernel finds its console.
    fn console(&self) -> &'static str {
        match self.is_for_pc() {
            true => "console=ttyS0",
            false => "console=hvc0",
        }
    }

    /// Sets the command line: the console, and `more`.
    pub(crate) fn set_arguments(&mut self, more: &str) {
        self.command_line = Some(format!("{} {more}", self.console()));
    }

    /// The files, for a machine that boots them.
    pub(crate) fn linux(&self) -> Linux<'_> {
        let console = self.console();
        Linux {
            kernel: &self.kernel,
            initrd: self.initrd.as_deref(),
            command_line: self.command_line.as_deref().unwrap_or(console),
        }
    }
}

fn read(what: &str, path: &Path, memory: u64) -> Result<Vec<u8>, Failure> {
    let refuse = |why: String| {
        let path = path.display();
        Failure::new(Exit::Usage, format!("the {what} {path} {why}"))
    };
    read_regular_file(path, memory.saturating_sub(1)).map_err(|e| match e.kind() {
        ErrorKind::FileTooLarge => refuse(format!(
            "does not fit into {} of guest memory: choose a larger --memory",
            size::human(memory)
        )),
        _ => refuse(format!("cannot be read: {e}")),
    })
}
