//! Two doubles of a VMM with a `receive` between them, and the kills that a VM outlives.

use super::{Dir, Process};
use pageferry_testkit::firecracker::{Double, Status};
use pageferry_testkit::{Random, rotating_seeds, wait_until};
use rustix::process::Signal;
use std::time::Duration;

/// A VM that runs in one of two processes of a VMM, and a `receive` for the other one.
pub(crate) struct Hosts {
    /// The scheme of the VMM's addresses.
    scheme: &'static str,
    pub(crate) source: Double,
    pub(crate) target: Double,
    pub(crate) receive: Process,
    pub(crate) address: String,
    pub(crate) dir: Dir,
}

impl Hosts {
    /// The APIs of the doubles are `source` and `target` in the directory.
    pub(crate) fn new(scheme: &'static str, dir: Dir, source: Double, target: Double) -> Self {
        let receive = receive(scheme, &dir, "127.0.0.1:0");
        let address = receive.wait_until_said("listening on ");
        let mut hosts = Self {
            scheme,
            source,
            target,
            receive,
            address,
            dir,
        };
        hosts.source.run();
        hosts
    }

    pub(crate) fn migrate(&self, flags: &[&str]) -> Process {
        let vm = format!("{}:{}", self.scheme, self.dir.path("source").display());
        let args = ["migrate", "--vm", &vm, "--to", &self.address];
        Process::start(&[&args[..], flags].concat(), &self.dir)
    }

    /// Starts a slow move without pre-copy, and waits until it has said this.
    fn migrate_until(&self, said: &str) -> Process {
        let flags = ["--json", "--precopy-passes", "0", "--max-bandwidth", "1M"];
        let mut migrate = self.migrate(&flags);
        wait_until(said, || {
            migrate.said_on_stderr().contains(said) || !migrate.is_running()
        });
        migrate
    }

    fn kill_receive(&mut self) {
        kill(&mut self.receive);
        self.receive = receive(self.scheme, &self.dir, &self.address);
    }

    /// The VM is in one process, whole, and does not run in the other one.
    fn assert_one_runs(&mut self, here: bool, case: &str) {
        let (runs, other) = match here {
            true => (&mut self.source, &mut self.target),
            false => (&mut self.target, &mut self.source),
        };
        let Status {
            wrong,
            state,
            first_wrong,
            ..
        } = runs.verify();
        assert_eq!(
            (wrong, &state[..]),
            (0, "Running"),
            "{case}: {first_wrong:?}"
        );
        assert_ne!(other.state(), "Running", "{case}");
    }

    /// The VM is at the destination, and nothing of ours is left beside its API socket.
    fn assert_moved(mut self, case: &str) {
        wait_until("the end of `receive`", || !self.receive.is_running());
        self.assert_one_runs(false, case);
        let target = self.target.status();
        assert_eq!(target.served.is_some(), self.scheme == "ch", "{case}");
        let folder = self.dir.path("target");
        wait_until("the end of the keeper", || {
            let mut beside = std::fs::read_dir(folder.parent().unwrap())
                .unwrap()
                .flatten();
            !beside.any(|entry| entry.file_name().to_string_lossy().contains("pageferry-"))
        });
    }
}

fn receive(scheme: &str, dir: &Dir, address: &str) -> Process {
    let api = format!("{scheme}:{}", dir.path("target").display());
    let listen = ["--listen", address, "--give-up-after", "2m", "--json"];
    Process::start(&[&["receive", "--for", &api][..], &listen].concat(), dir)
}

fn kill(process: &mut Process) {
    if process.is_running() {
        process.signal(Signal::KILL);
    }
    wait_until("the end of the killed process", || !process.is_running());
}

/// Scenes of seeds. `PAGEFERRY_RECEIVE_KILLS` is a range of them.
fn seeds(
    count: u64,
    start: impl Fn() -> Option<Hosts>,
) -> impl Iterator<Item = (u64, Random, Hosts)> {
    rotating_seeds("PAGEFERRY_RECEIVE_KILLS", count, 15)
        .map_while(move |seed| Some((seed, Random::new(seed), start()?)))
}

