//! The configuration of a double, and its text.

use std::path::PathBuf;

/// The properties of a double. It travels to the double's process as lines of text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// The path of its API socket.
    pub api: PathBuf,
    /// The seed of what the vCPUs write and touch.
    pub seed: u64,
    /// The sizes of the regions of RAM in bytes. Empty: the double has no VM, and can receive one.
    pub regions: Vec<u64>,
    /// The number of threads that stand for vCPUs.
    pub vcpus: usize,
    /// What it does wrong.
    pub quirk: Quirk,
}

/// What a double does wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Quirk {
    /// Nothing.
    Right,
    /// Start has version 7.
    Version,
    /// It is v53.0, which asks for no page that lies in the page cache.
    OldVersion,
    /// It sends a command that does not exist.
    Command,
    /// It sends Config before Start.
    ConfigFirst,
    /// It sends no memfd: its memory is not shared.
    NotShared,
    /// It sends memory inline, before Config.
    Inline,
    /// The last memfd is shorter than its region.
    ShortMemfd,
    /// The memfds are sealed against writing.
    SealedMemfd,
    /// The last descriptor is no memfd.
    NoMemfd,
    /// MemoryFd comes without a descriptor.
    NoDescriptor,
    /// The last memfd comes twice.
    TwiceMemfd,
    /// A memfd comes that Config does not map.
    ExtraMemfd,
    /// Config maps a slot without a memfd.
    ExtraMapping,
    /// Config maps a page twice.
    Overlap,
    /// Config is no JSON.
    NoJson,
    /// Config says that it is longer than any Config.
    LongConfig,
    /// It gives up while it waits for the answer to Config.
    Abandon,
    /// It sends something else than State.
    NoState,
    /// State says that it is longer than any State.
    LongState,
    /// It dies after Start.
    DieAtStart,
    /// It dies after a memfd.
    DieAtMemfd,
    /// It dies 0.2 s after Config.
    DieAtConfig,
    /// It dies when its Config is answered.
    DieAtPause,
    /// It dies after State.
    DieAtState,
    /// It dies after Complete.
    DieAtComplete,
    /// As a receiver, it does not ask for pages that lie in the page cache, whatever its version.
    MissingOnly,
    /// As a receiver, it refuses Config.
    RefuseConfig,
    /// As a receiver, it refuses State.
    RefuseState,
    /// A disk is missing: it opens its devices behind its vCPUs.
    RefuseDisk,
    /// A disk is locked: it takes its locks last.
    RefuseLock,
    /// As a receiver, it dies when it has Config.
    ReceiverDiesAtConfig,
    /// As a receiver, it dies when it has State.
    ReceiverDiesAtState,
    /// As a receiver, it dies when it has asked for 64 pages, and its VM runs.
    ReceiverDiesAtFaults,
    /// As a receiver, it asks for a page outside RAM before it is told to run its VM, or right then.
    EarlyFault,
    /// As a receiver, it asks for a page outside RAM when its VM runs.
    WrongFault,
    /// As a receiver, it sends another command on the connection for page faults then.
    WrongCommand,
}

impl Quirk {
    const ALL: [Self; 37] = [
        Self::Right,
        Self::Version,
        Self::OldVersion,
        Self::Command,
        Self::ConfigFirst,
        Self::NotShared,
        Self::Inline,
        Self::ShortMemfd,
        Self::SealedMemfd,
        Self::NoMemfd,
        Self::NoDescriptor,
        Self::TwiceMemfd,
        Self::ExtraMemfd,
        Self::ExtraMapping,
        Self::Overlap,
        Self::NoJson,
        Self::LongConfig,
        Self::Abandon,
        Self::NoState,
        Self::LongState,
        Self::DieAtStart,
        Self::DieAtMemfd,
        Self::DieAtConfig,
        Self::DieAtPause,
        Self::DieAtState,
        Self::DieAtComplete,
        Self::MissingOnly,
        Self::RefuseConfig,
        Self::RefuseState,
        Self::RefuseDisk,
        Self::RefuseLock,
        Self::ReceiverDiesAtConfig,
        Self::ReceiverDiesAtState,
        Self::ReceiverDiesAtFaults,
        Self::EarlyFault,
        Self::WrongFault,
        Self::WrongCommand,
    ];
}

impl Config {
    pub(super) fn to_text(&self) -> String {
        let regions: Vec<String> = self.regions.iter().map(u64::to_string).collect();
        format!(
            "{}\n{}\n{}\n{:?}\n{}",
            self.seed,
            regions.join(","),
            self.vcpus,
            self.quirk,
            self.api.to_str().expect("a path in UTF-8"),
        )
    }

    pub(super) fn from_text(text: &str) -> Option<Self> {
        let mut lines = text.splitn(5, '\n');
        let seed = lines.next()?.parse().ok()?;
        let sizes = lines.next()?.split(',').filter(|size| !size.is_empty());
        let sizes = sizes.map(|size| size.parse().ok());
        let regions = sizes.collect::<Option<_>>()?;
        let vcpus = lines.next()?.parse().ok()?;
        let name = lines.next()?;
        let quirk = Quirk::ALL
            .into_iter()
            .find(|quirk| format!("{quirk:?}") == name)?;
        Some(Self {
            api: lines.next()?.into(),
            seed,
            regions,
            vcpus,
            quirk,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_text_of_a_configuration_is_read_back() {
        for (quirk, regions) in Quirk::ALL
            .into_iter()
            .zip([vec![], vec![4096, 2 << 20]].iter().cycle())
        {
            let config = Config {
                api: "/tmp/an api".into(),
                seed: 7,
                regions: regions.clone(),
                vcpus: 3,
                quirk,
            };
            assert_eq!(Config::from_text(&config.to_text()), Some(config));
        }
        assert_eq!(Config::from_text("1\n2\n3\nNothing\n/"), None);
    }
}
