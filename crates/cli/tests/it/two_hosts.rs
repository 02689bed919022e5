//! A VM moves between two network namespaces over TLS, also while their addresses change.

use crate::support::certificates::{Authority, Now, Side, SideFlags};
use crate::support::{
    Destination, PAGEFERRY, Process, Source, assert_whole, pageferry, status, wait_during,
    wait_for_handover,
};
use pageferry_testkit::netns;
use pageferry_testkit::two_hosts::{self, Host, Link, Rate, TwoHosts};
use pageferry_testkit::wait_for;
use std::net::Ipv4Addr;
use std::path::Path;
use std::time::{Duration, Instant};

/// Two hosts, and a VM on the first one that has written all of its memory.
struct Pair {
    hosts: TwoHosts,
    source: Source,
    destination: Destination,
    /// The files of both sides.
    files: [Side; 2],
}

impl Pair {
    /// `None` if this machine cannot have them, after the test was reported as skipped.
    fn start(link: &Link) -> Option<Self> {
        let hosts = two_hosts::or_skip(link)?;
        let authority = Authority::new("test");
        let files = ["here", "there"].map(|host| authority.issue(&[host], Now));
        let flags = files[1].flags("here");
        let mut more: Vec<&str> = flags.iter().map(String::as_str).collect();
        more.extend(["--dead-after", "500ms"]);
        let (source, destination) = both(&hosts, &more);
        Some(Self {
            hosts,
            source,
            destination,
            files,
        })
    }

    /// Starts the migration. All pages move in post-copy.
    fn migrate(&self) -> Process {
        let flags = self.files[0].flags("there");
        let mut more: Vec<&str> = flags.iter().map(String::as_str).collect();
        more.extend(["--precopy-passes", "0", "--dead-after", "500ms"]);
        self.source.migrate_with(&self.destination.address, &more)
    }

    /// Waits until the source has lost its connections, and lets the rest move fast.
    fn wait_for_loss(&self, migrate: &mut Process) {
        wait_during(migrate, "the source to notice", || {
            let session = session(&self.source.socket)?;
            let again = session["generation"].as_u64()? > 1;
            (again || session["connected"] == false).then_some(())
        });
        self.hosts.reshape(&fast()).unwrap();
    }

    /// The VM has moved whole, and both processes end with nothing left behind.
    fn assert_moved(self, migrate: Process) {
        migrate.end().assert_ok();
        self.source.process.end().assert_ok();
        self.source.dir.assert_empty();
        let there = &self.destination.socket;
        assert_whole(there);
        pageferry(&["quit", "--vm", there.to_str().unwrap()]).assert_ok();
        self.destination.process.end().assert_ok();
        self.destination.dir.assert_empty();
    }

    fn assert_reconnected(&self) {
        let session = wait_for("the end of the session", || {
            session(&self.destination.socket).filter(|session| session["stage"] == "completed")
        });
        assert!(session["reconnects"].as_u64().unwrap() >= 1, "{session}");
    }
}

/// A VM on the first host that has written all of its memory, and a destination with these flags on
/// the second.
fn both(hosts: &TwoHosts, flags: &[&str]) -> (Source, Destination) {
    let of = |host| netns::command(hosts.name(host), PAGEFERRY);
    let listen = format!("{}:0", hosts.address(Host::B));
    let destination = Destination::start_by(of(Host::B), &listen, flags);
    let source = Source::start_by(of(Host::A), "soft", "16M");
    source.wait_until_all_is_written();
    (source, destination)
}

/// The VM has left the first host, and is whole on the second.
fn assert_arrived(source: Source, destination: Destination) {
    source.process.end().assert_ok();
    assert_whole(&destination.socket);
    destination.process.interrupt();
    destination.process.end().assert_ok();
}

fn session(socket: &Path) -> Option<serde_json::Value> {
    Some(status(socket)?["session"].clone())
}

#[test]
fn a_vm_moves_between_two_hosts_over_tls() {
    let Some(pair) = Pair::start(&fast()) else {
        return;
    };
    let migrate = pair.migrate();
    pair.assert_moved(migrate);
}

#[test]
fn a_vm_moves_whole_over_a_link_that_is_late_and_loses_bursts() {
    let [delay, jitter] = [2, 3].map(Duration::from_millis);
    let link = fast().delayed(delay, jitter).losing(20, 1000);
    let Some(pair) = Pair::start(&link) else {
        return;
    };
    let migrate = pair.migrate();
    pair.assert_moved(migrate);
}

/// A link on which post-copy takes 17 s, so that a test on a busy machine acts before its end. The
/// queue holds less than half of what the link carries before a peer counts as dead.
fn slow() -> Link {
    Link {
        limit: 192 << 10,
        ..Link::new(Rate::mbit(8))
    }
}

fn fast() -> Link {
    Link::new(Rate::mbit(1000))
}

