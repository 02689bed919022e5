//! A process that keeps the descriptors of a VM, so that the death of ours is not that of the VM.
//!
//! **Guarantee.** One process at a time has the VM: the keeper gives its descriptors to a second
//! one when the first is gone. It ends when it is told to, and when its first process died before
//! there was something to keep. At a destination it also ends when the VMM has closed its
//! connection.
//!
//! **Mechanism.** The keeper is a child in a session of its own. It gets the descriptors by a
//! socket, and does nothing with them. That socket is the first process's *lease*: it ends with
//! that process. The next one connects at a socket beside that of the API, gets the descriptors,
//! and its connection is the lease from then on. At its end the keeper removes the files beside the
//! API.

use super::VmmError;
use super::api::Api;
use super::descriptors;
use pageferry_hostfs::{Owner, listen_at, remove_directory};
use pageferry_pager::Shared;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::net::sockopt::socket_peercred;
use std::io::{self, Read as _, Write as _};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

/// The most descriptors. Cloud Hypervisor has one for each mapping of guest RAM.
pub(crate) const MOST: usize = 72;
const BUSY: u8 = b'b';
const END: u8 = b'e';
const ADD: u8 = b'a';
/// The longest wait for the other side, which may be on a busy host.
const LIMIT: Duration = Duration::from_secs(20);

/// The longest wait for a Firecracker that writes its snapshot.
const RESUME_LIMIT: Duration = Duration::from_secs(600);

/// The number of a mapped file that says how far its VM is: from 1 on it outlives its process.
pub(super) const STATE: usize = 0;
/// Whether a Firecracker has paused its VM, and is to resume it if its process dies before that.
pub(super) const PAUSE_ASKED: usize = 1;

/// The end of a move, or a restore.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum End {
    Source = b's',
    Destination = b'd',
    Restore = b'r',
}

/// The socket of the keeper of the VM at an API socket.
fn socket_of(api: &Path) -> PathBuf {
    let mut path = api.as_os_str().to_owned();
    path.push(".pageferry");
    path.into()
}

/// The leases of this process.
static LEASES: Mutex<Vec<Weak<UnixStream>>> = Mutex::new(Vec::new());

/// Ends all keepers of this process. A program calls it before it ends on its own will, with a VM
/// that lacks pages: the VM then ends with it, and does not wait for another process.
pub fn end_keepers() {
    let leases = LEASES.lock().unwrap_or_else(PoisonError::into_inner);
    for lease in leases.iter().filter_map(Weak::upgrade) {
        Lease(lease).end();
    }
}

/// The right to a VM. When its process dies, the keeper waits for the next one.
pub(crate) struct Lease(Arc<UnixStream>);

impl Lease {
    pub(crate) fn new(stream: UnixStream) -> Self {
        let stream = Arc::new(stream);
        let mut leases = LEASES.lock().unwrap_or_else(PoisonError::into_inner);
        leases.retain(|lease| lease.strong_count() > 0);
        leases.push(Arc::downgrade(&stream));
        Self(stream)
    }

