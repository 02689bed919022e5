//! A client that is attached to the console of the VM.
//!
//! **Guarantee.** The client sees the newest text of the guest, at most
//! [`Console::CAPACITY`] bytes, and then what the guest writes. It never holds the guest or another
//! client up: if it reads too slowly, it misses the oldest text. Its keys wait in its own
//! connection while the guest takes none.
//!
//! **Mechanism.** After the result line the connection carries bytes, not lines. The thread of the
//! client looks at both directions in turn. The console keeps the text for all clients.

use super::server::WRITE_LIMIT;
use crate::signals::Interrupts;
use pageferry_machine::Console;
use pageferry_transport::{Connection, Stream, sleep_on};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::io::Write;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::Duration;

/// The most keys that are read at once.
const MOST_KEYS: usize = 4096;

/// Serves a client until it leaves, or `is_over` holds. It has typed `keys` already.
pub(super) fn serve(
    client: &Arc<Connection>,
    console: &Console,
    mut keys: Vec<u8>,
    is_over: &dyn Fn() -> bool,
) {
    let (mut text, mut position) = (Vec::new(), 0);
    loop {
        if is_over() {
            // The last words. A client that does not read them now has had its time.
            text.extend(console.text_since(position, Duration::ZERO).0);
            let _ = Stream::new(Arc::clone(client), WRITE_LIMIT).write_all(&text);
            return;
        }
        if text.is_empty() {
            (text, position) = console.text_since(position, Interrupts::POLL);
        } else {
            wait_until_writable(client);
        }
        match client.try_send(&text, "text") {
            Ok(written) => drop(text.drain(..written)),
            Err(_) => return,
        }
        if keys.is_empty() {
            let mut bytes = [0; MOST_KEYS];
            match client.recv_pending(&mut bytes, "keys") {
                Ok(None) => {}
                Ok(Some(read)) => keys.extend_from_slice(&bytes[..read]),
                Err(_) => return,
            }
        }
        let taken = console.send(&keys);
        keys.drain(..taken);
        if taken == 0 && !keys.is_empty() && has_left(client) {
            return;
        }
    }
}

fn wait_until_writable(client: &Connection) {
    // Keys must not wait for a client that reads slowly.
    let either = PollFlags::OUT | PollFlags::IN;
    sleep_on(&mut [PollFd::new(client, either)], Interrupts::POLL);
}

/// Whether the client has closed the connection, also behind keys that were not read yet.
fn has_left(client: &impl AsFd) -> bool {
    let now = Timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    let mut polled = [PollFd::new(client, PollFlags::RDHUP)];
    let closed = PollFlags::RDHUP | PollFlags::HUP | PollFlags::ERR;
    poll(&mut polled, Some(&now)).is_ok() && polled[0].revents().intersects(closed)
}

#[cfg(test)]
mod tests {
    use super::*;
    use pageferry_testkit::{LIMIT, wait_until};
    use std::io::Read;
    use std::os::unix::net::UnixStream;
    use std::sync::atomic::{AtomicBool, Ordering};

    /// Serves a client of `console` meanwhile.
    fn attached(console: &Console, act: impl FnOnce(UnixStream, &AtomicBool)) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        theirs.set_read_timeout(Some(LIMIT)).unwrap();
        let ours = Arc::new(Connection::adopt_fd(ours.into()).unwrap());
        let over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                serve(&ours, console, b"early".to_vec(), &|| {
                    over.load(Ordering::Acquire)
                });
                drop(ours);
            });
            act(theirs, &over);
        });
    }

    #[test]
    fn a_client_sees_old_and_new_text_to_the_end() {
        let console = Console::default();
        console.write(b"old ");
        attached(&console, |mut client, over| {
            let mut text = [0; 4];
            client.read_exact(&mut text).unwrap();
            assert_eq!(&text, b"old ");
            console.write(b"new ");
            client.read_exact(&mut text).unwrap();
            assert_eq!(&text, b"new ");
            console.write(b"end");
            over.store(true, Ordering::Release);
            let mut rest = String::new();
            client.read_to_string(&mut rest).unwrap();
            assert_eq!(rest, "end");
        });
    }

    #[test]
    fn a_client_that_does_not_read_holds_no_guest_up_and_misses_the_oldest() {
        let console = Console::default();
        attached(&console, |mut client, _| {
            for round in 0..200_u32 {
                let line = format!("{round:>1023}\n");
                for _ in 0..20 {
                    assert_eq!(
                        console.write(line.as_bytes()),
                        1024,
                        "the guest never waits"
                    );
                }
            }
            // Its keys arrive nevertheless. The first were typed when it attached.
            client.write_all(b" keys").unwrap();
            wait_until("the keys to be taken", || {
                console.send(&[0; 0]) == 0 && sent(&console) == 10
            });
            let mut text = Vec::new();
            let mut bytes = [0; 65_536];
            while !text.ends_with(b" 199\n") {
                let read = client.read(&mut bytes).unwrap();
                assert_ne!(read, 0, "the text ended early");
                text.extend_from_slice(&bytes[..read]);
                if text.len() > Console::CAPACITY {
                    text.drain(..text.len() - Console::CAPACITY);
                }
            }
        });
    }

    #[test]
    fn a_client_that_reads_a_byte_from_time_to_time_does_not_hold_the_end_up() {
        let console = Console::default();
        attached(&console, |mut client, over| {
            // More than the connection holds.
            for _ in 0..20 {
                assert_eq!(console.write(&[b'x'; 60_000]), 60_000);
                std::thread::sleep(2 * Interrupts::POLL);
            }
            over.store(true, Ordering::Release);
            let began = std::time::Instant::now();
            while !has_left(&client) {
                assert!(began.elapsed() < LIMIT, "it is served for ever");
                client.read_exact(&mut [0]).unwrap();
                std::thread::sleep(Interrupts::POLL);
            }
        });
    }

    /// The number of bytes that wait for the guest.
    fn sent(console: &Console) -> usize {
        use pageferry_machine::Device;
        console.save().unwrap().len()
    }

    #[test]
    fn a_client_that_leaves_behind_keys_is_not_served_for_ever() {
        let console = Console::default();
        assert_eq!(console.send(&[1; Console::CAPACITY]), Console::CAPACITY);
        attached(&console, |mut client, _| {
            client.write_all(b"more than fits").unwrap();
        });
        assert_eq!(sent(&console), Console::CAPACITY);
    }
}
