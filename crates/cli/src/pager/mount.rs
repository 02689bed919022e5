//! `pageferry pager mount`: snapshots as files.
//!
//! **Guarantee.** An ordinary end never takes the memory of a VM: the command waits until no VM
//! uses its files, or leaves them to the next one that has its descriptor. Only a second signal
//! ends it before.

use super::args::MountArgs;
use super::{POLL, asked_to_end, service};
use crate::exit::{Exit, Failure};
use crate::output;
use crate::signals::Interrupts;
use pageferry_charts::time;
use pageferry_harness::size::human;
use pageferry_pager::{
    Fingerprint, Format, Mount, MountError, MountFile, MountSettings, Name, Owner, Recording,
    Survival,
};
use std::collections::BTreeMap;
use std::fmt::Write;
use std::time::{Duration, Instant};

/// The interval at which sources are looked at.
const LOOK: Duration = Duration::from_millis(200);

/// `pageferry pager mount`.
pub(super) fn mount(args: &MountArgs, interrupts: &Interrupts) -> Result<(), Failure> {
    let mut kept = service::kept(service::Kind::MOUNT)?;
    let settings = MountSettings {
        directory: args.directory.clone(),
        files: files(args)?,
        keeper: service::keeper(service::Kind::MOUNT),
        kept: kept.drain().next().map(|(_, fd)| fd),
    };
    let mount = Mount::start(settings).map_err(|why| {
        let exit = match why {
            MountError::Host(_) => Exit::Internal,
            MountError::NoFuse(_) | MountError::Forbidden => Exit::Delivery,
            _ => Exit::Address,
        };
        Failure::new(exit, why.to_string())
    })?;
    let status = mount.status();
    if let Survival::Lost(why) = &status.death_of_pager {
        output::note(&format!("the death of this pager would cost VMs: {why}"));
    }
    let directory = status.directory.display();
    let files = match status.files.len() {
        1 => format!("1 file at {directory}"),
        count => format!("{count} files at {directory}"),
    };
    output::note(&files);
    service::ready(&files);
    let mut told = Told::default();
    let mut watch = || {
        told.watch(&mount);
        std::thread::sleep(POLL);
    };
    while !asked_to_end(interrupts) && !mount.has_ended() {
        watch();
    }
    service::stopping();
    let asked = interrupts.count();
    let mut has_told = false;
    while let Err(why) = mount.unmount() {
        let MountError::InUse { .. } = why else {
            return Err(Failure::new(Exit::Internal, why.to_string()));
        };
        if status.death_of_pager == Survival::Kept {
            output::note("VMs use the files: they wait for the next pager");
            finish(args, &mount)?;
            mount.leave();
            return Ok(());
        }
        if interrupts.count() > asked {
            let why = "ended while VMs use the files: they get SIGBUS";
            return Err(Failure::new(Exit::Cancelled, why));
        }
        if !has_told {
            output::note(
                "VMs use the files: waiting for their end; a second signal takes them away",
            );
            has_told = true;
        }
        watch();
    }
    finish(args, &mount)
}

/// The files that the flags name.
fn files(args: &MountArgs) -> Result<BTreeMap<Name, MountFile>, Failure> {
    let usage = |why: String| Failure::new(Exit::Usage, why);
    let stores = args.stores.open()?;
    let mut files = BTreeMap::new();
    let raw = args.snapshot.iter().map(|named| (Format::Raw, named));
    let packed = args.packed.iter().map(|named| (Format::Packed, named));
    for (format, (name, path)) in raw.chain(packed) {
        let file = MountFile {
            source: stores
                .open(path, format)
                .map_err(|why| usage(why.to_string()))?,
            owner: Owner {
                user: args.owner,
                group: args.group,
                mode: args.mode,
            },
            replay: None,
        };
        if files.insert(name.clone(), file).is_some() {
            return Err(usage(format!(
                "two snapshots have the name {name}: expected one"
            )));
        }
    }
    for (name, path) in &args.replay {
        let file = files.get_mut(name).ok_or_else(|| {
            usage(format!(
                "a recording for {name}: expected a snapshot of that name"
            ))
        })?;
        let found = Fingerprint::of(&*file.source).map_err(|why| usage(why.to_string()))?;
        let recording = Recording::load_of(path, Some(found));
        file.replay = Some(recording.map_err(|why| usage(why.to_string()))?);
    }
    Ok(files)
}

/// What the user has heard.
struct Told {
    watchdog: service::Watchdog,
    looked: Instant,
    faults: BTreeMap<String, String>,
    has_strays: bool,
}

impl Default for Told {
    fn default() -> Self {
        Self {
            watchdog: service::Watchdog::new(),
            looked: Instant::now(),
            faults: BTreeMap::new(),
            has_strays: false,
        }
    }
}

impl Told {
    /// Tells of sources that are lost or back.
    fn watch(&mut self, mount: &Mount) {
        self.watchdog.live();
        if self.looked.elapsed() < LOOK {
            return;
        }
        self.looked = Instant::now();
        let status = mount.status();
        for file in &status.files {
            let before = self.faults.get(&file.name);
            if before == file.fault.as_ref() {
                continue;
            }
            match &file.fault {
                Some(fault) => {
                    output::note(&format!(
                        "{}: VMs wait for a part of it: {fault}",
                        file.name
                    ));
                    self.faults.insert(file.name.clone(), fault.clone());
                }
                None => {
                    output::note(&format!("{}: all of it can be read again", file.name));
                    self.faults.remove(&file.name);
                }
            }
        }
        if status.stray_reads > 0 && !self.has_strays {
            output::note(
                "VMs wait for a snapshot that is not here any more, or has changed: start this \
                 command with the former one",
            );
            self.has_strays = true;
        }
    }
}

/// Prints the figures.
fn finish(args: &MountArgs, mount: &Mount) -> Result<(), Failure> {
    let status = mount.status();
    if args.json {
        output::json(&serde_json::to_value(&status).map_err(|why| Failure::os("figures", why))?);
        return Ok(());
    }
    let mut lines = String::new();
    for file in &status.files {
        let reads: Vec<String> = [
            ("of zeros", &file.zero_reads),
            ("at hand", &file.at_hand_reads),
            ("slow", &file.slow_reads),
        ]
        .into_iter()
        .filter(|(_, times)| times.faults > 0)
        .map(|(way, times)| {
            let (p50, p99) = (time(times.p50 as f64 / 1e3), time(times.p99 as f64 / 1e3));
            format!("{} {way} (p50 {p50}, p99 {p99})", times.faults)
        })
        .collect();
        let reads = match reads.is_empty() {
            true => "none".to_owned(),
            false => reads.join(", "),
        };
        let _ = writeln!(
            lines,
            "  {:<11} {}, reads: {reads}",
            file.name,
            human(file.bytes)
        );
    }
    output::result(&lines);
    Ok(())
}
