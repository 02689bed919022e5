//! `pageferry pager`: the page server for VMs that start from a snapshot.
//!
//! **Guarantee.** A VM whose pager ends waits for the next one: no command here ends a VM, but
//! `end --kill` and the policy of a restore.
//!
//! **Mechanism.** The crate `pager` serves. [`api`] has the requests, [`http`] carries them,
//! [`share`] has the snapshots of other hosts, and [`service`] talks to systemd.

mod api;
mod args;
mod http;
mod mount;
mod recording;
mod report;
pub(crate) mod service;
#[cfg(feature = "peers")]
mod share;
mod stores;
mod text;
mod watch;

use crate::exit::{Exit, Failure};
use crate::output;
use crate::signals::Interrupts;
use crate::sockets;
use args::{ApiArgs, EndArgs, PagerCommand, RestoreArgs, RunArgs, ServeArgs, StatusArgs};
pub(crate) use args::{PagerArgs, background};
use pageferry_pager::{
    Background, Name, Pager, Phase, RestoreError, Settings, SourceError, StartError, Status,
    Stores, Survival,
};
use serde_json::{Value, json};
use std::ffi::OsString;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};
pub(crate) use stores::StoreArgs;

/// The interval of what a pager looks at: signals, the watchdog, phases.
const POLL: Duration = Duration::from_millis(20);
/// The interval at which `run` tells how far the VM's memory is.
const TELL: Duration = Duration::from_secs(5);

impl PagerArgs {
    /// Whether the command serves until it is ended.
    pub(crate) fn serves(&self) -> bool {
        match self.command {
            PagerCommand::Run(_) | PagerCommand::Serve(_) | PagerCommand::Mount(_) => true,
            #[cfg(feature = "peers")]
            PagerCommand::Share(_) => true,
            _ => false,
        }
    }
}

/// Runs a command of the page server.
///
/// # Errors
/// See the commands.
pub(crate) fn pager(args: &PagerArgs, interrupts: &Interrupts) -> Result<(), Failure> {
    match &args.command {
        PagerCommand::Run(args) => run(args, interrupts),
        PagerCommand::Serve(args) => serve(args, interrupts),
        #[cfg(feature = "peers")]
        PagerCommand::Share(args) => share::share(args, interrupts),
        PagerCommand::Mount(args) => mount::mount(args, interrupts),
        PagerCommand::Restore(args) => restore(args, interrupts),
        PagerCommand::Status(args) => status(args, interrupts),
        PagerCommand::Set(args) => {
            set(&args.api.path(), &args.name, args.background, interrupts)?;
            output::result("set\n");
            Ok(())
        }
        PagerCommand::End(args) => end(args, interrupts),
        PagerCommand::Watch(args) => watch::watch(args, interrupts),
        PagerCommand::Report(args) => watch::report(args, interrupts),
        PagerCommand::Recording(args) => recording::recording(args),
    }
}

fn start(directory: PathBuf, take_over: bool, stores: Stores) -> Result<Pager, Failure> {
    let kept = service::kept(service::Kind::RESTORE)?;
    let settings = Settings {
        directory,
        take_over,
        may_not_take: !service::may_take(),
        keeper: service::keeper(service::Kind::RESTORE),
        kept,
        stores,
    };
    Pager::start(settings).map_err(|why| {
        let exit = match why {
            StartError::Directory(_) => Exit::Address,
            _ => Exit::Internal,
        };
        Failure::new(exit, why.to_string())
    })
}

/// A path with something appended to its last part.
pub(crate) fn beside(path: &Path, suffix: &str) -> PathBuf {
    let mut name = OsString::from(path.as_os_str());
    name.push(suffix);
    name.into()
}

fn asked_to_end(interrupts: &Interrupts) -> bool {
    interrupts.any() || interrupts.hung_up()
}