fn sleep(random: &mut Random, most_us: u64) {
    std::thread::sleep(Duration::from_micros(random.below(most_us)));
}

/// Kills of the receiving end at seeded moments behind the hand-over. The next one goes on.
pub(crate) fn outlives_receivers(start: impl Fn() -> Option<Hosts>) {
    for (seed, mut random, mut hosts) in seeds(1, start) {
        let migrate = hosts.migrate_until("post-copy");
        for _ in 0..6 {
            sleep(&mut random, 60_000);
            hosts.kill_receive();
            hosts.receive.wait_until_said("left behind");
        }
        let sent = migrate.end();
        sent.assert_ok();
        assert!(sent.json()["reconnects"].as_u64() > Some(0), "{sent:?}");
        hosts.assert_moved(&format!("seed {seed}"));
    }
}

/// Kills of the sending end at seeded moments behind the hand-over. The next one goes on. Then
/// `check` looks at the source.
pub(crate) fn outlives_senders(start: impl Fn() -> Option<Hosts>, check: impl Fn(&mut Hosts)) {
    for (seed, mut random, mut hosts) in seeds(1, start) {
        for round in 0..5 {
            let mut migrate = hosts.migrate_until("post-copy");
            sleep(&mut random, 40_000);
            kill(&mut migrate);
            let said = migrate.said_on_stderr();
            assert_eq!(
                said.contains("left behind"),
                round > 0,
                "seed {seed}: {said}"
            );
        }
        let sent = hosts.migrate(&["--json"]).end();
        sent.assert_ok();
        assert!(sent.stderr.contains("left behind"), "seed {seed}: {sent:?}");
        assert!(
            sent.json()["blackout_ms"].is_null(),
            "seed {seed}: {sent:?}"
        );
        check(&mut hosts);
        hosts.assert_moved(&format!("seed {seed}"));
    }
}

/// Kills of the receiving end at seeded moments of the set-up and of the switch-over: the VM is in
/// one process, and runs there.
pub(crate) fn a_killed_receiver_leaves_one(start: impl Fn() -> Option<Hosts>) {
    let mut ends = [0, 0];
    for (seed, mut random, mut hosts) in seeds(3, start) {
        let migrate = hosts.migrate(&["--json", "--precopy-passes", "0"]);
        sleep(&mut random, 45_000);
        hosts.kill_receive();
        let sent = migrate.end();
        let here = sent.code != Some(0);
        ends[usize::from(!here)] += 1;
        hosts.assert_one_runs(here, &format!("seed {seed}: {sent:?}"));
        if here {
            hosts.receive.interrupt();
        }
        let received = hosts.receive.end();
        assert_eq!(received.code == Some(0), !here, "seed {seed}: {received:?}");
    }
    println!("{} stayed and {} moved", ends[0], ends[1]);
}

/// A kill of the sending end at a seeded moment of the set-up, of the switch-over or right behind
/// it: the VM runs in one process.
pub(crate) fn a_killed_sender_leaves_one(start: impl Fn() -> Option<Hosts>) {
    let mut ends = [0, 0];
    for (seed, mut random, mut hosts) in seeds(3, start) {
        let behind = ["", "setup", "switch-over"][seed as usize % 3];
        let mut migrate = hosts.migrate_until(behind);
        sleep(&mut random, 8_000);
        kill(&mut migrate);
        let keeper = hosts.dir.path("source.pageferry");
        // A keeper whose process had not handed the VM over ends.
        let stays = |source: &mut Double| !keeper.exists() && source.state() == "Running";
        wait_until("the keeper to end or the VM to be there", || {
            let there = hosts.target.state();
            stays(&mut hosts.source) || ["Running", "Paused"].contains(&&there[..])
        });
        let mut here = stays(&mut hosts.source);
        if !here {
            let moved = hosts.migrate(&[]).end();
            // This move may have met a keeper that was about to end.
            here = moved.code != Some(0);
            let what = format!("the VM to stay: {moved:?}");
            wait_until(&what, || !here || stays(&mut hosts.source));
        }
        ends[usize::from(!here)] += 1;
        hosts.assert_one_runs(here, &format!("seed {seed}"));
    }
    println!("{} stayed and {} moved", ends[0], ends[1]);
}
