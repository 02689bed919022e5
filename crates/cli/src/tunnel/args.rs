//! The flags of `pageferry tunnel`.

use crate::args::{EXIT_CODES, LimitArgs, MetricsArgs, OwnerArgs, TlsArgs, queue};
use clap::{ArgGroup, Args};
use pageferry_bridge::tunnel::{Config, Limits, MAX_CHANNELS, Route};
use pageferry_harness::size;
use pageferry_migration::Tls;
use pageferry_transport::address::Address;
use std::path::PathBuf;
use std::time::Duration;

/// `pageferry tunnel`.
#[derive(Debug, Args)]
#[command(
    after_help = EXIT_CODES,
    group(ArgGroup::new("side").required(true).args(["to", "accept"])),
    group(ArgGroup::new("streams").required(true).multiple(true).args(["listen", "connect", "routes", "route_dir"])),
)]
pub(crate) struct TunnelArgs {
    /// At the source: where the VMM connects, such as unix:/run/vm.sock
    #[arg(long, value_name = "ADDR", conflicts_with_all = ["routes", "route_dir"])]
    pub(super) listen: Option<Address>,
    /// At the source: the address on which the other tunnel accepts
    #[arg(long, value_name = "HOST:PORT")]
    pub(super) to: Option<Address>,
    /// At the destination: the address on which this tunnel accepts the other one
    #[arg(long, value_name = "HOST:PORT")]
    pub(super) accept: Option<Address>,
    /// At the destination: where the VMM listens, such as unix:/run/vm.sock
    #[arg(long, value_name = "ADDR", conflicts_with_all = ["routes", "route_dir"])]
    pub(super) connect: Option<Address>,
    /// A named way in place of --listen or --connect; may be given again. Both tunnels use the same
    /// names
    #[arg(long = "route", value_name = "NAME=ADDR", value_parser = route)]
    pub(super) routes: Vec<Route>,
    /// A directory of more of them, read once a second: each file is a route, has its name, and
    /// contains its ADDR
    #[arg(long, value_name = "DIR")]
    pub(super) route_dir: Option<PathBuf>,
    #[command(flatten)]
    owner: OwnerArgs,
    /// End after one migration, with its exit code
    #[arg(long)]
    pub(super) once: bool,
    /// The most bytes of streams that this side keeps until the other VMM has them, and of those
    /// that wait for the VMM here
    #[arg(long, value_name = "SIZE", default_value = "64M", value_parser = window)]
    window: u64,
    /// The streams that vCPUs wait for, by the order of opening, from 1 [default: QEMU's preempt
    /// channel and Cloud Hypervisor's page faults, which are recognised]
    #[arg(long, value_name = "N", value_delimiter = ',', value_parser = clap::value_parser!(u32).range(1..=260))]
    urgent: Option<Vec<u32>>,
    /// Connections for data that nobody waits for. The source chooses
    #[arg(long, default_value_t = 1, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=i64::from(MAX_CHANNELS)))]
    channels: u16,
    /// How long such data may keep the link busy beyond a round trip, such as 250us: about the
    /// longest wait of urgent pages behind it; 50us at least
    #[arg(long, default_value = "250us", value_name = "TIME", value_parser = queue)]
    queue: Duration,
    #[command(flatten)]
    limits: LimitArgs,
    #[command(flatten)]
    tls: TlsArgs,
    /// Path of the control socket (mode 0600) for watch, status, cancel and quit [default: by the
    /// name, in the directory pageferry of $XDG_RUNTIME_DIR, or of /run for root]
    #[arg(long, value_name = "SOCKET", conflicts_with = "name")]
    pub(super) control: Option<PathBuf>,
    /// The tunnel's name, for --vm of other commands [default: tunnel- and the process id]
    #[arg(long, value_name = "NAME", value_parser = crate::sockets::name)]
    pub(super) name: Option<String>,
    #[command(flatten)]
    pub(super) metrics: MetricsArgs,
    /// Print each migration's result as one JSON object
    #[arg(long, conflicts_with = "events")]
    pub(super) json: bool,
    /// Print what happens as JSON, one object a line, also the results
    #[arg(long)]
    pub(super) events: bool,
}

pub(super) fn route(text: &str) -> Result<Route, String> {
    let Some((name, address)) = text.split_once('=') else {
        return Err(format!("'{text}' is no route: expected NAME=unix:PATH"));
    };
    Ok(Route {
        name: name.parse().map_err(|why| format!("'{name}': {why}"))?,
        address: address.parse().map_err(|why| format!("{why}"))?,
    })
}

fn window(text: &str) -> Result<u64, String> {
    let bytes = size::parse(text)?;
    if bytes < Config::LEAST_WINDOW {
        let least = size::human(Config::LEAST_WINDOW);
        return Err(format!(
            "a window of {text} carries nothing: choose {least} at least"
        ));
    }
    Ok(bytes)
}

impl TunnelArgs {
    /// Checks that the ways of the streams are those of this end.
    pub(super) fn check(&self) -> Result<(), String> {
        match (&self.to, &self.listen, &self.connect) {
            (Some(_), _, Some(_)) => Err("--connect belongs to --accept: give --listen".into()),
            (None, Some(_), _) => Err("--listen belongs to --to: give --connect".into()),
            _ => Ok(()),
        }
    }

    /// The ways of the streams at this end that its flags name.
    pub(super) fn routes(&self) -> Vec<Route> {
        match self.listen.as_ref().or(self.connect.as_ref()) {
            None => self.routes.clone(),
            Some(address) => vec![Route {
                name: "default".parse().expect("a name"),
                address: address.clone(),
            }],
        }
    }

    pub(super) fn config(&self) -> Config {
        Config {
            limits: Limits {
                window: self.window,
                urgent: self.urgent.clone(),
            },
            channels: self.channels,
            queue: self.queue,
            patience: crate::control::options::limits(
                self.limits.dead_after,
                self.limits.give_up_after,
            ),
            tls: self.tls.options().map(|options| Tls::from(&options)),
            plain: crate::control::options::plain(self.tls.insecure),
            owner: self.owner.owner(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn routes_have_a_name_and_an_address() {
        let good = route("web=unix:/run/web.sock").unwrap();
        assert_eq!(good.name.as_str(), "web");
        for (bad, part) in [
            ("unix:/run/web.sock", "expected NAME=unix:PATH"),
            ("=unix:/run/web.sock", "name"),
            ("web=", "empty"),
            ("we b=unix:/a", "name"),
        ] {
            let why = route(bad).unwrap_err();
            assert!(why.contains(part), "{bad}: {why}");
        }
        assert!(window("64k").unwrap_err().contains("1 MiB at least"));
    }
}
