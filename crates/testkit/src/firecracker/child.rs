//! The double's own process.
//!
//! **Guarantee.** The thread that answers commands never touches guest memory. So it answers while
//! other threads sleep on missing pages. The process ends when its test ends.
//!
//! **Mechanism.** Standard input is one end of a socket pair. Each command is a line, and gets a
//! line. Work on memory is a task with a thread of its own.

use super::config::{Backend, Config};
use super::guest::{Guest, Pipe, Writer};
use super::handshake::{Fields, handshake_text, send_handshake};
use super::memory::{Kind, Memory};
use pageferry_userfault::uffd::{Features, Userfaultfd};
use std::fs::File;
use std::io::{BufRead as _, BufReader, Write as _};
use std::os::fd::AsFd as _;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

/// The variable that has the configuration in the double's process.
pub(super) const CONFIG: &str = "PAGEFERRY_FIRECRACKER_DOUBLE";

/// Becomes the double, in a process that [`Double::start`](super::Double::start) has started.
/// Returns at once in any other process. Every test binary that starts a double has this test in
/// its `main.rs`:
///
/// ```
/// // #[test]
/// fn firecracker_double() {
///     pageferry_testkit::firecracker::entry();
/// }
/// # firecracker_double();
/// ```
pub fn entry() {
    if let Some(text) = std::env::var_os(super::vmm::CONFIG) {
        super::vmm::main(text.to_str().expect("a configuration"));
    }
    let Some(text) = std::env::var_os(CONFIG) else {
        return;
    };
    let config = text.to_str().and_then(Config::from_text);
    let config = config.expect("the text of a configuration");
    let stdin = std::io::stdin().as_fd().try_clone_to_owned();
    let control = UnixStream::from(stdin.expect("a descriptor"));
    // A thread that panics would let the test wait for a task that never ends.
    let report = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        report(panic);
        std::process::exit(2);
    }));
    std::process::exit(serve(&config, &control));
}

/// Serves commands until there are no more. Returns the exit code.
fn serve(config: &Config, mut control: &UnixStream) -> i32 {
    let (child, greeting) = match Child::new(config) {
        Ok(child) => {
            let greeting = child.greeting();
            (Some(child), greeting)
        }
        Err(why) => (None, why),
    };
    let mut lines = BufReader::new(control).lines();
    let mut answer = greeting;
    loop {
        if writeln!(control, "{answer}").is_err() {
            return 2;
        }
        let (Some(child), Some(Ok(line))) = (&child, lines.next()) else {
            return 2;
        };
        if line == "quit" {
            let wrong = child.guest.wrong.load(Ordering::SeqCst);
            return i32::from(wrong > 0);
        }
        answer = child.command(&line).unwrap_or_else(|why| {
            let why = why.replace('\n', " ");
            format!("error {why}")
        });
    }
}

struct Child {
    guest: Arc<Guest>,
    uffd: Option<Userfaultfd>,
    page_size: u64,
    /// The number of tasks that have not ended.
    tasks: Arc<AtomicU32>,
}

impl Child {
    /// Maps the memory and starts the threads, which wait. The error is a greeting.
    fn new(config: &Config) -> Result<Self, String> {
        let failed = |what: &str, why: &dyn std::fmt::Display| format!("error {what}: {why}");
        let (kind, page_size) = match &config.backend {
            Backend::Uffd | Backend::UffdOld => (Kind::Anonymous { huge: false }, 4096),
            Backend::UffdHuge => (Kind::Anonymous { huge: true }, 2 << 20),
            Backend::File(path) => {
                let file = File::open(path).map_err(|why| failed("memory file", &why))?;
                (Kind::File(file), 4096)
            }
        };
        if let Some(odd) = config.regions.iter().find(|size| *size % page_size != 0) {
            return Err(format!("error a region of {odd} bytes is no whole pages"));
        }
        let memory = Memory::map(&config.regions, kind).map_err(|why| failed("mmap", &why))?;
        let uffd = if matches!(config.backend, Backend::File(_)) {
            None
        } else {
            let features = match config.backend {
                Backend::UffdOld => Features::empty(),
                _ => Features::EVENT_REMOVE,
            };
            let uffd = Userfaultfd::open(features)
                .map_err(|why| format!("skip {}", why.to_string().replace('\n', " ")))?;
            memory
                .register(&uffd)
                .map_err(|why| failed("registering", &why))?;
            Some(uffd)
        };
        let guest = Arc::new(Guest::new(memory, config.seed, config.vcpus));
        for number in 0..config.vcpus {
            let guest = Arc::clone(&guest);
            std::thread::spawn(move || guest.vcpu(number));
        }
        if let Some(us) = config.balloon_us {
            let guest = Arc::clone(&guest);
            std::thread::spawn(move || guest.balloon(Duration::from_micros(us)));
        }
        Ok(Self {
            guest,
            uffd,
            page_size,
            tasks: Arc::default(),
        })
    }