#[test]
fn the_sources_address_changes_and_the_session_goes_on_by_itself() {
    let Some(pair) = Pair::start(&slow()) else {
        return;
    };
    let mut migrate = pair.migrate();
    wait_for_handover(&mut migrate, &pair.destination.socket);
    let hosts = &pair.hosts;
    hosts
        .add_address(Host::A, Ipv4Addr::new(198, 18, 0, 11))
        .unwrap();
    hosts
        .remove_address(Host::A, hosts.address(Host::A))
        .unwrap();
    pair.wait_for_loss(&mut migrate);
    pair.assert_reconnected();
    pair.assert_moved(migrate);
}

#[test]
fn the_destinations_address_changes_and_an_operator_gives_the_new_one() {
    let Some(pair) = Pair::start(&slow()) else {
        return;
    };
    let mut migrate = pair.migrate();
    wait_for_handover(&mut migrate, &pair.destination.socket);
    let (hosts, new) = (&pair.hosts, Ipv4Addr::new(198, 18, 0, 12));
    hosts.add_address(Host::B, new).unwrap();
    hosts
        .remove_address(Host::B, hosts.address(Host::B))
        .unwrap();
    pair.wait_for_loss(&mut migrate);
    let recover = |socket: &Path, way: &str, address: &str| {
        let ended = pageferry(&["recover", "--vm", socket.to_str().unwrap(), way, address]);
        ended.assert_ok();
        ended.stdout
    };
    let listening = recover(&pair.destination.socket, "--listen", &format!("{new}:0"));
    let address = listening.split_whitespace().nth(2).unwrap();
    assert!(address.contains(&new.to_string()), "{listening}");
    recover(&pair.source.socket, "--to", address);
    pair.assert_reconnected();
    pair.assert_moved(migrate);
}

/// The hosts of these tests believe in packets of 9000 bytes, and their link drops those above
/// 1500.
fn dropping() -> Link {
    Link::new(Rate::mbit(1000)).mtu(9000).drops_above(1500)
}

/// Both commands say within seconds what is wrong, and the VM runs on.
#[test]
fn a_path_that_drops_large_packets_is_found_before_the_hand_over() {
    let Some(hosts) = two_hosts::or_skip(&dropping()) else {
        return;
    };
    let (source, destination) = both(&hosts, &["--insecure"]);
    let to = &destination.address;
    for more in [&["--check"][..], &[], &["--precopy-passes", "0"]] {
        let began = Instant::now();
        let more = [&["--insecure"], more].concat();
        let ended = source.migrate_with(to, &more).end();
        ended.assert_failed(6, "small packets pass and large ones do not");
        assert!(began.elapsed() < Duration::from_secs(30), "{ended:?}");
        assert!(ended.stderr.contains("MTU of both hosts"), "{ended:?}");
        assert_eq!(status(&source.socket).unwrap()["state"], "running");
    }
    destination
        .process
        .wait_until_said("its small packets arrive");
    // The same destination takes the VM when the path is whole.
    hosts.reshape(&fast()).unwrap();
    let check = source.migrate_with(to, &["--insecure", "--check"]).end();
    check.assert_ok();
    source.migrate_with(to, &["--insecure"]).end().assert_ok();
    assert_arrived(source, destination);
}

/// The hosts believe in larger packets than a handshake sends, and the path drops these. No channel
/// sends them.
#[test]
fn a_path_that_drops_packets_beyond_those_of_ethernet_carries_a_vm() {
    let link = Link::new(Rate::mbit(1000)).mtu(65_535).drops_above(20_000);
    let Some(hosts) = two_hosts::or_skip(&link) else {
        return;
    };
    let (source, destination) = both(&hosts, &["--insecure"]);
    let to = &destination.address;
    source.migrate_with(to, &["--insecure"]).end().assert_ok();
    assert_arrived(source, destination);
}

/// The path loses its large packets once the VM is handed over: it is lost, and found again when
/// they pass. The guest waits meanwhile.
#[test]
fn a_path_that_begins_to_drop_large_packets_delays_a_vm() {
    let slow = slow().mtu(9000);
    let Some(hosts) = two_hosts::or_skip(&slow) else {
        return;
    };
    let flags = ["--insecure", "--dead-after", "500ms"];
    let (source, destination) = both(&hosts, &flags);
    let more = [&flags[..], &["--precopy-passes", "0"]].concat();
    let mut migrate = source.migrate_with(&destination.address, &more);
    wait_for_handover(&mut migrate, &destination.socket);
    hosts.reshape(&slow.drops_above(1500)).unwrap();
    wait_during(&mut migrate, "a channel to be lost", || {
        (session(&source.socket)?["channels_lost"].as_u64()? > 0).then_some(())
    });
    hosts.reshape(&fast().mtu(9000)).unwrap();
    let ended = migrate.end();
    ended.assert_ok();
    let report = ended.json();
    assert!(report["channels_lost"].as_u64().unwrap() >= 1, "{report}");
    assert_arrived(source, destination);
}
