//! A slow link between source and destination, which a test can freeze and cut.

use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// The controls of a link: its rate, its cut, and the streams to shut down.
#[derive(Default)]
struct LinkControl {
    /// Bytes per millisecond and direction; 0 freezes.
    rate: AtomicU64,
    cut: AtomicBool,
    streams: Mutex<Vec<UnixStream>>,
}

/// Listens on a unix socket and forwards all connections to another.
pub(crate) struct Link {
    control: Arc<LinkControl>,
    path: PathBuf,
}

impl Link {
    /// Forwards to the unix socket `to`, at `rate` bytes per millisecond.
    pub(crate) fn start(path: &Path, to: &str, rate: u64) -> Self {
        let listener = UnixListener::bind(path).unwrap();
        let control = Arc::new(LinkControl::default());
        control.rate.store(rate, Ordering::Relaxed);
        let ours = Arc::clone(&control);
        let to = to.strip_prefix("unix:").unwrap().to_owned();
        std::thread::spawn(move || {
            // The thread ends with the process: a test process is short-lived.
            for from in listener.incoming() {
                let from = from.unwrap();
                let Ok(onward) = UnixStream::connect(&to) else {
                    return;
                };
                for stream in [&from, &onward] {
                    ours.streams
                        .lock()
                        .unwrap()
                        .push(stream.try_clone().unwrap());
                }
                let back = (onward.try_clone().unwrap(), from.try_clone().unwrap());
                for (read, write) in [(from, onward), back] {
                    let ours = Arc::clone(&ours);
                    std::thread::spawn(move || carry(read, write, &ours));
                }
            }
        });
        Self {
            control,
            path: path.to_owned(),
        }
    }

    pub(crate) fn address(&self) -> String {
        format!("unix:{}", self.path.display())
    }

    pub(crate) fn set_rate(&self, rate: u64) {
        self.control.rate.store(rate, Ordering::Relaxed);
    }

    /// Breaks all connections without any message.
    pub(crate) fn cut(&self) {
        self.control.cut.store(true, Ordering::Relaxed);
        for stream in self.control.streams.lock().unwrap().drain(..) {
            let _ = stream.shutdown(std::net::Shutdown::Both);
        }
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.path);
    }
}

fn carry(mut read: UnixStream, mut write: UnixStream, control: &LinkControl) {
    let mut buffer = [0; 16 << 10];
    loop {
        let rate = control.rate.load(Ordering::Relaxed);
        if control.cut.load(Ordering::Relaxed) {
            return;
        }
        if rate == 0 {
            std::thread::sleep(Duration::from_millis(1));
            continue;
        }
        match read.read(&mut buffer) {
            Ok(0) | Err(_) => break,
            Ok(n) => {
                if control.cut.load(Ordering::Relaxed) || write.write_all(&buffer[..n]).is_err() {
                    // A peer that is gone takes nothing more: the sender learns it at once.
                    let _ = read.shutdown(std::net::Shutdown::Read);
                    break;
                }
                std::thread::sleep(Duration::from_micros(n as u64 * 1000 / rate));
            }
        }
    }
    let _ = write.shutdown(std::net::Shutdown::Write);
}
