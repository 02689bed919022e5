//! Devices and a driver, over the memory of a machine that has no engine.

#[path = "../driver/mod.rs"]
mod driver;

use driver::{Driver, FIRST, RAM, Rings, ram};
use pageferry_addr::{Gpa, RamPage};
use pageferry_devices::{Block, Entropy, Mac, Net, Power, SerialPort, Tap, VirtioDevice};
use pageferry_machine::{
    AccessError, Console, Device, Engine, Fetch, GuestRam, MachineSpec, NewMachine, create,
};
use pageferry_testkit::wait_until;
use pageferry_userfault::PageBitmap;
use proptest::prelude::*;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixDatagram;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::time::Duration;

const SECOND: Rings = Rings {
    descriptors: 0x9000,
    available: 0xa000,
    used: 0xb000,
};

impl Driver {
    fn wait(&self) {
        wait_until("an answer", || self.answered() == self.next);
    }

    fn wait_broken(&self) {
        wait_until("DEVICE_NEEDS_RESET", || self.get(0x70) & 0x40 != 0);
    }

    /// A request to a disk, with its data at 0x4000. Its status is at 0x3010.
    fn offer_disk(&mut self, kind: u32, sector: u64, len: u32) {
        let head = u128::from(kind) | u128::from(sector) << 64;
        self.put(0x3000, &head.to_le_bytes());
        self.put(0x3010, &[0xee]);
        self.descriptor(0, 0x3000, 16, 1, if len == 0 { 2 } else { 1 });
        self.descriptor(
            1,
            0x4000,
            len,
            1 | if matches!(kind, 0 | 8) { 2 } else { 0 },
            2,
        );
        self.descriptor(2, 0x3010, 1, 2, 0);
        self.offer();
    }

    fn disk(&mut self, kind: u32, sector: u64, len: u32) -> u8 {
        self.offer_disk(kind, sector, len);
        self.wait();
        self.bytes::<1>(0x3010)[0]
    }
}

fn rng() -> Driver {
    Driver::of(Entropy, &ram())
}

/// A disk of 64 sectors, which is removed on drop.
struct Disk(PathBuf);

