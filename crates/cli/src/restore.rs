//! `pageferry restore`: a VM that `run --snapshot-to` saved starts again before its memory is read.
//!
//! **Guarantee.** It runs as it was saved, with the memory and the disks of its state. Its directory
//! is only read, so several VMs may start from one, each on its own copy of a disk.
//!
//! **Mechanism.** The VM has private memory that a userfaultfd serves. A pager in this process, or
//! one that the user names, brings each page when it is touched. A snapshot of another VMM goes to
//! `bridge`.

use crate::args::RestoreArgs;
use crate::exit::{Exit, Failure};
use crate::host::{MEMORY, STATE, check_target};
use crate::pager::of_restore;
use crate::progress::with_progress;
use crate::run::{Keeping, Owner};
use crate::signals::Interrupts;
use crate::snapshot::{of_open, of_pack};
use crate::sockets;
use crate::vm::{Disks, GuestDescription, SavedFiles, Vm, check_backing};
use pageferry_addr::{PAGE_SIZE, RamPage};
use pageferry_hostfs::Folder;
use pageferry_machine::Backing;
use pageferry_migration::{MAX_SAVED_BYTES, SavedVm};
use pageferry_pager::{
    Format, Name, Pager, Phase, Region, Restore, Settings, Status, connect, open_source,
};
use pageferry_snapshot::{OpenError, Snapshot, open_input, raw_id};
use pageferry_transport::tls::read_regular_file;
use pageferry_userfault::uffd::Userfaultfd;
use std::io::Read;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

/// The pages of a pager that the user names that are compared with its file.
const SAMPLES: u64 = 16;

/// `pageferry restore`: starts a saved VM, whose memory comes when it is touched.
///
/// # Errors
/// The reason why the VM does not run.
pub(crate) fn restore(
    args: &RestoreArgs,
    detached: bool,
    interrupts: &Interrupts,
) -> Result<(), Failure> {
    if let Some(vmm) = &args.for_vmm {
        return vmm.restore(args, interrupts);
    }
    if args.stores.is_given() {
        let why = "certificates, --insecure and --cache are for snapshots of Cloud Hypervisor: \
                   name its process by --for ch:API_SOCKET";
        return Err(Failure::new(Exit::Usage, why));
    }
    let path = args.directory.join(STATE);
    let unusable = |exit, why: &dyn std::fmt::Display| {
        let path = path.display();
        Failure::new(exit, format!("cannot restore from {path}: {why}"))
    };
    let bytes =
        read_regular_file(&path, MAX_SAVED_BYTES).map_err(|why| unusable(Exit::Usage, &why))?;
    let saved = SavedVm::decode(&bytes).map_err(|why| unusable(Exit::Protocol, &why))?;
    let mut offer = saved.offer();
    let invalid = |why: String| unusable(Exit::Protocol, &why);
    let (files, described) = SavedFiles::decode(&offer.guest).map_err(invalid)?;
    offer.guest = described.to_vec();
    let guest = GuestDescription::of_offer(&offer)?;
    check_backing(&args.backing(), &guest, 1)?;
    if let Some(target) = &args.save.snapshot_to {
        check_target(target)?;
    }
    check_memory(args, &files, interrupts)?;
    let format = match files.is_packed {
        true => Format::Packed,
        false => Format::Raw,
    };
    let devices = guest.open_devices(&args.devices, Disks::Ours)?;
    if devices.disks.len() != files.disks.len() {
        return Err(invalid("it has marks of other disks".into()));
    }
    for (disk, mark) in devices.disks.iter().zip(&files.disks) {
        if !args.changed_disk {
            disk.check(mark)?;
        }
    }
    let owner = Owner::start(&args.place, &args.metrics)?;
    let vm = Vm::create(&guest, Backing::Anonymous, None, devices)?;
    // The pager must not end before its VM.
    let mut memory = None;
    let load = |vm: &Vm| {
        memory = Some(Memory::start(args, format, vm)?);
        saved.load(&vm.running())?;
        vm.renew_generation()
    };
    let keeping = Keeping {
        console: args.console.as_ref(),
        because: "as when it was saved",
        save: &args.save,
        paused: saved.is_paused(),
        detached,
    };
    let kept = owner.keep(vm, load, &keeping, interrupts);
    drop(memory);
    kept
}

/// Checks that the memory is that of the state, by its id. A packed one has it in its header, and
/// each chunk is checked when it is read. A raw one is read whole.
///
/// # Errors
/// [`Exit::Protocol`] if it is another one, [`Exit::Usage`] if it cannot be read.
fn check_memory(
    args: &RestoreArgs,
    files: &SavedFiles,
    interrupts: &Interrupts,
) -> Result<(), Failure> {
    let path = args.directory.join(MEMORY);
    let unusable = |exit, why: &dyn std::fmt::Display| {
        let path = path.display();
        Failure::new(exit, format!("cannot restore from {path}: {why}"))
    };
    // The pager that the user named may have it from another host.
    if args.pager.is_some() && !path.exists() {
        return Ok(());
    }
    let found = match files.is_packed {
        true => match Snapshot::open(&path) {
            Ok(snapshot) => snapshot.id(),
            Err(why @ OpenError::Io { .. }) => return Err(of_open(&why)),
            Err(why) => return Err(unusable(Exit::Protocol, &why)),
        },
        false => {
            let file = open_input(&path).map_err(|why| unusable(Exit::Usage, &why))?;
            let (found, _) = with_progress("checking memory", &|| interrupts.any(), |progress| {
                raw_id(&file, progress)
            });
            found.map_err(|why| of_pack(&why))?
        }
    };
    let expected = files.memory;
    match found == expected {
        true => Ok(()),
        false => Err(unusable(
            Exit::Protocol,
            &format_args!(
                "it is not the memory that the file {STATE} was saved with: its id is {found}, \
                 expected {expected}"
            ),
        )),
    }
}

