//! The double as the receiver of a VM, with post-copy.

use super::config::Quirk;
use super::vmm::Vmm;
use super::wire::{
    COMPLETE, COMPLETE_PAUSED, CONFIG, MEMORY_FD, PAGE_FAULT, START, STATE, expect_ok, header,
    read_header, read_memory_fd, read_payload, respond,
};
use crate::double::contents::PAGE_BYTES as PAGE;
use crate::double::guest::{Guest, Plan};
use crate::double::lock;
use crate::double::memory::{Kind, Memory, Ram};
use crate::double::process::Vmm as _;
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
pub(super) fn receive(vmm: &Arc<Vmm>, path: &str, postcopy: bool) -> Result<(), String> {
    let io = |why: std::io::Error| why.to_string();
    let listener = UnixListener::bind(path).map_err(io)?;
    let (stream, _) = listener.accept().map_err(io)?;
    let stream = &stream;
    let (mut fds, mut regions): (Vec<(u32, OwnedFd)>, Vec<Ram>) = (Vec::new(), Vec::new());
    let mut started = false;
    loop {
        let (command, length) = read_header(stream).map_err(io)?;
        let step = match command {
            START => {
                started = true;
                Ok(())
            }
            MEMORY_FD if started => read_memory_fd(stream)
                .map(|fd| fds.push(fd))
                .map_err(|why| why.to_string()),
            CONFIG if started => {
                let config = read_payload(stream, length).map_err(io)?;
                match vmm.config.quirk {
                    Quirk::RefuseConfig => Err("Config is refused".into()),
                    Quirk::ReceiverDiesAtConfig => std::process::exit(9),
                    _ => map(&config, &mut fds).map(|mapped| regions = mapped),
                }
            }
            STATE if !regions.is_empty() => {
                let state = read_payload(stream, length).map_err(io)?;
                let regions = std::mem::take(&mut regions);
                load(vmm, postcopy.then_some(&listener), &state, regions)
            }
            COMPLETE | COMPLETE_PAUSED => {
                let guest = vmm.guest().ok_or("no State came")?;
                if command == COMPLETE {
                    vmm.note_time();
                    guest.run();
                }
                respond(stream, true).map_err(io)?;
                return Ok(());
            }
            other => Err(format!("command {other} is not expected")),
        };
        respond(stream, step.is_ok()).map_err(io)?;
        step?;
    }
}

