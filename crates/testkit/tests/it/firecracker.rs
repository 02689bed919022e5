//! The double of Firecracker: a right page server satisfies it, and it finds a wrong one.

use pageferry_addr::Hva;
use pageferry_testkit::firecracker::{
    Backend, Config, Contents, Double, Fields, PAGE_BYTES, Region, Task, Wrong, handshake_text,
    page_contents, send_handshake, write_memory_file,
};
use pageferry_testkit::{HugePages, wait_for, wait_until};
use pageferry_userfault::uffd::{
    Event, EventReader, Features, RangeError, Userfaultfd, Wait, Wake,
};
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};
use std::collections::{HashSet, VecDeque};
use std::io::IoSliceMut;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::thread::JoinHandle;

const MIB: u64 = 1 << 20;

fn config(backend: Backend) -> Config {
    Config {
        seed: 11,
        regions: vec![4 * MIB, MIB, 2 * MIB],
        backend,
        vcpus: 3,
        balloon_us: Some(100),
        ..Config::default()
    }
}

/// A path that ends with this test.
struct Path(PathBuf);

impl Path {
    fn new(name: &str) -> Self {
        let name = format!("pageferry-double-{}-{name}", std::process::id());
        Self(std::env::temp_dir().join(name))
    }
}

impl Drop for Path {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

/// Accepts a connection and takes its first message.
fn receive(listener: &UnixListener) -> (UnixStream, String, Vec<OwnedFd>) {
    listener.set_nonblocking(true).expect("an option");
    let (stream, _) = wait_for("a connection", || listener.accept().ok());
    stream.set_nonblocking(false).expect("an option");
    stream
        .set_read_timeout(Some(super::LIMIT))
        .expect("a limit");
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(8))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let mut bytes = vec![0; 4096];
    let got = recvmsg(
        &stream,
        &mut [IoSliceMut::new(&mut bytes)],
        &mut ancillary,
        RecvFlags::CMSG_CLOEXEC,
    );
    bytes.truncate(got.expect("a message").bytes);
    let descriptors = ancillary
        .drain()
        .filter_map(|message| match message {
            RecvAncillaryMessage::ScmRights(descriptors) => Some(descriptors),
            _ => None,
        })
        .flatten()
        .collect();
    (stream, String::from_utf8(bytes).expect("text"), descriptors)
}

/// The least page server: one thread, which serves faults in the order of its events.
struct Server {
    uffd: Userfaultfd,
    regions: Vec<Region>,
    seed: u64,
    /// The bytes of a page of the mapping.
    unit: u64,
    /// Whether a removed page is served with its old contents, which is wrong.
    forgets: bool,
    /// The places of removed pages in the memory file, in bytes.
    removed: HashSet<u64>,
}

impl Server {
    /// The place of an address in the memory file.
    fn offset(&self, address: u64) -> u64 {
        let has = |region: &&Region| (region.base..region.base + region.size).contains(&address);
        let region = self.regions.iter().find(has).expect("memory of the double");
        region.offset + (address - region.base)
    }

    /// Serves until the other end of `stop` is closed.
    fn serve(mut self, stop: &UnixStream) {
        let mut reader = EventReader::new(16);
        let mut faults = VecDeque::new();
        loop {
            let wait = Wait {
                limit: (!faults.is_empty()).then(Default::default),
                stop: Some(stop.as_fd()),
                ..Wait::default()
            };
            match reader.next(&self.uffd, wait).expect("an event") {
                Some(Event::PageFault(fault)) => faults.push_back(fault.address.0),
                Some(event) => self.remove(&event),
                None if faults.is_empty() => return,
                None => {}
            }
            while let Some(address) = faults.pop_front() {
                match self.place(Hva(address & !(self.unit - 1))) {
                    Err(why) if why.is_changing() => {
                        faults.push_front(address);
                        break;
                    }
                    Err(why) if why.is_process_gone() => return,
                    placed => placed.expect("a page of the double"),
                }
            }
        }
    }

    fn remove(&mut self, event: &Event) {
        let range = event.dropped(self.unit).expect("a removal of whole pages");
        for address in (range.start.0..range.end.0).step_by(self.unit as usize) {
            if !self.forgets {
                self.removed.insert(self.offset(address));
            }
        }
    }

    fn place(&self, page: Hva) -> Result<(), RangeError> {
        let offset = self.offset(page.0);
        let bytes = if self.removed.contains(&offset) {
            vec![0; self.unit as usize]
        } else {
            let first = offset / PAGE_BYTES;
            (first..first + self.unit / PAGE_BYTES)
                .flat_map(|index| page_contents(self.seed, index))
                .collect()
        };
        match self.uffd.copy(page, &bytes, Wake::Now) {
            Err(why) if why.is_already_there() => self.uffd.wake(page, self.unit),
            placed => placed,
        }
    }
}

/// A double that is served, and its server's end.
struct Served {
    double: Double,
    stop: UnixStream,
    thread: JoinHandle<()>,
    connection: UnixStream,
}

