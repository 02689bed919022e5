//! The threads that read requests of the kernel and answer them.
//!
//! **Guarantee.** They never wait for a source: a read whose bytes are not at hand goes to the
//! threads of its file.

use super::device::Device;
use super::file::{File, Read};
use super::protocol::{
    Attr, AttrOut, EntryOut, InitOut, Message, OpenOut, REQUEST_BYTES, ROOT, Request, StatfsOut,
    entries, parse,
};
use super::{READAHEAD, replay};
use crate::figures::Count;
use crate::timeline::Came;
use rustix::io::Errno;
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Instant;
use zerocopy::IntoBytes;

/// What the threads of a mount share.
#[derive(Debug)]
pub(super) struct Shared {
    pub(super) device: Arc<Device>,
    pub(super) target: PathBuf,
    /// By node.
    pub(super) files: BTreeMap<u64, Arc<File>>,
    /// Recordings that are being loaded.
    pub(super) replays: AtomicUsize,
    /// Reads of files that this pager does not have.
    pub(super) strays: Count,
    /// Whether the kernel sends again what a pager that died had read.
    pub(super) resends: OnceLock<bool>,
    pub(super) ending: AtomicBool,
}

impl Shared {
    pub(super) fn is_ending(&self) -> bool {
        self.ending.load(Ordering::Relaxed)
    }

    /// Answers requests until the file system ends.
    pub(super) fn serve(self: &Arc<Self>) {
        let mut buffers = Buffers::new();
        while self.answer_one(&mut buffers) {}
        self.ending.store(true, Ordering::Relaxed);
        for file in self.files.values() {
            file.close();
        }
    }

    /// Answers one request. Returns false once the file system has ended.
    pub(super) fn answer_one(self: &Arc<Self>, buffers: &mut Buffers) -> bool {
        let Some(bytes) = self.device.read(&mut buffers.request) else {
            return false;
        };
        match parse(bytes) {
            Ok(message) => self.answer(&message, &mut buffers.reply),
            Err(Some(unique)) => self.device.refuse(unique, Errno::INVAL),
            Err(None) => tracing::error!("the kernel sent {} bytes without a header", bytes.len()),
        }
        true
    }

    fn answer(self: &Arc<Self>, message: &Message<'_>, buffer: &mut Vec<u8>) {
        let (unique, device) = (message.unique, &self.device);
        let file = self.files.get(&message.node);
        match (&message.request, file) {
            (
                Request::Init {
                    minor,
                    readahead,
                    resends,
                },
                _,
            ) => {
                // A kernel that tells it once has told it to an earlier pager.
                let _ = self.resends.set(*resends);
                let reply = InitOut::new(*minor, READAHEAD.min(*readahead));
                device.reply(unique, reply.as_bytes());
            }
            (Request::Read { offset, size }, Some(file)) => {
                let arrived = Instant::now();
                let left = file.source.bytes().saturating_sub(*offset);
                let len = left.min(u64::from(*size)) as usize;
                let read = Read {
                    unique,
                    pid: message.pid,
                    offset: *offset,
                    len,
                    arrived,
                };
                self.read(file, read, buffer);
            }
            (Request::Read { .. }, None) => {
                // An error would end the VM. Without an answer it waits for a pager that has the
                // file: the kernel sends the request again.
                if self.strays.get() == 0 {
                    tracing::error!(
                        "a VM reads a file that is not among the snapshots any more, or has \
                         changed: it waits until a pager with that file takes over"
                    );
                }
                self.strays.add(1);
            }
            (Request::Lookup(name), _) if message.node == ROOT => {
                let named = |file: &&Arc<File>| file.name.as_str().as_bytes() == *name;
                match self.files.values().find(named) {
                    Some(file) => {
                        device.reply(unique, EntryOut::new(file.attr()).as_bytes());
                    }
                    None => device.refuse(unique, Errno::NOENT),
                }
            }
            (Request::Attributes, _) if message.node == ROOT => {
                device.reply(unique, AttrOut::new(Attr::directory()).as_bytes());
            }
            (Request::Attributes, Some(file)) => {
                device.reply(unique, AttrOut::new(file.attr()).as_bytes());
            }
            (Request::Open, Some(file)) => {
                device.reply(unique, OpenOut::file().as_bytes());
                replay::start(self, file);
            }
            (Request::OpenDirectory, _) => {
                device.reply(unique, OpenOut::directory().as_bytes());
            }
            (Request::List { offset, size }, _) => {
                let own = [(ROOT, ".", true), (ROOT, "..", true)].into_iter();
                let files = self.files.values();
                let files = files.map(|file| (file.node, file.name.as_str(), false));
                device.reply(unique, &entries(own.chain(files), *offset, *size));
            }
            (Request::Statistics, _) => {
                let bytes = self.files.values().map(|file| file.source.bytes());
                let bytes = bytes.fold(0, u64::saturating_add);
                let reply = StatfsOut::new(bytes, self.files.len() as u64);
                device.reply(unique, reply.as_bytes());
            }
            (Request::Release, _) => device.reply(unique, &[]),
            (Request::Forget(nodes), _) => {
                for file in nodes.iter().filter_map(|node| self.files.get(node)) {
                    file.replayed.store(false, Ordering::Relaxed);
                }
            }
            // The thread goes on when its read is answered. Most signals are no reason to fail it.
            (Request::Interrupt, _) => {}
            (Request::Lookup(_) | Request::Attributes | Request::Open, _) => {
                device.refuse(unique, Errno::STALE);
            }
            // The kernel remembers that, and does it by itself or not at all.
            (Request::Other(_), _) => device.refuse(unique, Errno::NOSYS),
        }
    }

    fn read(&self, file: &Arc<File>, read: Read, buffer: &mut Vec<u8>) {
        let way = if file.source.is_zero(read.offset, read.len as u64) {
            buffer.clear();
            buffer.resize(read.len, 0);
            Came::Zero
        } else {
            buffer.resize(read.len, 0);
            match file.source.read_now(read.offset, buffer) {
                Ok(true) => Came::AtHand,
                // A failure comes again there.
                Ok(false) | Err(_) => return file.add(&self.device, read),
            }
        };
        // Before the reply: a reader that goes on is counted.
        file.figures.answered(way, read.arrived.elapsed());
        self.device.reply(read.unique, buffer);
    }
}

/// The memory of a thread.
pub(super) struct Buffers {
    request: Vec<u8>,
    reply: Vec<u8>,
}

impl Buffers {
    pub(super) fn new() -> Self {
        Self {
            // Not zeros, which would be no pages yet. The kernel gives up a request that it cannot
            // copy because the process is being killed, and its reader would get an error.
            request: vec![1; REQUEST_BYTES],
            reply: vec![1; READAHEAD as usize],
        }
    }
}
