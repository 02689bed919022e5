//! The demo's Linux guest: it runs under load, and its console says what it noticed.

use super::ASK_LIMIT;
use super::child::Child;
use super::text::{Closed, Line, Listener};
use super::view::{Hearing, TICKS};
use crate::args::DemoArgs;
use crate::control::protocol::Request;
use crate::exit::{Exit, Failure};
use crate::progress::Feed;
use crate::report::{GuestView, ns};
use crate::run::Kernel;
use crate::signals::Interrupts;
use crate::vm::{Vm, engine_that_receives};
use pageferry_harness::guest_linux;
use pageferry_machine::{Engine, EngineChoice, kvm};
use pageferry_migration::monotonic;
use std::time::{Duration, Instant};

/// The kernel's arguments: the load, and no messages that are no complaints.
const ARGUMENTS: &str = "panic=-1 quiet pf=load";
/// The time limit for the guest to do all kinds of its work, before the move and again after it.
const LIMIT: Duration = Duration::from_secs(180);

/// Reads the guest's files, and chooses the engine that runs it, with the reason.
///
/// # Errors
/// [`Exit::Usage`] if there are none, and the errors of [`Kernel::engine`].
pub(super) fn kernel(args: &DemoArgs) -> Result<(Kernel, Engine, String), Failure> {
    if args.corrupt_page {
        return Err(Failure::new(
            Exit::Usage,
            "--corrupt-page changes a page of the test program: leave out --guest linux",
        ));
    }
    let (named, choice) = (args.kernel.as_deref(), args.machine.engine);
    let find = |engine| {
        guest_linux::find(engine, named, args.initrd.as_deref())
            .map_err(|why| Failure::new(Exit::Usage, why))
    };
    // KVM, or the reason against it. Files that the user named decide it themselves.
    let (wanted, against) = match choice {
        EngineChoice::Only(engine) => (engine, None),
        EngineChoice::Auto if named.is_some() => (Engine::Kvm, None),
        EngineChoice::Auto => match engine_that_receives(choice)? {
            (Engine::Soft, why) => (Engine::Soft, Some(why)),
            (Engine::Kvm, _) => {
                let runs = kvm::probe_kernels().map_err(Failure::from);
                match runs.and_then(|()| find(Engine::Kvm)) {
                    Ok(_) => (Engine::Kvm, None),
                    Err(why) => (Engine::Soft, Some(why.message)),
                }
            }
        },
    };
    let files = find(wanted)?;
    let mut kernel = Kernel::read(
        &files.kernel,
        Some(&files.initrd),
        None,
        args.machine.memory,
    )?;
    kernel.set_arguments(ARGUMENTS);
    let (engine, because) = kernel.engine(choice)?;
    Ok((kernel, engine, against.unwrap_or(because)))
}

/// What is heard of a guest that runs here.
pub(super) struct Here {
    console: Listener,
    /// The console of the destination, which is heard from the start: the times count.
    there: Listener,
    hearing: Hearing,
}

impl Here {
    /// Listens to the console of `vm`, which runs Linux, and to that of `child`.
    ///
    /// # Errors
    /// When the host has no room for a thread.
    pub(super) fn listen(vm: &Vm, child: &mut Child) -> Result<Self, Failure> {
        let console = vm.console().expect("Linux has a console");
        Ok(Self {
            console: Listener::of_console(console)?,
            there: Listener::of_pipe(child.console())?,
            hearing: Hearing::default(),
        })
    }

    /// The number of lines that the guest has written.
    pub(super) fn lines(&self) -> u64 {
        self.console.heard()
    }

    /// Waits until the guest does all kinds of its work, and then two seconds.
    ///
    /// # Errors
    /// [`Exit::Guest`] if it does not.
    pub(super) fn warm_up(
        &mut self,
        vm: &Vm,
        feed: &Feed,
        interrupts: &Interrupts,
    ) -> Result<(), Failure> {
        feed.step("boot and warm-up");
        let guest = |why: String| Failure::new(Exit::Guest, why);
        let mut last = Line {
            at_ns: 0,
            text: Vec::new(),
        };
        let warm = interrupts.wait_for(LIMIT, || {
            vm.check_guest()?;
            while let Ok(Some(line)) = self.console.take() {
                self.hearing.hear(&line);
                last = line;
            }
            feed.at(self.hearing.ticks().min(TICKS), TICKS);
            if let Some(reset) = vm.reset() {
                let how = match reset.kind {
                    pageferry_machine::ResetKind::Shutdown => "has shut down",
                    pageferry_machine::ResetKind::Reboot => {
                        "asked for a reboot, as it does after a panic"
                    }
                };
                return Err(guest(format!("the guest {how}")));
            }
            Ok(self.hearing.is_warm().then_some(()))
        });
        let told = || {
            let text = String::from_utf8_lossy(&last.text);
            format!("its last line: '{}'", text.replace(char::is_control, "?"))
        };
        warm.map_err(|failure| match failure.exit {
            Exit::Guest => failure.and(&told()),
            _ => failure,
        })?
        .ok_or_else(|| {
            let limit = LIMIT.as_secs();
            guest(format!("the guest did not do its work within {limit} s")).and(&told())
        })
    }

    /// The move begins.
    pub(super) fn begin(&mut self) {
        self.hearing.begin(ns(monotonic()));
    }

    /// The VM has left, and all of it is at the destination.
    pub(super) fn follow(mut self) -> There {
        let (lines, rest) = self.console.end();
        for line in &lines {
            self.hearing.hear(line);
        }
        self.hearing.finish(ns(monotonic()));
        There {
            console: self.there,
            hearing: self.hearing,
            rest,
        }
    }
}

/// What is heard of a guest that runs in the child's process.
pub(super) struct There {
    console: Listener,
    hearing: Hearing,
    /// The beginning of the first line: the source has the rest of it.
    rest: Vec<u8>,
}

impl There {
    /// Listens until the guest has done all kinds of its work here too, and for two seconds.
    ///
    /// # Errors
    /// [`Exit::Guest`] if it makes no progress.
    pub(super) fn hear(
        mut self,
        child: &mut Child,
        feed: &Feed,
        interrupts: &Interrupts,
    ) -> Result<GuestView, Failure> {
        feed.step("guest checks itself");
        let began = Instant::now();
        while !self.hearing.is_done() {
            match self.console.take() {
                Ok(Some(mut line)) => {
                    line.text = [std::mem::take(&mut self.rest), line.text].concat();
                    self.hearing.hear(&line);
                    feed.at(self.hearing.ticks().min(TICKS), TICKS);
                    continue;
                }
                Ok(None) => {}
                Err(Closed) => return Err(child.failed("its console ended")),
            }
            interrupts.check()?;
            if began.elapsed() > LIMIT {
                let why = format!(
                    "the guest did not do its work at the destination within {} s",
                    LIMIT.as_secs()
                );
                return Err(Failure::new(Exit::Guest, why));
            }
            std::thread::sleep(Interrupts::POLL);
        }
        // A vCPU that failed ends the child.
        child.ask(&Request::Status {}, ASK_LIMIT, interrupts)?;
        Ok(self.hearing.view())
    }
}