    /// Starts a keeper by `command`, which calls [`keep`], and gives it the descriptors. The first
    /// is the file of [`Shared`]. At a destination the second is a connection to the VMM.
    pub(crate) fn start(
        command: &mut Command,
        end: End,
        api: &Path,
        meeting: &Path,
        fds: &[BorrowedFd<'_>],
    ) -> Result<Self, VmmError> {
        let failed = |e| VmmError::io("cannot start a process that keeps the VM's descriptors", e);
        let (ours, theirs) = UnixStream::pair().map_err(failed)?;
        command
            .stdin(Stdio::from(OwnedFd::from(theirs)))
            .stdout(Stdio::null())
            // Nobody who reads our errors to their end waits for the keeper.
            .stderr(Stdio::null());
        let mut child = command.spawn().map_err(failed)?;
        std::thread::Builder::new()
            .name("vmm-keeper".into())
            .spawn(move || child.wait())
            .map_err(failed)?;
        let mut said = vec![end as u8];
        said.extend_from_slice(api.as_os_str().as_bytes());
        said.push(0);
        said.extend_from_slice(meeting.as_os_str().as_bytes());
        send(&ours, &said, fds).map_err(failed)?;
        ours.set_read_timeout(Some(LIMIT)).map_err(failed)?;
        let mut answer = [0];
        match (&ours).read(&mut answer).map_err(failed)? {
            1 if answer == [end as u8] => Ok(Self::new(ours)),
            _ => {
                let mut why = String::new();
                let _ = (&ours).take(1000).read_to_string(&mut why);
                Err(failed(io::Error::other(why)))
            }
        }
    }

    /// Gives the keeper more descriptors.
    pub(super) fn add(&self, fds: &[BorrowedFd<'_>]) -> Result<(), VmmError> {
        let sent = send(&self.0, &[ADD], fds);
        sent.map_err(|e| VmmError::io("cannot give a keeper the VM's descriptors", e))
    }

    /// Takes the VM over from the keeper of an API socket, with all descriptors. `None` if there is
    /// no keeper.
    pub(super) fn of(api: &Path, end: End) -> Result<Option<(Self, Vec<OwnedFd>)>, VmmError> {
        let path = socket_of(api);
        let failed = |e| VmmError::io(format!("cannot take the VM over at {}", path.display()), e);
        let stream = match UnixStream::connect(&path) {
            Ok(stream) => stream,
            Err(e)
                if matches!(
                    e.kind(),
                    io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused
                ) =>
            {
                return Ok(None);
            }
            Err(e) => return Err(failed(e)),
        };
        check_user(&stream).map_err(failed)?;
        stream.set_read_timeout(Some(LIMIT)).map_err(failed)?;
        let (said, fds) = match receive(&stream, 1) {
            Err(e) if e.kind() == io::ErrorKind::ConnectionReset => return Ok(None),
            received => received.map_err(failed)?,
        };
        let why = match said[..] {
            // A keeper that ends just now.
            [] => return Ok(None),
            [here] if here == end as u8 => return Ok(Some((Self::new(stream), fds))),
            [BUSY] => "another process of pageferry has it",
            [b'd'] => "it arrives here: start `pageferry receive` again",
            [b'r'] => "it is being restored: start `pageferry restore` again",
            _ => "it leaves from here: start `pageferry migrate` again",
        };
        Err(failed(io::Error::other(why)))
    }

    /// Ends the keeper. The VM then has nobody but this process.
    pub(crate) fn end(&self) {
        let _ = (&*self.0).write_all(&[END]);
    }
}

/// Keeps the descriptors that come on standard input: the work of the child that a command starts
/// ([`ReceiverOptions::keeper`](super::ReceiverOptions::keeper)). Returns when nobody needs them
/// any more.
///
/// # Errors
/// When standard input is no such socket, or the socket for the next process cannot be made.
pub fn keep() -> io::Result<()> {
    // Signals of the terminal are not for it.
    let _ = rustix::process::setsid();
    let lease = UnixStream::from(io::stdin().as_fd().try_clone_to_owned()?);
    let (said, fds) = receive(&lease, 8192)?;
    let (end, paths) = said.split_first().ok_or(io::ErrorKind::UnexpectedEof)?;
    let mut paths = paths.splitn(2, |byte| *byte == 0).map(|path| {
        let path: &Path = std::ffi::OsStr::from_bytes(path).as_ref();
        path
    });
    let (Some(api), Some(meeting), false) = (paths.next(), paths.next(), fds.is_empty()) else {
        return Err(io::Error::other("no descriptors came"));
    };
    let path = &*socket_of(api);
    let (listener, file) = listen_at(path, &Owner::default()).map_err(|why| {
        let _ = (&lease).write_all(format!(" {why}").as_bytes());
        io::Error::other(why)
    })?;
    (&lease).write_all(&[*end])?;
    let kept = wait(lease, &listener, fds, *end, api);
    drop(file);
    // The first process removes it, unless it was killed.
    remove_directory(meeting);
    kept
}

fn wait(
    lease: UnixStream,
    listener: &UnixListener,
    mut fds: Vec<OwnedFd>,
    end: u8,
    api: &Path,
) -> io::Result<()> {
    let mut lease = Some(lease);
    loop {
        // A VMM that a VM has left ends, and its memory must not.
        let of_vmm = fds.get(2).filter(|_| end != End::Source as u8);
        let mut polled = vec![
            // The kernel reports an end always.
            PollFd::new(of_vmm.unwrap_or(&fds[0]), PollFlags::empty()),
            PollFd::new(listener, PollFlags::IN),
        ];
        if let Some(lease) = &lease {
            polled.push(PollFd::new(lease, PollFlags::IN));
        }
        match poll(&mut polled, None) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(e) => return Err(e.into()),
        }
        let [ended, asked, spoke] =
            [0, 1, 2].map(|at| polled.get(at).is_some_and(|fd| !fd.revents().is_empty()));
        if ended {
            return Ok(());
        }
        if spoke && let Some(stream) = lease.take() {
            match receive(&stream, 1) {
                Ok((said, more)) if said == [ADD] => {
                    fds.extend(more);
                    lease = Some(stream);
                }
                Ok((said, _)) if said == [END] => return Ok(()),
                // Until then, the VM is at its source and runs there, or has not begun.
                _ if number(&fds[0], STATE)? == 0 => {
                    if number(&fds[0], PAUSE_ASKED)? != 0 {
                        resume(api);
                    }
                    return Ok(());
                }
                _ => {}
            }
        }
        if asked {
            let (stream, _) = listener.accept()?;
            if check_user(&stream).is_err() {
                continue;
            }
            let _ = stream.set_write_timeout(Some(LIMIT));
            if lease.is_some() {
                let _ = (&stream).write_all(&[BUSY]);
                continue;
            }
            let fds: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
            if send(&stream, &[end], &fds).is_ok() {
                lease = Some(stream);
            }
        }
    }
}

/// Lets a VM of Firecracker run again that a process of ours has paused and not handed over. It
/// writes its snapshot meanwhile, which may take long.
fn resume(api: &Path) {
    let body = serde_json::json!({ "state": "Resumed" });
    let resumed = Api::new(api).and_then(|api| api.call("PATCH /vm", Some(&body), RESUME_LIMIT));
    if let Err(why) = resumed {
        tracing::error!(%why, "a VM stays paused at its source");
    }
}

fn number(shared: &OwnedFd, index: usize) -> io::Result<u64> {
    let mut bytes = [0; 8];
    rustix::io::pread(shared, &mut bytes, Shared::place_of(index))?;
    Ok(u64::from_ne_bytes(bytes))
}

/// The other side is root, or the user of this process.
fn check_user(stream: &UnixStream) -> io::Result<()> {
    let (other, own) = (socket_peercred(stream)?.uid, rustix::process::geteuid());
    match other.is_root() || other == own {
        true => Ok(()),
        false => Err(io::Error::other("the other side is another user")),
    }
}

fn send(to: &UnixStream, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST))];
    match descriptors::send(to, bytes, &mut space, fds)? {
        all if all == bytes.len() => Ok(()),
        _ => Err(io::ErrorKind::WriteZero.into()),
    }
}

/// Receives one message of at most `most` bytes, and its descriptors.
fn receive(from: &UnixStream, most: usize) -> io::Result<(Vec<u8>, Vec<OwnedFd>)> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST))];
    let (mut bytes, mut fds) = (vec![0; most], Vec::new());
    let got = descriptors::receive(from, &mut bytes, &mut space, &mut fds)?;
    bytes.truncate(got);
    Ok((bytes, fds))
}
