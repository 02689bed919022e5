//! libvirt moves a VM between two network namespaces, through a pair of tunnels.
//!
//! **Guarantee.** `virsh migrate` succeeds, and the VM runs at the destination only, although the
//! link is cut for a while in the middle: in pre-copy, in post-copy, and with several connections.
//!
//! **Mechanism.** Each host has a libvirtd of its own, in namespaces of its own, and its files in
//! the test's directory. The guest is a firmware that finds no disk. Its memory is filled with
//! random bytes, so a move takes some seconds. The bytes are not compared: QEMU 7.2 loses writes of
//! x86 guests under emulation by itself.

use crate::support::{Dir, PAGEFERRY, Process};
use pageferry_testkit::two_hosts::{self, Host, Link, Rate, TwoHosts};
use pageferry_testkit::{Random, netns, skip, wait_until};
use std::path::Path;
use std::process::{Command, Output};
use std::time::Duration;

/// The random bytes, and the bandwidth in MiB/s: 8 s for a move.
const FILLED: usize = 64 << 20;
const BANDWIDTH: &str = "8";
/// Where QEMU and the tunnels meet, at each host.
const LOCAL: &str = "127.0.0.1:49160";
const PORT: u16 = 7100;

/// Starts the libvirtd of a host, with files of its own. The shell is the first process of its
/// namespace: it reaps those of QEMU, and all end with it.
const START: &str = r#"
set -e
mkdir "$1"/etc "$1"/lib "$1"/log "$1"/cache
cp "$1"/libvirtd.conf "$1"/qemu.conf "$1"/etc
hostname "$2"
mount -t tmpfs none /run
mkdir /run/libvirt
mount --bind "$1"/etc /etc/libvirt
mount --bind "$1"/lib /var/lib/libvirt
mount --bind "$1"/log /var/log/libvirt
mount --bind "$1"/cache /var/cache/libvirt
libvirtd &
wait $!
"#;

struct Libvirt {
    host: Host,
    uri: String,
    _daemon: Process,
}

impl Libvirt {
    fn start(hosts: &TwoHosts, dir: &Dir, host: Host) -> Self {
        let (name, number) = match host {
            Host::A => ("host-a", 1),
            Host::B => ("host-b", 2),
        };
        let own = dir.path(name);
        std::fs::create_dir(&own).unwrap();
        let daemon = format!(
            "unix_sock_dir = \"{}\"\nunix_sock_group = \"root\"\nauth_unix_ro = \"none\"\n\
             auth_unix_rw = \"none\"\nhost_uuid = \"11111111-2222-3333-4444-55555555550{number}\"\n",
            own.display()
        );
        std::fs::write(own.join("libvirtd.conf"), daemon).unwrap();
        let qemu = "security_driver = \"none\"\nuser = \"root\"\ngroup = \"root\"\n\
            dynamic_ownership = 0\nremember_owner = 0\ncgroup_controllers = [ ]\n\
            namespaces = [ ]\nstdio_handler = \"file\"\n";
        std::fs::write(own.join("qemu.conf"), qemu).unwrap();
        let mut command = netns::command(hosts.name(host), "unshare");
        command
            .args([
                "--mount",
                "--uts",
                "--pid",
                "--fork",
                "--kill-child",
                "--mount-proc",
            ])
            .args(["sh", "-c", START, "sh"])
            .arg(&own)
            .arg(name);
        let socket = own.join("libvirt-sock");
        let libvirt = Self {
            host,
            uri: format!("qemu+unix:///system?socket={}", socket.display()),
            _daemon: Process::spawn(command),
        };
        wait_until("libvirtd", || libvirt.virsh(&["hostname"]).status.success());
        libvirt
    }

    fn virsh(&self, args: &[&str]) -> Output {
        let mut command = Command::new("timeout");
        command.args(["90", "virsh", "-k", "0", "-c", &self.uri]);
        command.args(args).output().unwrap()
    }

    /// Does what must succeed.
    #[track_caller]
    fn run(&self, args: &[&str]) -> String {
        let done = self.virsh(args);
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        assert!(done.status.success(), "{args:?}: {}", text(&done.stderr));
        text(&done.stdout)
    }
}