impl Served {
    /// Returns `None` if that is not possible here.
    fn start(name: &str, config: &Config, fields: Fields, forgets: bool) -> Option<Self> {
        let unit = match config.backend {
            Backend::UffdHuge => 2 * MIB,
            _ => 4096,
        };
        let mut double = Double::start(config)?;
        let path = Path::new(name);
        let listener = UnixListener::bind(&path.0).expect("a socket");
        double.connect(&path.0, fields).expect("a connection");
        let (connection, text, mut descriptors) = receive(&listener);
        assert_eq!(text, handshake_text(double.regions(), unit, fields));
        assert_eq!(descriptors.len(), 1);
        let descriptor = descriptors.pop().expect("a descriptor");
        let uffd = Userfaultfd::adopt(descriptor, Features::EVENT_REMOVE).expect("a userfaultfd");
        assert_eq!(uffd.features(), Features::EVENT_REMOVE);
        let server = Server {
            uffd,
            regions: double.regions().to_vec(),
            seed: config.seed,
            unit,
            forgets,
            removed: HashSet::new(),
        };
        let (stop, stopped) = UnixStream::pair().expect("a socket pair");
        let thread = std::thread::spawn(move || server.serve(&stopped));
        Some(Self {
            double,
            stop,
            thread,
            connection,
        })
    }

    /// Ends the double, then the server. Returns whether the double was content.
    fn end(self) -> bool {
        let success = self.double.quit().success();
        super::assert_ended(&self.connection);
        drop(self.stop);
        self.thread.join().expect("a server without errors");
        success
    }
}

/// Lets a double run until each vCPU and the balloon have done much, and checks its memory.
fn run_and_verify(double: &mut Double) {
    double.run();
    wait_until("accesses and removals", || {
        let status = double.status();
        status.removals > 100 && status.touches.iter().all(|touches| *touches > 500)
    });
    double.pause();
    double.perform(Task::VerifyAll);
    let status = double.status();
    assert_eq!(status.wrong, 0, "{:?}", status.first_wrong);
}

fn assert_regions(double: &Double, sizes: &[u64]) {
    let (mut offset, mut above) = (0, u64::MAX);
    for (region, size) in double.regions().iter().zip(sizes) {
        assert_eq!((region.size, region.offset), (*size, offset));
        assert!(region.base.is_multiple_of(2 * MIB));
        assert!(region.base + size < above, "no hole behind {region:?}");
        offset += size;
        above = region.base;
    }
    assert_eq!(double.regions().len(), sizes.len());
}

#[test]
fn vcpus_and_a_balloon_are_served_with_the_right_pages() {
    let config = config(Backend::Uffd);
    let Some(mut served) = Served::start("right", &config, Fields::Both, false) else {
        return;
    };
    assert_regions(&served.double, &config.regions);
    run_and_verify(&mut served.double);
    assert!(served.end());
}

#[test]
fn huge_pages_are_served_with_the_right_pages() {
    let Some(_pages) = HugePages::at_least(4) else {
        return;
    };
    let config = Config {
        regions: vec![6 * MIB, 2 * MIB],
        ..config(Backend::UffdHuge)
    };
    let Some(mut served) = Served::start("huge", &config, Fields::Unknown, false) else {
        return;
    };
    run_and_verify(&mut served.double);
    assert!(served.end());
}

#[test]
fn a_server_that_forgets_a_removal_is_found() {
    let config = config(Backend::Uffd);
    let Some(mut served) = Served::start("forgets", &config, Fields::KibOnly, true) else {
        return;
    };
    let data = |page: &u64| page_contents(config.seed, *page) != [0; 4096];
    let page = (0..).find(data).expect("a page with data");
    let double = &mut served.double;
    double.perform(Task::Read(page));
    double.perform(Task::Write(page));
    double.perform(Task::Read(page));
    assert_eq!(double.status().wrong, 0);
    let first = page;
    double.perform(Task::Remove { first, pages: 1 });
    double.perform(Task::Read(page));
    let status = double.status();
    let expected = Wrong {
        page,
        expected: Contents::Zeros,
        found: Contents::File,
    };
    assert_eq!((status.removals, status.wrong), (1, 1));
    assert_eq!(status.first_wrong, [expected]);
    assert!(!served.end(), "a double that found a wrong page must fail");
}

#[test]
fn a_private_mapping_of_the_memory_file_has_the_right_pages() {
    let path = Path::new("memory");
    let config = config(Backend::File(path.0.clone()));
    let pages = config.regions.iter().sum::<u64>() / PAGE_BYTES;
    write_memory_file(&path.0, config.seed, pages).expect("a file");
    let before = std::fs::read(&path.0).expect("a file");
    let contents = (0..pages).flat_map(|index| page_contents(config.seed, index));
    assert!(before.iter().copied().eq(contents));
    let Some(mut double) = Double::start(&config) else {
        return;
    };
    assert_regions(&double, &config.regions);
    run_and_verify(&mut double);
    assert!(double.quit().success());
    assert!(before == std::fs::read(&path.0).expect("a file"));
}

#[test]
fn a_double_of_another_memory_file_is_not_content() {
    let path = Path::new("other");
    let config = config(Backend::File(path.0.clone()));
    let pages = config.regions.iter().sum::<u64>() / PAGE_BYTES;
    write_memory_file(&path.0, config.seed + 1, pages).expect("a file");
    let Some(mut double) = Double::start(&config) else {
        return;
    };
    double.perform(Task::VerifyAll);
    let status = double.status();
    assert!(status.wrong > pages / 2, "{status:?}");
    assert!(!double.quit().success());
}

#[test]
fn any_bytes_and_descriptors_are_sent_as_a_handshake() {
    let path = Path::new("any");
    let listener = UnixListener::bind(&path.0).expect("a socket");
    let null = std::fs::File::open("/dev/null").expect("a file");
    for count in [0, 1, 4] {
        let descriptors = vec![null.as_fd(); count];
        let sender = send_handshake(&path.0, b"[{", &descriptors).expect("sent");
        let (stream, text, received) = receive(&listener);
        assert_eq!((text.as_str(), received.len()), ("[{", count));
        drop(sender);
        super::assert_ended(&stream);
    }
}