/// Maps the memfds by the table of Config.
fn map(config: &[u8], fds: &mut Vec<(u32, OwnedFd)>) -> Result<Vec<Ram>, String> {
    let config: serde_json::Value =
        serde_json::from_slice(config).map_err(|why| why.to_string())?;
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
fn load(
    vmm: &Arc<Vmm>,
    listener: Option<&UnixListener>,
    state: &[u8],
    rams: Vec<Ram>,
) -> Result<(), String> {
    match vmm.config.quirk {
        Quirk::ReceiverDiesAtState => std::process::exit(9),
        Quirk::RefuseState => return Err("State is refused".into()),
        _ => {}
    }
    let faults = listener.map(fault_connection).transpose()?;
    let state: serde_json::Value = serde_json::from_slice(state).map_err(|why| why.to_string())?;
    let plan = Plan::deserialize(&state["double"]).map_err(|why| why.to_string())?;
    let sizes: Vec<u64> = rams.iter().map(|ram| ram.size).collect();
    let memory = Memory::map(&sizes, Kind::Shared(rams)).map_err(|why| why.to_string())?;
    let guest = Guest::start(memory, plan);
    *lock(&vmm.guest) = Some(Arc::clone(&guest));
    if let Some(faults) = faults {
        start_serving(vmm, &guest, faults)?;
    }
    guest.read(0);
    let refused = |why: &str| Err(format!(r#"["Error restoring VM","{why}"]"#));
    match vmm.config.quirk {
        Quirk::RefuseDisk => refused("Error opening disk: No such file or directory"),
        Quirk::RefuseLock => refused("Failed to acquire an advisory lock of a disk"),
        _ => Ok(()),
    }
}

/// Registers guest memory, and starts the thread that asks for its pages.
fn start_serving(vmm: &Arc<Vmm>, guest: &Arc<Guest>, faults: UnixStream) -> Result<(), String> {
    let features = Features::MISSING_SHMEM | Features::MINOR_SHMEM;
    let uffd = Userfaultfd::open(features).map_err(|why| why.to_string())?;
    let mode = match vmm.config.quirk {
        Quirk::MissingOnly => RegisterMode::MISSING,
        _ => RegisterMode::MISSING | RegisterMode::MINOR,
    };
    guest.memory.register(&uffd, mode)?;
    let (serving, vmm) = (Arc::clone(guest), Arc::clone(vmm));
    let began = Instant::now();
    std::thread::spawn(move || {
        if let Err(why) = serve(&vmm, &serving, &uffd, &faults) {
            eprintln!("the double ends: {why}");
            // The real one ends its VM, and itself.
            std::process::exit(3);
        }
        lock(&vmm.own).served = Some(began.elapsed());
    });
    Ok(())
}

fn fault_connection(listener: &UnixListener) -> Result<UnixStream, String> {
    let io = |why: std::io::Error| why.to_string();
    listener.set_nonblocking(true).map_err(io)?;
    let began = Instant::now();
    let mut stream = loop {
        match listener.accept() {
            Ok((stream, _)) => break stream,
            Err(_) if began.elapsed() < FAULT_LIMIT => {
                std::thread::sleep(Duration::from_millis(1));
            }
            Err(why) => return Err(format!("no connection for page faults: {why}")),
        }
    };
    stream.set_nonblocking(false).map_err(io)?;
    let mut role = [0; 2];
    stream.read_exact(&mut role).map_err(io)?;
    match u16::from_le_bytes(role) {
        2 => Ok(stream),
        other => Err(format!("a connection of kind {other}")),
    }
}

/// Asks for one page at a time: those of faults first, and then all in order.
fn serve(
    vmm: &Vmm,
    guest: &Guest,
    uffd: &Userfaultfd,
    mut faults: &UnixStream,
) -> Result<(), String> {
    let mut events = EventReader::new(16);
    let mut asked = vec![false; guest.memory.pages() as usize];
    let (mut next, mut count) = (0, 0);
    loop {
        let page = match events.try_next(uffd).map_err(|why| why.to_string())? {
            Some(Event::PageFault(fault)) => {
                lock(&vmm.own).faults += 1;
                guest
                    .memory
                    .page_at(fault.address)
                    .ok_or("a fault outside the guest")?
            }
            Some(other) => return Err(format!("the event {other:?}")),
            None => match asked[next..].iter().position(|asked| !asked) {
                Some(more) => {
                    next += more;
                    next as u64
                }
                None => break,
            },
        };
        let (gpa, hva) = guest.memory.place(page);
        if asked[page as usize] {
            uffd.wake(hva, PAGE).map_err(|why| why.to_string())?;
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
        faults.write_all(&message).map_err(|why| why.to_string())?;
        expect_ok(faults, "PageFault")?;
        asked[page as usize] = true;
        count += 1;
        match uffd.continue_range(hva, PAGE, Wake::Now) {
            Err(why) if why.is_already_there() => {
                uffd.wake(hva, PAGE).map_err(|why| why.to_string())?;
            }
            done => done.map_err(|why| why.to_string())?,
        }
        let pause = *lock(&vmm.pause);
        if !pause.is_zero() {
            std::thread::sleep(pause);
        }
    }
    // Late faults are on pages that are here.
    let wait = Wait {
        limit: Some(Duration::from_millis(20)),
        ..Wait::default()
    };
    while let Some(event) = events.next(uffd, wait).map_err(|why| why.to_string())? {
        if let Event::PageFault(fault) = event {
            let page = guest
                .memory
                .page_at(fault.address)
                .ok_or("a fault outside the guest")?;
            let woken = uffd.wake(guest.memory.place(page).1, PAGE);
            woken.map_err(|why| why.to_string())?;
        }
    }
    Ok(())
}
