//! `pageferry run`: a VM that can be migrated away.

use crate::args::{ConsoleTarget, KernelArgs, MetricsArgs, PlaceArgs, RunArgs};
use crate::console::Shown;
use crate::control::server::Server;
use crate::exit::{Exit, Failure};
use crate::host::{Activity, Ended, Host, HostService, Jobs, check_target};
use crate::output;
use crate::signals::Interrupts;
use crate::vm::{GuestDescription, Vm, check_backing};
use crate::{detach, size, sockets};
use pageferry_machine::{Engine, EngineChoice, Linux};
use pageferry_migration::read_regular_file;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The kernel's command line if the user gives none.
const COMMAND_LINE: &str = "console=hvc0";

/// Runs a VM until it has left, has shut down, or somebody asks for its end. When it runs, a
/// `detached` process leaves the command that started it.
///
/// # Errors
/// The reason why the VM does not run.
pub(crate) fn run(args: &RunArgs, detached: bool, interrupts: &Interrupts) -> Result<(), Failure> {
    let (vcpus, memory) = (args.machine.vcpus, args.machine.memory);
    let kernel = Kernel::of_args(&args.kernel, memory)?;
    let (guest, because) = match &kernel {
        Some(_) => {
            let because = engine_for_linux(args.machine.engine, "--kernel")?;
            (GuestDescription::linux(vcpus, memory), because.into())
        }
        None => {
            let (engine, because) = pageferry_machine::select(args.machine.engine)?;
            (GuestDescription::new(engine, vcpus, memory), because)
        }
    };
    guest.workload()?;
    check_backing(&args.backing, &guest, 1)?;
    let backing = args.backing.backing;
    if let Some(directory) = &args.snapshot_to {
        check_target(directory)?;
    }
    let owner = Owner::start(&args.place, &args.metrics)?;
    let vm = Vm::create(&guest, backing, None)?;
    // The guest has its own copies of the files.
    let load = |vm: &Vm| match kernel {
        Some(kernel) => vm.load_linux(&kernel.linux()),
        None => vm.load(),
    };
    let keeping = Keeping {
        console: args.kernel.console.as_ref(),
        because: &because,
        snapshot_to: args.snapshot_to.as_deref(),
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
    pub(crate) snapshot_to: Option<&'a Path>,
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
        let guest = *vm.guest();
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
        let ended = self.host.keep(&self.jobs, interrupts, how.snapshot_to)?;
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

/// The reason why the soft engine runs Linux, which the user asked for by `flag`.
///
/// # Errors
/// [`Exit::Usage`] for another engine.
pub(crate) fn engine_for_linux(choice: EngineChoice, flag: &str) -> Result<&'static str, Failure> {
    match choice {
        EngineChoice::Auto => Ok("it runs riscv64 kernels"),
        EngineChoice::Only(Engine::Soft) => Ok("it was requested"),
        EngineChoice::Only(Engine::Kvm) => Err(Failure::new(
            Exit::Usage,
            format!(
                "{flag} takes a riscv64 kernel, which runs on the soft engine: leave out --engine, or use --engine soft"
            ),
        )),
    }
}

/// A kernel's files.
pub(crate) struct Kernel {
    kernel: Vec<u8>,
    initrd: Option<Vec<u8>>,
    command_line: String,
}

impl Kernel {
    /// Reads the files that the user named, if any.
    fn of_args(args: &KernelArgs, memory: u64) -> Result<Option<Self>, Failure> {
        let command_line = args.cmdline.as_deref().unwrap_or(COMMAND_LINE);
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
        command_line: &str,
        memory: u64,
    ) -> Result<Self, Failure> {
        Ok(Self {
            kernel: read("kernel", kernel, memory)?,
            initrd: initrd
                .map(|initrd| read("initrd", initrd, memory))
                .transpose()?,
            command_line: command_line.to_owned(),
        })
    }

    /// The files, for a machine that boots them.
    pub(crate) fn linux(&self) -> Linux<'_> {
        Linux {
            kernel: &self.kernel,
            initrd: self.initrd.as_deref(),
            command_line: &self.command_line,
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