/// `pageferry pager run`.
fn run(args: &RunArgs, interrupts: &Interrupts) -> Result<(), Failure> {
    let restore = args
        .snapshot
        .restore()
        .map_err(|why| Failure::os("this process's directory", why))?;
    let directory = match &args.state {
        Some(directory) => directory.clone(),
        None => beside(&restore.socket, ".pager"),
    };
    let name: Name = "vm".parse().map_err(|why| Failure::os("a name", why))?;
    let pager = start(directory.clone(), args.take_over, args.stores.open()?)?;
    if pager.status(&name).is_none() {
        pager
            .restore(&name, restore.clone())
            .map_err(|why| Failure::new(of_restore(&why), why.to_string()))?;
    }
    service::ready("serving a VM");
    let ended = follow(&pager, &name, interrupts);
    service::stopping();
    let mut status = pager.status(&name);
    let came = status
        .as_ref()
        .is_some_and(|status| status.phase != Phase::Waiting);
    // Without a VM there is nothing to take up.
    let left = !ended && !came && pager.end(&name, false).is_ok();
    drop(pager);
    if (ended || left) && args.state.is_none() {
        tidy(&directory);
    }
    let Some(status) = status.take_if(|_| ended) else {
        let why = match left {
            true => "cancelled before a VMM came",
            false => "the VM waits for its pages: the same command takes it up again",
        };
        return Err(Failure::new(Exit::Cancelled, why));
    };
    let value = to_json(&status)?;
    if args.json {
        output::json(&value);
    } else {
        output::result(&text::table(&value));
    }
    match status.fault {
        Some(fault) => Err(Failure::new(Exit::Internal, fault)),
        None => Ok(()),
    }
}

/// Removes a directory in which only the lock is left.
fn tidy(directory: &Path) {
    let others = std::fs::read_dir(directory).map(|entries| {
        let mut names = entries.flatten().map(|entry| entry.file_name());
        names.any(|name| name != "lock")
    });
    if others.is_ok_and(|others| !others) {
        // A file that stays costs nothing.
        let _ = std::fs::remove_file(directory.join("lock"));
        let _ = std::fs::remove_dir(directory);
    }
}

/// Tells what a restore does until its VM ends. Returns false if the user ended the pager before.
fn follow(pager: &Pager, name: &Name, interrupts: &Interrupts) -> bool {
    let mut watchdog = service::Watchdog::new();
    let mut told = None;
    let mut at = Instant::now();
    while !asked_to_end(interrupts) {
        let Some(status) = pager.status(name) else {
            return true;
        };
        let key = (status.phase, status.fault.clone());
        if told.as_ref() != Some(&key) {
            output::note(&line(&status));
            told = Some(key);
            at = Instant::now();
        } else if status.phase == Phase::Serving && at.elapsed() >= TELL {
            output::note(&line(&status));
            at = Instant::now();
        }
        if status.phase == Phase::Ended {
            return true;
        }
        watchdog.live();
        if pager.wait_ended(name, POLL) {
            // One more line.
            continue;
        }
    }
    false
}

/// One line about a restore.
fn line(status: &Status) -> String {
    let fault = status.fault.as_deref().unwrap_or_default();
    match (status.phase, &status.vm) {
        (Phase::Waiting, _) if fault.is_empty() => {
            format!("waiting for a VMM at {}", status.restore.socket.display())
        }
        (Phase::Waiting, _) => format!("a VMM was refused: {fault}"),
        (Phase::Serving, Some(vm)) => {
            let risk = match &vm.death_of_pager {
                Survival::Lost(why) => {
                    format!("; the death of this pager would cost the VM: {why}")
                }
                _ => String::new(),
            };
            let percent = 100 * vm.resident / vm.pages.max(1);
            format!(
                "serving process {}: {percent} % of its memory is there{risk}",
                vm.pid
            )
        }
        (Phase::Lost, _) => format!("the memory cannot be read: {fault}"),
        (Phase::Failed, _) => format!("the VM cannot be served: {fault}"),
        (Phase::Ended, _) if fault.is_empty() => "the VM has ended".to_owned(),
        (Phase::Ended, _) => format!("the VM has ended: {fault}"),
        (phase, _) => format!("{phase:?}"),
    }
}

pub(crate) fn of_restore(why: &RestoreError) -> Exit {
    match why {
        RestoreError::Source(SourceError::Failed { why, .. })
            if why.kind() == io::ErrorKind::TimedOut =>
        {
            Exit::Unreachable
        }
        RestoreError::Source(_)
        | RestoreError::Recording(_)
        | RestoreError::Relative(_)
        | RestoreError::Empty(_) => Exit::Usage,
        RestoreError::Listen(_) => Exit::Address,
        RestoreError::Exists(_) | RestoreError::Full => Exit::Declined,
        _ => Exit::Internal,
    }
}

fn to_json(status: &Status) -> Result<Value, Failure> {
    serde_json::to_value(status).map_err(|why| Failure::os("the figures", why))
}

impl ApiArgs {
    fn path(&self) -> PathBuf {
        self.api
            .clone()
            .unwrap_or_else(|| sockets::directory().join("pager.sock"))
    }
}