fn machine(filled: &Path) -> String {
    let kvm = rustix::fs::access("/dev/kvm", rustix::fs::Access::WRITE_OK).is_ok();
    let kind = if kvm { "kvm" } else { "qemu" };
    let filled = filled.display();
    format!(
        "<domain type='{kind}' xmlns:qemu='http://libvirt.org/schemas/domain/qemu/1.0'>
        <name>guest</name><memory unit='MiB'>384</memory><vcpu>1</vcpu>
        <os><type arch='x86_64'>hvm</type></os><features><acpi/></features>
        <devices><emulator>/usr/bin/qemu-system-x86_64</emulator>
        <controller type='usb' model='none'/><memballoon model='none'/></devices>
        <qemu:commandline><qemu:arg value='-device'/>
        <qemu:arg value='loader,file={filled},addr=0x10000000,force-raw=on'/></qemu:commandline>
        </domain>"
    )
}

/// Moves the guest by a pair of tunnels, and cuts the link meanwhile.
fn move_guest(hosts: &TwoHosts, dir: &Dir, from: &Libvirt, to: &Libvirt, flags: &[&str]) {
    let tunnel = |host, ends: [&str; 4]| {
        let command = netns::command(hosts.name(host), PAGEFERRY);
        let more = ["--insecure", "--once", "--dead-after", "500ms"];
        let process = Process::start_by(command, &[&["tunnel"], &ends[..], &more].concat(), dir);
        process.wait_until_said("listening at ");
        process
    };
    let at = format!("{}:{PORT}", hosts.address(to.host));
    let far = tunnel(to.host, ["--accept", &at, "--connect", LOCAL]);
    let near = tunnel(from.host, ["--listen", LOCAL, "--to", &at]);
    let uri = format!("tcp://{LOCAL}");
    let common = [
        "migrate",
        "--live",
        "--bandwidth",
        BANDWIDTH,
        "guest",
        &to.uri,
    ];
    let way = ["--migrateuri", &uri, "--listen-address", "127.0.0.1"];
    std::thread::scope(|scope| {
        let moved = scope.spawn(|| from.run(&[&common[..], &way, flags].concat()));
        near.wait_until_said("a migration begins");
        std::thread::sleep(Duration::from_secs(4));
        assert!(!moved.is_finished(), "the cut would come too late");
        hosts.plug(false).expect("unplugged");
        near.wait_until_said("the connections broke");
        std::thread::sleep(Duration::from_secs(2));
        hosts.plug(true).expect("plugged");
        moved.join().unwrap();
    });
    near.end().assert_ok();
    far.end().assert_ok();
    let state = to.run(&["domstate", "guest"]);
    assert_eq!(state.trim(), "running");
    assert_eq!(from.run(&["list", "--all", "--name"]).trim(), "");
}

#[test]
#[ignore = "slow, and needs libvirt: .ci/linux runs it"]
fn libvirt_moves_a_vm_although_the_link_is_cut() {
    for program in [
        "virsh",
        "/usr/sbin/libvirtd",
        "/usr/bin/qemu-system-x86_64",
        "unshare",
    ] {
        let found = Command::new(program).arg("--version").output();
        if let Err(why) = found {
            skip("libvirt", format!("{program}: {why}"));
            return;
        }
    }
    let Some(hosts) = two_hosts::or_skip(&Link::new(Rate::mbit(1000))) else {
        return;
    };
    let dir = Dir::new();
    let mut random = Random::new(1);
    let filled: Vec<u8> = (0..FILLED / 8)
        .flat_map(|_| random.below(u64::MAX).to_le_bytes())
        .collect();
    let file = dir.path("filled");
    std::fs::write(&file, filled).unwrap();
    let [a, b] = [Host::A, Host::B].map(|host| Libvirt::start(&hosts, &dir, host));
    let xml = dir.path("guest.xml");
    std::fs::write(&xml, machine(&file)).unwrap();
    a.run(&["create", xml.to_str().unwrap()]);
    move_guest(&hosts, &dir, &a, &b, &[]);
    let postcopy = ["--postcopy", "--timeout", "2", "--timeout-postcopy"];
    let bandwidth = ["--postcopy-bandwidth", BANDWIDTH];
    move_guest(&hosts, &dir, &b, &a, &[&postcopy[..], &bandwidth].concat());
    let parallel = ["--parallel", "--parallel-connections", "3"];
    move_guest(&hosts, &dir, &a, &b, &parallel);
}
