//! A link between source and destination that is slow, and that can be frozen and cut.

use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

#[derive(Default)]
struct Shared {
    /// Bytes a millisecond and direction; 0 freezes.
    rate: AtomicU64,
    cut: AtomicBool,
    streams: Mutex<Vec<UnixStream>>,
}

/// Listens on a unix socket and passes all connections on to another.
pub(crate) struct Link {
    shared: Arc<Shared>,
    path: PathBuf,
}

impl Link {
    /// To the unix socket `to`, at `rate` bytes a millisecond.
    pub(crate) fn start(path: &Path, to: &str, rate: u64) -> Self {
        let listener = UnixListener::bind(path).unwrap();
        let shared = Arc::new(Shared::default());
        shared.rate.store(rate, Ordering::Relaxed);
        let ours = Arc::clone(&shared);
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
            shared,
            path: path.to_owned(),
        }
    }

    pub(crate) fn address(&self) -> String {
        format!("unix:{}", self.path.display())
    }

    pub(crate) fn set_rate(&self, rate: u64) {
        self.shared.rate.store(rate, Ordering::Relaxed);
    }

    /// Breaks all connections, without a word.
    pub(crate) fn cut(&self) {
        self.shared.cut.store(true, Ordering::Relaxed);
        for stream in self.shared.streams.lock().unwrap().drain(..) {
            let _ = stream.shutdown(std::net::Shutdown::Both);
        }
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.path);
    }
}

fn carry(mut read: UnixStream, mut write: UnixStream, shared: &Shared) {
    let mut buffer = [0; 16 << 10];
    loop {
        let rate = shared.rate.load(Ordering::Relaxed);
        if shared.cut.load(Ordering::Relaxed) {
            return;
        }
        if rate == 0 {
            std::thread::sleep(Duration::from_millis(1));
            continue;
        }
        match read.read(&mut buffer) {
            Ok(0) | Err(_) => break,
            Ok(n) => {
                if shared.cut.load(Ordering::Relaxed) || write.write_all(&buffer[..n]).is_err() {
                    break;
                }
                std::thread::sleep(Duration::from_micros(n as u64 * 1000 / rate));
            }
        }
    }
    let _ = write.shutdown(std::net::Shutdown::Write);
}
