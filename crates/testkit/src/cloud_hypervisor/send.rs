//! The double as the sender of its VM.

use super::config::Quirk;
use super::snapshot;
use super::vmm::{Vmm, pause};
use super::wire::{
    ABANDON, COMPLETE, COMPLETE_PAUSED, CONFIG, MEMORY, START, STATE, expect_ok, header, request,
    send_memory_fd,
};
use crate::double::Done;
use crate::double::guest::Guest;
use rustix::fs::{MemfdFlags, SealFlags};
use serde_json::json;
use std::io::Write as _;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::time::Duration;

/// Sends the VM to a socket. On an error, a VM that ran runs on.
pub(super) fn send(vmm: &Vmm, guest: &Guest, path: &str) -> Done {
    let was_running = guest.is_running();
    let sent = try_send(vmm, guest, path, was_running);
    if sent.is_err() && was_running {
        guest.run();
    }
    sent
}

fn die(quirk: Quirk, now: Quirk) {
    if quirk == now {
        std::process::exit(9);
    }
}

fn try_send(vmm: &Vmm, guest: &Guest, path: &str, was_running: bool) -> Done {
    let quirk = vmm.config.quirk;
    let stream = &UnixStream::connect(path)?;
    let mut raw = stream;
    match quirk {
        Quirk::Version => {
            raw.write_all(&header(START, 7, 0))?;
            expect_ok(stream, "Start of version 7")?;
        }
        Quirk::ConfigFirst => {}
        _ => request(stream, START, &[], "Start")?,
    }
    match quirk {
        Quirk::Command => request(stream, 42, &[], "command 42")?,
        Quirk::Inline => request(stream, MEMORY, &[0; 16], "Memory")?,
        Quirk::NotShared | Quirk::ConfigFirst => {}
        _ => send_memfds(quirk, guest, stream)?,
    }
    let config = config(quirk, guest);
    let length = match quirk {
        Quirk::LongConfig => 1 << 40,
        _ => config.len() as u64,
    };
    raw.write_all(&header(CONFIG, 0, length))?;
    raw.write_all(&config)?;
    match quirk {
        Quirk::DieAtConfig => {
            std::thread::sleep(Duration::from_millis(200));
            die(quirk, Quirk::DieAtConfig);
        }
        Quirk::Abandon => {
            std::thread::sleep(Duration::from_millis(200));
            raw.write_all(&header(ABANDON, 0, 0))?;
            return Err("gave up".into());
        }
        _ => expect_ok(stream, "Config")?,
    }
    die(quirk, Quirk::DieAtPause);
    pause(guest);
    vmm.note_time();
    let state = snapshot::state(guest).to_string().into_bytes();
    match quirk {
        Quirk::NoState => request(stream, COMPLETE, &[], "Complete before State")?,
        Quirk::LongState => {
            raw.write_all(&header(STATE, 0, 1 << 40))?;
            expect_ok(stream, "a long State")?;
        }
        _ => {
            raw.write_all(&header(STATE, 0, state.len() as u64))?;
            raw.write_all(&state)?;
            die(quirk, Quirk::DieAtState);
            expect_ok(stream, "State")?;
        }
    }
    let command = if was_running {
        COMPLETE
    } else {
        COMPLETE_PAUSED
    };
    raw.write_all(&header(command, 0, 0))?;
    die(quirk, Quirk::DieAtComplete);
    expect_ok(stream, "Complete")
}

fn memfd(bytes: u64) -> OwnedFd {
    let fd = rustix::fs::memfd_create("double", MemfdFlags::CLOEXEC).expect("a memfd");
    rustix::fs::ftruncate(&fd, bytes).expect("a size");
    fd
}

fn send_memfds(quirk: Quirk, guest: &Guest, stream: &UnixStream) -> Done {
    let last = guest.memory.rams().len() - 1;
    let one = |slot: u32, fd: Option<&OwnedFd>| {
        send_memory_fd(stream, slot, fd)?;
        expect_ok(stream, "MemoryFd")
    };
    for (index, region) in guest.memory.rams().iter().enumerate() {
        let other = match quirk {
            Quirk::ShortMemfd if index == last => Some(memfd(4096)),
            Quirk::NoMemfd if index == last => {
                Some(std::fs::File::open("/dev/zero").expect("a device").into())
            }
            Quirk::SealedMemfd => {
                let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
                let fd = rustix::fs::memfd_create("sealed", flags).expect("a memfd");
                rustix::fs::ftruncate(&fd, region.offset + region.size).expect("a size");
                rustix::fs::fcntl_add_seals(&fd, SealFlags::WRITE).expect("a seal");
                Some(fd)
            }
            _ => None,
        };
        let fd = other.as_ref().unwrap_or(&region.fd);
        one(region.slot, (quirk != Quirk::NoDescriptor).then_some(fd))?;
        if quirk == Quirk::TwiceMemfd && index == last {
            one(region.slot, Some(fd))?;
        }
    }
    match quirk {
        Quirk::ExtraMemfd => one(99, Some(&memfd(1 << 20))),
        _ => Ok(()),
    }
}

/// The Config of the VM.
fn config(quirk: Quirk, guest: &Guest) -> Vec<u8> {
    let mut mappings = snapshot::mappings(guest);
    match quirk {
        Quirk::NoJson => return b"no JSON".to_vec(),
        Quirk::ExtraMapping => mappings.push(snapshot::mapping(77, 1 << 40, 1 << 20, 0)),
        Quirk::Overlap => mappings.push(snapshot::mapping(77, guest.memory.rams()[0].gpa, 4096, 0)),
        _ => {}
    }
    let config = json!({
        "vm_config": snapshot::vm_config(guest),
        "common_cpuid": snapshot::cpuid(),
        "memory_manager_data": snapshot::memory_manager(&mappings, &[]),
    });
    config.to_string().into_bytes()
}
