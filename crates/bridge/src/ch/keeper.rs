//! A process that keeps the descriptors of a VM, so that the death of ours is not that of the VM.
//!
//! **Guarantee.** One process at a time has the VM: the keeper gives its descriptors to a second
//! one when the first is gone. It ends when it is told to, and when its first process died before
//! there was something to keep. At a destination it also ends when Cloud Hypervisor has closed its
//! connection for page faults.
//!
//! **Mechanism.** The keeper is a child in a session of its own. It gets the descriptors by a
//! socket, and does nothing with them. That socket is the first process's *lease*: it ends with
//! that process. The next one connects at a socket beside that of the API, gets the descriptors,
//! and its connection is the lease from then on. At its end the keeper removes the files beside the
//! API.

use super::error::ChError;
use super::kept::{STATE, is_kept};
use super::link;
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

/// The most descriptors: those of [`Kept`](super::kept::Kept), and a memfd for each mapping.
const MOST: usize = super::kept::FIXED + super::wire::MAX_MAPPINGS;
const BUSY: u8 = b'b';
const END: u8 = b'e';
/// The longest wait for the other side.
const LIMIT: Duration = Duration::from_secs(5);

/// The end of a move, or a restore.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum End {
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

/// A VM taken from its keeper: the right to it, the first `N` descriptors, and those of RAM.
type Taken<const N: usize> = (Lease, [OwnedFd; N], Vec<OwnedFd>);

/// The right to a VM. When its process dies, the keeper waits for the next one.
pub(super) struct Lease(Arc<UnixStream>);

impl Lease {
    pub(super) fn new(stream: UnixStream) -> Self {
        let stream = Arc::new(stream);
        let mut leases = LEASES.lock().unwrap_or_else(PoisonError::into_inner);
        leases.retain(|lease| lease.strong_count() > 0);
        leases.push(Arc::downgrade(&stream));
        Self(stream)
    }

    /// Starts a keeper by `command`, which calls [`keep`], and gives it the descriptors. The first
    /// is the connection to Cloud Hypervisor, the second the file of [`Shared`].
    pub(super) fn start(
        command: &mut Command,
        end: End,
        api: &Path,
        meeting: &Path,
        fds: &[BorrowedFd<'_>],
    ) -> Result<Self, ChError> {
        let failed = |e| ChError::io("cannot start a process that keeps the VM's descriptors", e);
        let (ours, theirs) = UnixStream::pair().map_err(failed)?;
        command
            .stdin(Stdio::from(OwnedFd::from(theirs)))
            .stdout(Stdio::null())
            // Nobody who reads our errors to their end waits for the keeper.
            .stderr(Stdio::null());
        let mut child = command.spawn().map_err(failed)?;
        std::thread::Builder::new()
            .name("ch-keeper".into())
            .spawn(move || child.wait())
            .map_err(failed)?;
        let mut said = vec![end as u8];
        said.extend_from_slice(socket_of(api).as_os_str().as_bytes());
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

    /// Takes the VM over from the keeper of an API socket. `None` if there is no keeper.
    pub(super) fn of<const N: usize>(api: &Path, end: End) -> Result<Option<Taken<N>>, ChError> {
        let path = socket_of(api);
        let failed = |e| ChError::io(format!("cannot take the VM over at {}", path.display()), e);
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
        let (said, mut fds) = match receive(&stream, 1) {
            Err(e) if e.kind() == io::ErrorKind::ConnectionReset => return Ok(None),
            received => received.map_err(failed)?,
        };
        let why = match said[..] {
            // A keeper that ends just now.
            [] => return Ok(None),
            [here] if here == end as u8 => {
                let ram = fds.split_off(N.min(fds.len()));
                let first = <[OwnedFd; N]>::try_from(fds).map_err(|fds| {
                    ChError::Kept(format!("{} descriptors, expected {N}", fds.len()))
                })?;
                return Ok(Some((Self::new(stream), first, ram)));
            }
            [BUSY] => "another process of pageferry has it",
            [b'd'] => "it arrives here: start `pageferry receive` again",
            [b'r'] => "it is being restored: start `pageferry restore` again",
            _ => "it leaves from here: start `pageferry migrate` again",
        };
        Err(failed(io::Error::other(why)))
    }

    /// Ends the keeper. The VM then has nobody but this process.
    pub(super) fn end(&self) {
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
    let (Some(path), Some(meeting), [link, shared, ..]) = (paths.next(), paths.next(), &fds[..])
    else {
        return Err(io::Error::other("no descriptors came"));
    };
    let (listener, file) = listen_at(path, &Owner::default()).map_err(|why| {
        let _ = (&lease).write_all(format!(" {why}").as_bytes());
        io::Error::other(why)
    })?;
    (&lease).write_all(&[*end])?;
    // A Cloud Hypervisor that a VM has left ends, and its memory must not.
    let ends_with = (*end != End::Source as u8).then_some(link);
    let kept = wait(lease, &listener, (ends_with, shared), &fds, *end);
    drop(file);
    // The first process removes it, unless it was killed.
    remove_directory(meeting);
    kept
}

fn wait(
    lease: UnixStream,
    listener: &UnixListener,
    (ends_with, shared): (Option<&OwnedFd>, &OwnedFd),
    fds: &[OwnedFd],
    end: u8,
) -> io::Result<()> {
    let mut lease = Some(lease);
    loop {
        let mut polled = vec![
            // The kernel reports an end always.
            PollFd::new(ends_with.unwrap_or(shared), PollFlags::empty()),
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
        if spoke && let Some(mut stream) = lease.take() {
            let mut said = [0];
            match stream.read(&mut said) {
                Ok(1) if said == [END] => return Ok(()),
                // Until then, the VM is at its source and runs there, or has not begun.
                _ if !is_kept(number(shared, STATE)?) => return Ok(()),
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
    match link::send(to, bytes, &mut space, fds)? {
        all if all == bytes.len() => Ok(()),
        _ => Err(io::ErrorKind::WriteZero.into()),
    }
}

/// Receives one message of at most `most` bytes, and its descriptors.
fn receive(from: &UnixStream, most: usize) -> io::Result<(Vec<u8>, Vec<OwnedFd>)> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST))];
    let (mut bytes, mut fds) = (vec![0; most], Vec::new());
    let got = link::receive(from, &mut bytes, &mut space, &mut fds)?;
    bytes.truncate(got);
    Ok((bytes, fds))
}
