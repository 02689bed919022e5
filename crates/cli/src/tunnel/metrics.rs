//! The figures of a tunnel for Prometheus: of the migrations under way, and of those that ended.

use super::text::ms;
use pageferry_bridge::tunnel::SessionState;
use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// What the migrations by a route that have ended have carried.
#[derive(Clone, Copy, Default)]
struct Total {
    ended: u64,
    failed: u64,
    sent: u64,
    received: u64,
    losses: u64,
}

/// The totals of all routes, by their names.
#[derive(Default)]
pub(super) struct Totals(Mutex<BTreeMap<String, Total>>);

impl Totals {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, Total>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A migration has ended.
    pub(super) fn add(&self, state: &SessionState, has_failed: bool) {
        let (sent, received) = state.bytes();
        let mut totals = self.lock();
        let total = totals.entry(state.route.to_string()).or_default();
        total.ended += u64::from(!has_failed);
        total.failed += u64::from(has_failed);
        total.sent += sent;
        total.received += received;
        total.losses += state.losses;
    }

    /// The page for Prometheus.
    pub(super) fn page(&self, sessions: &[SessionState]) -> String {
        let mut page = crate::metrics::Page::with_build();
        page.family("tunnel_sessions", "gauge", "Migrations under way.");
        page.sample("tunnel_sessions", "", sessions.len());
        let totals = self.lock();
        let (name, help) = ("tunnel_migrations_total", "Migrations that have ended.");
        page.family(name, "counter", help);
        for (route, total) in totals.iter() {
            for (result, count) in [("ended", total.ended), ("failed", total.failed)] {
                let labels = format!("{},result=\"{result}\"", label(route));
                page.sample(name, &labels, count);
            }
        }
        type OfTotal = fn(&Total) -> u64;
        let families: [(&str, &str, OfTotal); 3] = [
            ("sent_bytes", "Bytes that the VMM had written.", |t| t.sent),
            ("received_bytes", "Bytes that it was given.", |t| t.received),
            ("losses", "How often all connections were lost.", |t| {
                t.losses
            }),
        ];
        for (name, help, of) in families {
            let name = format!("tunnel_{name}_total");
            page.family(
                &name,
                "counter",
                &format!("{help} Of those that have ended."),
            );
            for (route, total) in totals.iter() {
                page.sample(&name, &label(route), of(total));
            }
        }
        drop(totals);
        type Of = fn(&SessionState) -> u64;
        let families: [(&str, &str, &str, Of); 9] = [
            (
                "sent_bytes_total",
                "counter",
                "Bytes that this end's VMM has written.",
                |s| s.bytes().0,
            ),
            (
                "received_bytes_total",
                "counter",
                "Bytes that it was given.",
                |s| s.bytes().1,
            ),
            ("streams", "gauge", "Streams.", |s| s.streams.len() as u64),
            ("connections", "gauge", "Connections that work.", |s| {
                s.links.0.into()
            }),
            (
                "losses_total",
                "counter",
                "How often all connections were lost.",
                |s| s.losses,
            ),
            (
                "lost_milliseconds",
                "gauge",
                "The time without any connection until now.",
                |s| ms(s.lost_for.unwrap_or_default()),
            ),
            (
                "kept_bytes",
                "gauge",
                "Bytes that are kept until they are delivered.",
                |s| s.kept.0,
            ),
            (
                "waiting_bytes",
                "gauge",
                "Bytes that wait for the VMM.",
                |s| s.kept.1,
            ),
            (
                "in_doubt",
                "gauge",
                "1 if the destination may run the VM, and a cut would let it run twice.",
                |s| s.in_doubt.into(),
            ),
        ];
        for (name, kind, help, of) in families {
            let name = format!("tunnel_session_{name}");
            page.family(&name, kind, help);
            for state in sessions {
                let labels = format!(
                    "{},session=\"{}\"",
                    label(state.route.as_str()),
                    state.session
                );
                page.sample(&name, &labels, of(state));
            }
        }
        page.finish()
    }
}

fn label(route: &str) -> String {
    let route = route.replace('\\', "\\\\").replace('"', "\\\"");
    format!("route=\"{route}\"")
}
