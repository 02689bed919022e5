//! Figures of moves between doubles of Firecracker: the pause and its parts.

use crate::fc::Hosts;
use pageferry_migration::Switch;
use pageferry_testkit::firecracker::Quirk;
use pageferry_testkit::wait_until;

/// Over loopback, with two vCPUs that write all the time.
#[test]
#[ignore = "measures: run with --release and --nocapture"]
fn the_pause_and_its_parts() {
    println!("MiB, pre-copy: stop, save, rest of the blackout in ms");
    for mib in [64, 256, 1024] {
        for switch in [Switch::NOW, Switch::Auto] {
            for _ in 0..3 {
                let Some(mut hosts) = Hosts::with(&[mib << 20], None, [Quirk::Right; 2]) else {
                    return;
                };
                hosts.switch = switch;
                wait_until("the guest to work", || {
                    hosts.source.status().touched() > 5000
                });
                let route = hosts.route();
                let moved = hosts.migrate(&route, |_| ());
                let sent = moved.sent.unwrap();
                moved.received.unwrap();
                let pause = moved.pause.unwrap();
                let blackout = sent.confirmed - sent.last_stop;
                let ms = |time: std::time::Duration| time.as_secs_f64() * 1e3;
                println!(
                    "{mib:5}, {:5}: {:6.1} {:6.1} {:6.1}  {:?}",
                    switch != Switch::NOW,
                    ms(pause.stop),
                    ms(pause.save),
                    ms(blackout - pause.save),
                    sent.pages,
                );
            }
        }
    }
}
