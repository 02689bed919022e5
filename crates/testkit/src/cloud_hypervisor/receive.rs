//! The double as the receiver of a VM, with post-copy.

use super::config::Quirk;
use super::vmm::Vmm;
use super::wire::{
    COMPLETE, COMPLETE_PAUSED, CONFIG, MEMORY_FD, PAGE_FAULT, START, STATE, expect_ok, header,
    read_header, read_memory_fd, read_payload, respond,
};
use crate::double::contents::PAGE_BYTES as PAGE;
use crate::double::guest::{Guest, Plan};
use crate::double::memory::{Kind, Memory, Ram};
use crate::double::process::Vmm as _;
use crate::double::{Done, lock};
use pageferry_userfault::uffd::{
    Event, EventReader, Features, RegisterMode, Userfaultfd, Wait, Wake,
};
use serde::Deserialize as _;
use std::io::{Read as _, Write as _};
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The wait for the connection for page faults.
const FAULT_LIMIT: Duration = Duration::from_secs(10);

/// Receives a VM at a socket, until it has it.
pub(super) fn receive(vmm: &Arc<Vmm>, path: &str, postcopy: bool) -> Done {
    let listener = UnixListener::bind(path)?;
    let (stream, _) = listener.accept()?;
    let stream = &stream;
    let (mut fds, mut regions): (Vec<(u32, OwnedFd)>, Vec<Ram>) = (Vec::new(), Vec::new());
    let mut started = false;
    loop {
        let (command, length) = read_header(stream)?;
        let step: Done = match command {
            START => {
                started = true;
                Ok(())
            }
            MEMORY_FD if started => read_memory_fd(stream)
                .map(|fd| fds.push(fd))
                .map_err(Into::into),
            CONFIG if started => {
                let config = read_payload(stream, length)?;
                match vmm.config.quirk {
                    Quirk::RefuseConfig => Err("Config is refused".into()),
                    Quirk::ReceiverDiesAtConfig => std::process::exit(9),
                    _ => map(&config, &mut fds).map(|mapped| regions = mapped),
                }
            }
            STATE if !regions.is_empty() => {
                let state = read_payload(stream, length)?;
                let regions = std::mem::take(&mut regions);
                load(vmm, postcopy.then_some(&listener), &state, regions)
            }
            COMPLETE | COMPLETE_PAUSED => {
                let guest = vmm.guest().ok_or("no State came")?;
                if command == COMPLETE {
                    vmm.note_time();
                    guest.run();
                }
                respond(stream, true)?;
                return Ok(());
            }
            other => Err(format!("command {other} is not expected").into()),
        };
        respond(stream, step.is_ok())?;
        step?;
    }
}

/// Maps the memfds by the table of Config.
fn map(config: &[u8], fds: &mut Vec<(u32, OwnedFd)>) -> Done<Vec<Ram>> {
    let config: serde_json::Value = serde_json::from_slice(config)?;
    // The real one needs all three.
    if !config["vm_config"]["cpus"].is_object() || !config["common_cpuid"].is_array() {
        return Err("Config lacks vm_config or common_cpuid".into());
    }
    let mappings = &config["memory_manager_data"]["guest_ram_mappings"];
    let mappings = mappings.as_array().ok_or("no guest_ram_mappings")?;
    let map = |mapping: &serde_json::Value| {
        let number = |name: &str| mapping[name].as_u64().ok_or(format!("no {name}"));
        let slot = number("slot")? as u32;
        let at = fds.iter().position(|(other, _)| *other == slot);
        let (_, fd) = fds.swap_remove(at.ok_or(format!("no memfd of slot {slot}"))?);
        let (gpa, size) = (number("gpa")?, number("size")?);
        let offset = number("file_offset")?;
        Ok(Ram {
            slot,
            gpa,
            size,
            offset,
            fd,
        })
    };
    mappings.iter().map(map).collect()
}