    /// The first line: all regions.
    fn greeting(&self) -> String {
        let regions = self.guest.memory.regions().iter();
        let regions: Vec<_> = regions
            .map(|region| format!("{},{},{}", region.base, region.size, region.offset))
            .collect();
        format!("ready {}", regions.join(";"))
    }

    fn command(&self, line: &str) -> Result<String, String> {
        let (name, rest) = line.split_once(' ').unwrap_or((line, ""));
        match name {
            "connect" => self.connect(rest)?,
            "run" => self.guest.running.store(true, Ordering::SeqCst),
            "pause" => self.guest.running.store(false, Ordering::SeqCst),
            "task" => self.begin(rest)?,
            "status" => return Ok(self.status()),
            _ => return Err(format!("unknown command '{line}'")),
        }
        Ok("ok".to_owned())
    }

    /// Sends the handshake: `FIELDS SOCKET`. The connection stays open as long as the process
    /// lives.
    fn connect(&self, rest: &str) -> Result<(), String> {
        let (fields, path) = rest.split_once(' ').ok_or("no path")?;
        let fields = match fields {
            "both" => Fields::Both,
            "kib" => Fields::KibOnly,
            _ => Fields::Unknown,
        };
        let uffd = self.uffd.as_ref().ok_or("no userfaultfd")?;
        let text = handshake_text(self.guest.memory.regions(), self.page_size, fields);
        let stream = send_handshake(Path::new(path), text.as_bytes(), &[uffd.as_fd()])
            .map_err(|why| why.to_string())?;
        std::mem::forget(stream);
        Ok(())
    }

    /// Begins a task, on a thread of its own or on one for each vCPU.
    fn begin(&self, text: &str) -> Result<(), String> {
        let mut words = text.split(' ');
        let name = words.next().unwrap_or_default();
        let numbers: Option<Vec<u64>> = words.map(|word| word.parse().ok()).collect();
        let numbers = numbers.ok_or("expected numbers")?;
        let pages = self.guest.memory.pages();
        match (name, &numbers[..]) {
            ("verify", []) => {
                let threads = self.guest.touches.len().max(1);
                for number in 0..threads {
                    self.spawn(move |guest| {
                        let pages = (number as u64..pages).step_by(threads);
                        pages.for_each(|page| guest.read(page));
                    });
                }
            }
            ("read", &[page]) if page < pages => self.spawn(move |guest| guest.read(page)),
            ("write", &[page]) if page < pages => {
                self.spawn(move |guest| guest.write(page, Writer::Stores, &Pipe::new()));
            }
            ("remove", &[first, count]) if first < pages => {
                let end = first.saturating_add(count);
                let unit = self.guest.memory.unit();
                if end > self.guest.memory.run_end(first, count) || end == first {
                    return Err("the pages do not lie in one region".to_owned());
                }
                if first % unit != 0 || end % unit != 0 {
                    return Err("the pages are no whole huge pages".to_owned());
                }
                self.spawn(move |guest| guest.remove(first, end));
            }
            _ => return Err(format!("unknown task '{text}'")),
        }
        Ok(())
    }

    fn spawn(&self, work: impl FnOnce(&Guest) + Send + 'static) {
        let (guest, tasks) = (Arc::clone(&self.guest), Arc::clone(&self.tasks));
        tasks.fetch_add(1, Ordering::SeqCst);
        std::thread::spawn(move || {
            work(&guest);
            tasks.fetch_sub(1, Ordering::SeqCst);
        });
    }

    /// `ACTIVE TASKS REMOVALS WRONG TOUCHES,.. PAGE,EXPECTED,FOUND;..`
    fn status(&self) -> String {
        let guest = &self.guest;
        let touches = guest.touches.iter();
        let touches: Vec<_> = touches
            .map(|each| each.load(Ordering::Relaxed).to_string())
            .collect();
        let remembered = guest.remembered.lock().expect("no thread panics here");
        let remembered: Vec<_> = remembered
            .iter()
            .map(|wrong| format!("{},{},{}", wrong.page, wrong.expected, wrong.found))
            .collect();
        format!(
            "{} {} {} {} {} {}",
            guest.active.load(Ordering::SeqCst),
            self.tasks.load(Ordering::SeqCst),
            guest.removals.load(Ordering::Relaxed),
            guest.wrong.load(Ordering::Relaxed),
            touches.join(","),
            remembered.join(";")
        )
    }
}