/// The memory of a restored VM.
struct Memory {
    /// The next pager takes it out of this process.
    uffd: Userfaultfd,
    stream: Option<UnixStream>,
    own: Option<Own>,
}

/// A pager in this process.
struct Own {
    /// Ends before its directory goes: its VM has ended, so nobody takes it up.
    pager: Pager,
    _directory: Folder,
}

impl Memory {
    /// Lets a pager serve all memory of a VM that has not run yet.
    fn start(args: &RestoreArgs, format: Format, vm: &Vm) -> Result<Self, Failure> {
        let ram = vm.running().machine.ram();
        let mut memory = Self {
            uffd: ram.demand()?,
            stream: None,
            own: None,
        };
        let region = Region {
            address: ram.guest_hva(RamPage(0)).0,
            size: vm.memory_bytes(),
            offset: 0,
        };
        let ask = |socket: &Path, uffd: &Userfaultfd| {
            connect(socket, &[region], PAGE_SIZE, uffd.as_fd()).map_err(|why| {
                let socket = socket.display();
                Failure::new(Exit::Address, format!("no pager at {socket}: {why}"))
            })
        };
        if let Some(socket) = &args.pager {
            let stream = ask(socket, &memory.uffd)?;
            if let Some(why) = refusal(&stream) {
                let socket = socket.display();
                let why = format!("the pager at {socket} refuses the VM: {why}");
                return Err(Failure::new(Exit::Refused, why));
            }
            memory.stream = Some(stream);
            check_pager(&args.directory.join(MEMORY), format, vm)?;
            return Ok(memory);
        }
        let above = sockets::made()?;
        let directory = Folder::within(&above)
            .map_err(|why| Failure::os(format!("no directory in {}", above.display()), why))?;
        let settings = Settings {
            directory: directory.path().to_owned(),
            ..Settings::default()
        };
        let internal = |why: &dyn std::fmt::Display| Failure::new(Exit::Internal, why.to_string());
        let pager = Pager::start(settings).map_err(|why| internal(&why))?;
        let socket = directory.path().join("socket");
        let own = memory.own.insert(Own {
            pager,
            _directory: directory,
        });
        let file = args.directory.join(MEMORY);
        let mut restore = Restore::new(&file, &socket);
        restore.format = format;
        restore.background = args.background;
        restore.record.clone_from(&args.record);
        restore.replay.clone_from(&args.replay);
        let restore = restore.absolute().map_err(|why| internal(&why))?;
        let name: Name = "vm".parse().map_err(|why| internal(&why))?;
        let begun = own.pager.restore(&name, restore);
        begun.map_err(|why| Failure::new(of_restore(&why), why.to_string()))?;
        memory.stream = Some(ask(&socket, &memory.uffd)?);
        loop {
            match own.pager.status(&name) {
                Some(Status {
                    phase: Phase::Waiting,
                    fault: None,
                    ..
                }) => std::thread::sleep(Duration::from_millis(1)),
                Some(status) if status.phase == Phase::Serving => return Ok(memory),
                status => {
                    let fault = status.and_then(|status| status.fault);
                    let (file, why) = (file.display(), fault.unwrap_or_default());
                    let why = format!("cannot restore from {file}: {why}");
                    return Err(Failure::new(Exit::Protocol, why));
                }
            }
        }
    }
}

/// Compares some pages that the user's pager brings with those of the memory file, if it is here.
///
/// # Errors
/// [`Exit::Protocol`] if the pager serves another file, or the file in another format.
fn check_pager(file: &Path, format: Format, vm: &Vm) -> Result<(), Failure> {
    if !file.exists() {
        return Ok(());
    }
    let unreadable = |why: &dyn std::fmt::Display| Failure::new(Exit::Internal, why.to_string());
    let source = open_source(file, format).map_err(|why| unreadable(&why))?;
    let ram = vm.running().machine.ram();
    for sample in 0..SAMPLES {
        let page = ram.pages() * sample / SAMPLES;
        let [mut here, mut brought] = [[0; PAGE_SIZE as usize]; 2];
        let read = source.read(page * PAGE_SIZE, &mut here);
        read.map_err(|why| unreadable(&why))?;
        let read = ram.try_read(RamPage(page), &mut brought);
        read.map_err(|why| unreadable(&why))?;
        if here != brought {
            let (file, how) = (
                file.display(),
                match format {
                    Format::Packed => "with --packed",
                    Format::Raw => "without --packed",
                },
            );
            let why =
                format!("the pager serves other memory than {file}: run it {how} for this file");
            return Err(Failure::new(Exit::Protocol, why));
        }
    }
    Ok(())
}

/// The reason for which a pager has refused the VM. One that serves it says nothing, and a late
/// refusal leaves the VM waiting for its first page.
fn refusal(stream: &UnixStream) -> Option<String> {
    let limit = Duration::from_millis(200);
    stream.set_read_timeout(Some(limit)).ok()?;
    let mut answer = [0; 4096];
    match (&*stream).read(&mut answer) {
        Ok(0) => Some("it closed the connection".to_owned()),
        Ok(len) => {
            let text = String::from_utf8_lossy(&answer[..len]);
            let value = serde_json::from_str::<serde_json::Value>(&text).ok();
            let why = value.as_ref().and_then(|value| value["error"].as_str());
            Some(why.unwrap_or(&text).escape_debug().to_string())
        }
        Err(_) => None,
    }
}