/// Loads State, in the steps of the real one: the connection for page faults (at `listener`, in
/// post-copy), its vCPUs, for which KVM reads the page of a clock, its devices, and its locks.
fn load(vmm: &Arc<Vmm>, listener: Option<&UnixListener>, state: &[u8], rams: Vec<Ram>) -> Done {
    match vmm.config.quirk {
        Quirk::ReceiverDiesAtState => std::process::exit(9),
        Quirk::RefuseState => return Err("State is refused".into()),
        _ => {}
    }
    let faults = listener.map(fault_connection).transpose()?;
    let state: serde_json::Value = serde_json::from_slice(state)?;
    let plan = Plan::deserialize(&state["double"])?;
    let sizes: Vec<u64> = rams.iter().map(|ram| ram.size).collect();
    let memory = Memory::map(&sizes, Kind::Shared(rams))?;
    let guest = Guest::start(memory, plan);
    *lock(&vmm.guest) = Some(Arc::clone(&guest));
    if let Some(faults) = faults {
        start_serving(vmm, &guest, faults)?;
    }
    guest.read(0);
    let refused = |why: &str| {
        *lock(&vmm.guest) = None;
        Err(format!(r#"["Error restoring VM","{why}"]"#).into())
    };
    match vmm.config.quirk {
        Quirk::AllFirst => {
            crate::wait_until("all pages", || lock(&vmm.own).served.is_some());
            Ok(())
        }
        Quirk::RefuseDisk => refused("Error opening disk: No such file or directory"),
        Quirk::RefuseLock => refused("Failed to acquire an advisory lock of a disk"),
        _ => Ok(()),
    }
}

/// Registers guest memory, and starts the thread that asks for its pages.
fn start_serving(vmm: &Arc<Vmm>, guest: &Arc<Guest>, faults: UnixStream) -> Done {
    let features = Features::MISSING_SHMEM | Features::MINOR_SHMEM;
    let uffd = Userfaultfd::open(features)?;
    let mode = match vmm.config.quirk {
        Quirk::MissingOnly => RegisterMode::MISSING,
        _ => RegisterMode::MISSING | RegisterMode::MINOR,
    };
    guest.memory.register(&uffd, mode)?;
    let (serving, vmm) = (Arc::clone(guest), Arc::clone(vmm));
    let began = Instant::now();
    std::thread::spawn(move || {
        let done = serve(&vmm, &serving, &uffd, &faults);
        drop(uffd);
        match done {
            Ok(()) => lock(&vmm.own).served = Some(began.elapsed()),
            // It has refused the VM.
            Err(_) if !vmm.guest().is_some_and(|now| Arc::ptr_eq(&now, &serving)) => {}
            Err(why) => {
                eprintln!("the double ends: {why}");
                // The real one ends its VM, and itself.
                std::process::exit(3);
            }
        }
    });
    Ok(())
}

fn fault_connection(listener: &UnixListener) -> Done<UnixStream> {
    listener.set_nonblocking(true)?;
    let began = Instant::now();
    let mut stream = loop {
        match listener.accept() {
            Ok((stream, _)) => break stream,
            Err(_) if began.elapsed() < FAULT_LIMIT => {
                std::thread::sleep(Duration::from_millis(1));
            }
            Err(why) => return Err(format!("no connection for page faults: {why}").into()),
        }
    };
    stream.set_nonblocking(false)?;
    let mut role = [0; 2];
    stream.read_exact(&mut role)?;
    match u16::from_le_bytes(role) {
        2 => Ok(stream),
        other => Err(format!("a connection of kind {other}").into()),
    }
}

/// Asks for one page at a time: those of faults first, and then all in order.
fn serve(vmm: &Vmm, guest: &Guest, uffd: &Userfaultfd, mut faults: &UnixStream) -> Done {
    let mut events = EventReader::new(16);
    let mut asked = vec![false; guest.memory.pages() as usize];
    let (mut next, mut count) = (0, 0);
    loop {
        let more = asked[next..].iter().position(|asked| !asked);
        // Late faults are on pages that are here.
        let limit = Duration::from_millis(if more.is_some() { 0 } else { 20 });
        let wait = Wait {
            limit: Some(limit),
            ..Wait::default()
        };
        let page = match (events.next(uffd, wait)?, more) {
            (Some(Event::PageFault(fault)), _) => {
                lock(&vmm.own).faults += 1;
                let page = guest.memory.page_at(fault.address);
                page.ok_or("a fault outside the guest")?
            }
            (Some(other), _) => return Err(format!("the event {other:?}").into()),
            (None, Some(more)) => {
                next += more;
                next as u64
            }
            (None, None) => return Ok(()),
        };
        let (gpa, hva) = guest.memory.place(page);
        if asked[page as usize] {
            uffd.wake(hva, PAGE)?;
            continue;
        }
        let runs = guest.is_running();
        if vmm.config.quirk == Quirk::ReceiverDiesAtFaults && count >= 64 && runs {
            std::process::exit(9);
        }
        let (command, gpa) = match vmm.config.quirk {
            Quirk::EarlyFault if count == 2 => (PAGE_FAULT, 1 << 50),
            Quirk::WrongFault if count >= 8 && runs => (PAGE_FAULT, 1 << 50),
            Quirk::WrongCommand if count >= 8 && runs => (START, gpa),
            _ => (PAGE_FAULT, gpa),
        };
        let length = if command == START { 0 } else { 16 };
        let mut message = header(command, 0, length).to_vec();
        if command == PAGE_FAULT {
            message.extend_from_slice(&gpa.to_le_bytes());
            message.extend_from_slice(&PAGE.to_le_bytes());
        }
        faults.write_all(&message)?;
        expect_ok(faults, "PageFault")?;
        asked[page as usize] = true;
        count += 1;
        match uffd.continue_range(hva, PAGE, Wake::Now) {
            Err(why) if why.is_already_there() => {
                uffd.wake(hva, PAGE)?;
            }
            done => done?,
        }
        let pause = *lock(&vmm.pause);
        if !pause.is_zero() {
            std::thread::sleep(pause);
        }
    }
}