impl Disk {
    fn new(bytes: u64) -> Self {
        static COUNT: AtomicU64 = AtomicU64::new(0);
        let count = COUNT.fetch_add(1, SeqCst);
        let name = format!("pageferry-disk-{}-{count}", std::process::id());
        let path = std::env::temp_dir().join(name);
        std::fs::File::create(&path)
            .unwrap()
            .set_len(bytes)
            .unwrap();
        Self(path)
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

#[test]
fn random_bytes_come_with_an_interrupt() {
    let mut driver = rng();
    driver.start();
    driver.descriptor(0, 0x4000, 64, 2, 0);
    driver.offer();
    driver.wait();
    assert_ne!(driver.bytes::<64>(0x4000), [0; 64]);
    wait_until("an interrupt", || driver.line.0.load(SeqCst) == 1);
    assert_eq!(driver.get(0x60), 1);
    driver.set(0x64, 1);
    assert_eq!(driver.get(0x60), 0);
}

#[test]
fn malformed_chains_end_the_use_of_the_device_until_a_reset() {
    // A loop, a next that is none, bytes outside RAM, an overflow, too much, an indirect table
    // outside RAM, and one with a part of an entry.
    for (at, len, flags, next) in [
        (0x4000, 8, 1, 0),
        (0x4000, 8, 1, 8),
        (RAM - 4, 8, 2, 0),
        (u64::MAX, 8, 2, 0),
        (0x4000, u32::MAX, 2, 0),
        (RAM - 8, 16, 4, 0),
        (0x4000, 15, 4, 0),
    ] {
        let mut driver = rng();
        driver.start();
        driver.descriptor(0, at, len, flags, next);
        driver.offer();
        driver.wait_broken();
        assert_eq!(driver.answered(), 0);
        driver.set(0x70, 0);
        assert_eq!(driver.get(0x70), 0);
        (driver.next, _) = (0, driver.put(FIRST.available + 2, &[0, 0]));
        driver.start();
        driver.descriptor(0, 0x4000, 8, 2, 0);
        driver.offer();
        driver.wait();
    }
    let mut driver = rng();
    driver.start();
    driver.next = 100; // More than the queue has entries.
    driver.offer();
    driver.wait_broken();
}

#[test]
fn a_disk_has_one_writer_and_whole_sectors() {
    let disk = Disk::new(1024);
    let first = Block::open(&disk.0, false).unwrap();
    let error = Block::open(&disk.0, false).err().unwrap();
    assert!(error.to_string().contains("locked"), "{error}");
    assert!(Block::open(&disk.0, true).is_err());
    drop(first);
    let _reader = Block::open(&disk.0, true).unwrap();
    Block::open(&disk.0, true).unwrap();
    let odd = Disk::new(1000);
    let error = Block::open(&odd.0, false).err().unwrap();
    assert!(error.to_string().contains("multiple of 512"), "{error}");
}

#[test]
fn a_disk_refuses_what_it_cannot_do() {
    let disk = Disk::new(64 * 512);
    let mut driver = Driver::of(Block::open(&disk.0, false).unwrap(), &ram());
    driver.start();
    assert_eq!(driver.disk(0, 63, 1024), 1, "behind its end");
    assert_eq!(driver.disk(0, u64::MAX, 512), 1);
    assert_eq!(driver.disk(1, 0, 100), 1, "a part of a sector");
    assert_eq!(driver.disk(99, 0, 512), 2);
    assert_eq!(driver.disk(8, 0, 20), 0);
    assert_eq!(&driver.bytes::<9>(0x4000), b"pageferry");
    drop(driver);
    let mut driver = Driver::of(Block::open(&disk.0, true).unwrap(), &ram());
    driver.start();
    assert_eq!(driver.disk(1, 0, 512), 1, "it is read only");
    assert_eq!(driver.disk(0, 0, 512), 0);
}

#[test]
fn a_disk_names_the_run_that_wrote_it_last() {
    let disk = Disk::new(64 * 512);
    let file = std::fs::File::open(&disk.0).unwrap();
    let (name, flags) = ("user.pageferry.writer", rustix::fs::XattrFlags::empty());
    if let Err(why) = rustix::fs::setxattr(&disk.0, name, &[0; 16], flags) {
        pageferry_testkit::skip("xattr", why);
        return;
    }
    let mut writers = vec![[0; 16]];
    for _ in 0..2 {
        let mut driver = Driver::of(Block::open(&disk.0, false).unwrap(), &ram());
        driver.start();
        assert_eq!(driver.disk(0, 0, 512), 0);
        assert_eq!(Block::writer(&file), *writers.last().unwrap(), "a read");
        assert_eq!(driver.disk(1, 0, 512), 0);
        let writer = Block::writer(&file);
        assert!(!writers.contains(&writer), "another run: {writer:?}");
        assert_eq!(driver.disk(1, 1, 512), 0);
        assert_eq!(Block::writer(&file), writer, "the same run");
        writers.push(writer);
    }
}

#[test]
fn requests_are_answered_once_after_a_move_and_the_lock_moves_too() {
    let (disk, ram) = (Disk::new(64 * 512), ram());
    let mut here = Driver::of(Block::open(&disk.0, false).unwrap(), &ram);
    here.start();
    here.put(0x4000, &[7; 512]);
    assert_eq!(here.disk(1, 5, 512), 0);
    here.device.pause().unwrap();
    here.offer_disk(0, 5, 512);
    here.put(0x4000, &[0; 512]);
    let mut there = Driver::of(Block::open_unlocked(&disk.0, false).unwrap(), &ram);
    there.device.pause().unwrap();
    there.next = here.next;
    let state = here.device.save().unwrap();
    for len in 0..state.len() {
        assert!(there.device.decode(1, &state[..len]).is_err());
    }
    there.device.decode(1, &state).unwrap()();
    assert_eq!(there.device.save().unwrap(), state);
    assert_eq!(there.answered(), 1, "both are paused");
    there.device.resume();
    there.wait();
    assert_eq!(there.bytes::<512>(0x4000), [7; 512]);
    assert!(
        there.line.0.load(SeqCst) > 0,
        "the edge of the first answer"
    );
    assert_eq!(there.disk(4, 0, 0), 0);
    assert_eq!(there.answered(), 3);
    there.device.pause().unwrap();
    let kept = Block::open(&disk.0, false);
    assert!(kept.is_ok(), "the destination gave its lock up");
}

/// A source whose pages never come.
#[derive(Default)]
struct Silent(AtomicU64);

impl Fetch for Silent {
    fn fetch(&self, first: RamPage, _: u64, stop: &dyn Fn() -> bool) -> Result<(), AccessError> {
        self.0.fetch_add(1, SeqCst);
        while !stop() {
            std::thread::sleep(Duration::from_millis(1));
        }
        Err(AccessError::Stopped(first))
    }
}

/// A machine whose page `page` comes when its bit is cleared, and a driver of `device` there.
fn receiving(
    device: impl VirtioDevice + 'static,
    page: u64,
) -> (NewMachine, Arc<Silent>, Arc<PageBitmap>, Driver) {
    let new = create(Engine::Soft, MachineSpec::new(1, RAM)).unwrap();
    let ram = new.machine.ram();
    let source = Arc::new(Silent::default());
    let weak: std::sync::Weak<Silent> = Arc::downgrade(&source);
    ram.attach(weak).unwrap();
    let missing = Arc::new(PageBitmap::new(256));
    let driver = Driver::of(device, ram);
    driver.start();
    new.machine
        .arm_userfault(Arc::clone(&missing), None.into())
        .unwrap();
    missing.set(RamPage(page));
    new.machine.begin_postcopy().unwrap();
    (new, source, missing, driver)
}

#[test]
fn a_pause_ends_the_wait_for_a_missing_page_and_the_request_stays() {
    let (_new, source, missing, mut driver) = receiving(Entropy, 4);
    driver.descriptor(0, 0x4000, 64, 2, 0);
    driver.offer();
    wait_until("a wait for the page", || source.0.load(SeqCst) > 0);
    driver.device.pause().unwrap();
    assert_eq!(driver.answered(), 0);
    missing.clear(RamPage(4));
    driver.device.resume();
    driver.wait();
    assert_ne!(driver.bytes::<64>(0x4000), [0; 64]);
}

/// It is done at one end of a move, whichever page of the request or of its queue is missing.
#[test]
fn a_request_that_cannot_be_answered_is_not_done() {
    // The status, the data, and the ring of answers.
    for page in [6, 4, FIRST.used >> 12] {
        let disk = Disk::new(64 * 512);
        let block = Block::open(&disk.0, false).unwrap();
        let (_new, source, missing, mut driver) = receiving(block, page);
        if page != 4 {
            driver.put(0x4000, &[7; 512]);
        }
        driver.put(0x3000, &1_u128.to_le_bytes());
        driver.descriptor(0, 0x3000, 16, 1, 1);
        driver.descriptor(1, 0x4000, 512, 1, 2);
        driver.descriptor(2, 0x6000, 1, 2, 0);
        driver.offer();
        wait_until("a wait for the page", || source.0.load(SeqCst) > 0);
        driver.device.pause().unwrap();
        let written = || std::fs::read(&disk.0).unwrap()[0] != 0;
        assert!(!written(), "page {page} is missing");
        missing.clear(RamPage(page));
        if page == 4 {
            driver.put(0x4000, &[7; 512]);
        }
        driver.device.resume();
        driver.wait();
        assert!(written());
        assert_eq!(driver.bytes::<1>(0x6000), [0]);
    }
}

#[test]
fn requests_fail_while_another_has_the_disk() {
    let (disk, ram) = (Disk::new(64 * 512), ram());
    let mut driver = Driver::of(Block::open_unlocked(&disk.0, false).unwrap(), &ram);
    let other = Block::open(&disk.0, false).unwrap();
    driver.start();
    assert_eq!(driver.disk(0, 0, 512), 1);
    drop(other);
    assert_eq!(driver.disk(0, 0, 512), 0);
}

#[test]
fn an_indirect_table_is_one_request_and_none_is_in_another() {
    let mut driver = rng();
    driver.start();
    let entry = |at: u64, flags: u16| {
        let word = u128::from(at) | 64 << 64 | u128::from(flags) << 96;
        word.to_le_bytes()
    };
    driver.put(0xc000, &entry(0x4000, 2));
    driver.descriptor(0, 0xc000, 16, 4, 0);
    driver.offer();
    driver.wait();
    assert_ne!(driver.bytes::<64>(0x4000), [0; 64]);
    driver.put(0xc000, &entry(0x4000, 4));
    driver.offer();
    driver.wait_broken();
}

/// A network device, and its other end.
fn net(ram: &Arc<GuestRam>, mac: &str) -> (Driver, UnixDatagram) {
    let (tap, other) = UnixDatagram::pair().unwrap();
    tap.set_nonblocking(true).unwrap();
    other
        .set_read_timeout(Some(Duration::from_secs(30)))
        .unwrap();
    let net = Net::new(OwnedFd::from(tap).into(), mac.parse().unwrap());
    (Driver::of(net, ram), other)
}

/// Those of a Linux on KVM, under load.
#[test]
fn states_of_this_version_are_read() {
    let (ram, disk, line) = (
        ram(),
        Disk::new(24 << 20),
        Arc::new(driver::Line::default()),
    );
    let driver = Driver::of(Block::open(&disk.0, false).unwrap(), &ram);
    let (net, _other) = net(&ram, HERE);
    let entropy = Driver::of(Entropy, &ram);
    let serial = SerialPort::new(Arc::new(Console::default()), line);
    let states: [(Arc<dyn Device>, &[u8]); 5] = [
        (serial, include_bytes!("../fixtures/uart.0-v1.bin")),
        (
            Arc::new(Power::default()),
            include_bytes!("../fixtures/power-v1.bin"),
        ),
        (
            driver.device.clone(),
            include_bytes!("../fixtures/virtio.0-v1.bin"),
        ),
        (
            net.device.clone(),
            include_bytes!("../fixtures/virtio.1-v1.bin"),
        ),
        (
            entropy.device.clone(),
            include_bytes!("../fixtures/virtio.2-v1.bin"),
        ),
    ];
    for (device, state) in states {
        device.pause().unwrap();
        device.decode(device.version(), state).unwrap()();
        assert_eq!(device.save().unwrap(), state, "{}", device.name());
    }
}

const HERE: &str = "02:00:00:00:00:0a";

#[test]
fn frames_come_and_go() {
    let (mut driver, other) = net(&ram(), HERE);
    driver.start_queues(&[FIRST, SECOND]);
    let mut mac = [0; 6];
    driver.device.read(0x100, &mut mac);
    assert_eq!(mac, [2, 0, 0, 0, 0, 10]);
    // Frames wait for a request, and a request for frames.
    other.send(&[7; 60]).unwrap();
    for byte in [7, 9] {
        driver.descriptor(0, 0x4000, 1600, 2, 0);
        driver.offer();
        if byte == 9 {
            other.send(&[9; 60]).unwrap();
        }
        driver.wait();
        assert_eq!(
            driver.bytes::<13>(0x4000),
            [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, byte]
        );
        assert_eq!(driver.bytes::<1>(0x4000 + 12 + 59), [byte]);
    }
    let used = driver.bytes::<4>(FIRST.used + 4 + 8 + 4);
    assert_eq!(u32::from_le_bytes(used), 72);
    // A frame that is too long for its request is lost.
    other.send(&[1; 60]).unwrap();
    driver.descriptor(0, 0x4000, 20, 2, 0);
    driver.offer();
    driver.wait();
    // The other way: frames that are too short or too long go nowhere.
    (driver.rings, driver.next) = (SECOND, 0);
    for len in [3000, 12 + 13, 5, 12 + 60] {
        driver.put(0x5000, &[0; 12]);
        driver.put(0x500c, &[3; 60]);
        driver.descriptor(0, 0x5000, len, 0, 0);
        driver.offer();
        driver.wait();
    }
    let mut frame = [0; 2000];
    assert_eq!(other.recv(&mut frame).unwrap(), 60);
    assert_eq!(frame[..60], [3; 60]);
    other.set_nonblocking(true).unwrap();
    assert!(other.recv(&mut frame).is_err());
}

#[test]
fn a_network_that_has_arrived_announces_its_address() {
    let ram = ram();
    let (here, other) = net(&ram, HERE);
    here.start_queues(&[FIRST, SECOND]);
    here.device.pause().unwrap();
    let state = here.device.save().unwrap();
    here.device.resume();
    let (there, switch) = net(&ram, "02:00:00:00:00:0b");
    there.device.pause().unwrap();
    let mut group = state.clone();
    let at = group.len() - 6;
    group[at] |= 1;
    assert!(there.device.decode(1, &group).is_err());
    there.device.decode(1, &state).unwrap()();
    let mut mac = [0; 6];
    there.device.read(0x100, &mut mac);
    assert_eq!(mac, [2, 0, 0, 0, 0, 10]);
    there.device.resume();
    let mut frame = [0; 100];
    for _ in 0..5 {
        assert_eq!(switch.recv(&mut frame).unwrap(), 60);
        assert_eq!(
            frame[..12],
            [255, 255, 255, 255, 255, 255, 2, 0, 0, 0, 0, 10]
        );
        assert_eq!(frame[12..14], [0x80, 0x35]);
    }
    other.set_nonblocking(true).unwrap();
    assert!(other.recv(&mut frame).is_err(), "the source said something");
}

#[test]
fn addresses_of_hosts_are_read_and_shown() {
    for wrong in [
        "",
        "02:00:00:00:00",
        "02:00:00:00:00:0a:00",
        "2:0:0:0:0:a",
        "03:00:00:00:00:0a",
        "00:00:00:00:00:00",
        "02:00:00:00:00:+a",
        "02-00-00-00-00-0a",
    ] {
        let why = wrong.parse::<Mac>().unwrap_err();
        assert!(why.contains("expected as 02:00:00:00:00:01"), "{why}");
    }
    assert_eq!(HERE.parse::<Mac>().unwrap().to_string(), HERE);
    let random = Mac::random().unwrap().to_string();
    assert_eq!(random.parse::<Mac>().unwrap().to_string(), random);
}

#[test]
fn names_of_taps_are_checked() {
    for wrong in ["", "a-name-of-16-byte", "a/b", "tap%d"] {
        let why = Tap::open(wrong).err().unwrap().to_string();
        assert!(why.contains("expected 1 to 15 bytes"), "{why}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 32,
        failure_persistence: None,
        ..Default::default()
    })]

    #[test]
    fn any_access_is_harmless(
        accesses in prop::collection::vec((0_u64..0x300, 0_usize..9, any::<u64>()), 0..200),
    ) {
        let driver = rng();
        for (offset, width, value) in accesses {
            driver.device.write(offset, &value.to_le_bytes()[..width]);
            driver.device.read(offset, &mut [1; 9][..width]);
        }
        driver.device.read(u64::MAX, &mut [0; 8]);
        driver.set(0x70, 0);
        driver.start();
        driver.device.pause().unwrap();
    }

    #[test]
    fn a_disk_does_what_a_model_does(
        steps in prop::collection::vec((0_usize..4, 0_u64..60, 1_u32..5, any::<u8>()), 1..40),
    ) {
        let disk = Disk::new(64 * 512);
        let mut model = vec![0_u8; 64 * 512];
        let mut driver = Driver::of(Block::open(&disk.0, false).unwrap(), &ram());
        driver.start();
        for (step, sector, sectors, byte) in steps {
            let len = sectors * 512;
            let place = sector as usize * 512..(sector as usize + sectors as usize) * 512;
            match step {
                0 => {
                    driver.put(0x4000, &vec![byte; len as usize]);
                    prop_assert_eq!(driver.disk(1, sector, len), 0);
                    model[place].fill(byte);
                }
                1 => {
                    prop_assert_eq!(driver.disk(0, sector, len), 0);
                    let mut got = vec![0; len as usize];
                    driver.ram.try_read(Gpa(0x4000), &mut got).unwrap();
                    prop_assert_eq!(&got, &model[place]);
                }
                _ => {
                    let range = u128::from(sector) | u128::from(sectors) << 64;
                    driver.put(0x4000, &range.to_le_bytes());
                    prop_assert_eq!(driver.disk(if step == 2 { 11 } else { 13 }, 0, 16), 0);
                    model[place].fill(0);
                }
            }
        }
        drop(driver);
        prop_assert_eq!(std::fs::read(&disk.0).unwrap(), model);
    }
}