/// `pageferry pager serve`.
fn serve(args: &ServeArgs, interrupts: &Interrupts) -> Result<(), Failure> {
    let api = match &args.api.api {
        Some(path) => path.clone(),
        None => sockets::path_for(None, Some("pager.sock"))?,
    };
    let directory = args.state.clone().unwrap_or_else(|| beside(&api, ".state"));
    // The lock of the directory comes first: it says whether a socket that is there is stale.
    let pager = Arc::new(start(
        directory.clone(),
        args.take_over,
        args.stores.open()?,
    )?);
    let (listener, file) = pageferry_hostfs::listen_at(&api, &pageferry_pager::Owner::default())
        .map_err(|why| Failure::new(Exit::Address, why.to_string()))?;
    let taken = pager.list();
    http::serve(listener, pager.clone())?;
    for status in &taken {
        output::note(&format!("{}: {}", status.id, line(status)));
    }
    if let Some(risk) = service::risk() {
        output::note(&format!("the death of this pager may cost VMs: {risk}"));
    }
    output::note(&format!("listening at {}", api.display()));
    service::ready(&format!("serving at {}", api.display()));
    let mut watchdog = service::Watchdog::new();
    while !asked_to_end(interrupts) {
        // It needs the lock of all restores, so a pager that hangs is silent.
        let _ = pager.status(
            &"watchdog"
                .parse()
                .map_err(|why| Failure::os("a name", why))?,
        );
        watchdog.live();
        std::thread::sleep(POLL);
    }
    service::stopping();
    drop(file);
    let served = pager.list();
    let waiting = served
        .iter()
        .filter(|status| status.phase != Phase::Ended)
        .count();
    if waiting > 0 {
        output::note(&format!("{waiting} restores wait for the next pager"));
    } else if args.state.is_none() {
        tidy(&directory);
    }
    Ok(())
}

/// `pageferry pager restore`.
fn restore(args: &RestoreArgs, interrupts: &Interrupts) -> Result<(), Failure> {
    let restore = args
        .snapshot
        .restore()
        .map_err(|why| Failure::os("this process's directory", why))?;
    let body = serde_json::to_string(&restore).map_err(|why| Failure::os("the request", why))?;
    let target = format!("/restores/{}", args.name);
    http::ask(&args.api.path(), "PUT", &target, body, interrupts)?;
    output::result(&format!(
        "waiting for a VMM at {}\n",
        restore.socket.display()
    ));
    Ok(())
}

/// `pageferry pager status`.
fn status(args: &StatusArgs, interrupts: &Interrupts) -> Result<(), Failure> {
    let target = match &args.name {
        Some(name) => format!("/restores/{name}"),
        None => "/restores".to_owned(),
    };
    let value = http::ask(&args.api.path(), "GET", &target, String::new(), interrupts)?;
    if args.json {
        output::json(&value);
        return Ok(());
    }
    let tables: Vec<String> = match &value {
        Value::Array(all) => all.iter().map(text::table).collect(),
        one => vec![text::table(one)],
    };
    output::result(&match tables.is_empty() {
        true => "no restores\n".to_owned(),
        false => tables.join("\n"),
    });
    Ok(())
}

/// `pageferry pager set`.
fn set(
    api: &Path,
    name: &Name,
    background: Background,
    interrupts: &Interrupts,
) -> Result<(), Failure> {
    let body = json!({ "background": background }).to_string();
    http::ask(api, "PATCH", &format!("/restores/{name}"), body, interrupts).map(drop)
}

/// `pageferry pager end`.
fn end(args: &EndArgs, interrupts: &Interrupts) -> Result<(), Failure> {
    let api = args.api.path();
    if args.when_loaded {
        load(&api, &args.name, interrupts)?;
    }
    let query = if args.kill { "?kill=true" } else { "" };
    let target = format!("/restores/{}{query}", args.name);
    http::ask(&api, "DELETE", &target, String::new(), interrupts)?;
    output::result("ended\n");
    Ok(())
}

/// Loads all memory of a VM, and waits until it is there or cannot come any more.
fn load(api: &Path, name: &Name, interrupts: &Interrupts) -> Result<(), Failure> {
    let target = format!("/restores/{name}");
    loop {
        let status = http::ask(api, "GET", &target, String::new(), interrupts)?;
        let is_over = ["failed", "ended"].contains(&status["phase"].as_str().unwrap_or_default());
        if status["vm"]["missing"] == 0 || is_over {
            return Ok(());
        }
        if status["restore"]["background"] == "off" {
            set(api, name, Background::Idle, interrupts)?;
        }
        std::thread::sleep(POLL);
    }
}
