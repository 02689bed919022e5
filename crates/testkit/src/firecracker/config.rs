//! The configuration of a double, and its text.

use std::path::PathBuf;

/// The properties of a double. It travels to the double's process as lines of text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// The seed of the memory file's contents, and of what the threads touch.
    pub seed: u64,
    /// The sizes of the regions in bytes: multiples of the page size.
    pub regions: Vec<u64>,
    /// Where the memory's contents come from.
    pub backend: Backend,
    /// The number of threads that stand for vCPUs.
    pub vcpus: usize,
    /// The time between two removals of the balloon in microseconds, or `None` for no balloon.
    pub balloon_us: Option<u64>,
}

/// Firecracker's memory backends.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Backend {
    /// `Uffd`: a page server. Pages have 4 KiB.
    Uffd,
    /// `Uffd` of releases up to 1.11 without a balloon: a page server is not told of removals.
    UffdOld,
    /// `Uffd` with pages of 2 MiB from the host's pool.
    UffdHuge,
    /// `File`: a private mapping of this memory file, without a page server.
    File(PathBuf),
}

impl Config {
    pub(super) fn to_text(&self) -> String {
        let regions: Vec<String> = self.regions.iter().map(u64::to_string).collect();
        let balloon = self.balloon_us.map_or("none".into(), |us| us.to_string());
        let backend = match &self.backend {
            Backend::Uffd => "uffd".to_owned(),
            Backend::UffdOld => "old".to_owned(),
            Backend::UffdHuge => "huge".to_owned(),
            Backend::File(path) => format!("file {}", path.to_str().expect("a path in UTF-8")),
        };
        format!(
            "{}\n{}\n{}\n{balloon}\n{backend}",
            self.seed,
            regions.join(","),
            self.vcpus
        )
    }

    pub(super) fn from_text(text: &str) -> Option<Self> {
        let mut lines = text.splitn(5, '\n');
        let seed = lines.next()?.parse().ok()?;
        let sizes = lines.next()?.split(',').map(|size| size.parse().ok());
        Some(Self {
            seed,
            regions: sizes.collect::<Option<_>>()?,
            vcpus: lines.next()?.parse().ok()?,
            balloon_us: match lines.next()? {
                "none" => None,
                us => Some(us.parse().ok()?),
            },
            backend: match lines.next()? {
                "uffd" => Backend::Uffd,
                "old" => Backend::UffdOld,
                "huge" => Backend::UffdHuge,
                file => Backend::File(file.strip_prefix("file ")?.into()),
            },
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_text_of_a_configuration_is_read_back() {
        for (backend, balloon_us) in [
            (Backend::Uffd, None),
            (Backend::UffdOld, None),
            (Backend::UffdHuge, Some(0)),
            (Backend::File("/tmp/a file".into()), Some(200)),
        ] {
            let config = Config {
                seed: 7,
                regions: vec![4096, 2 << 20],
                backend,
                vcpus: 3,
                balloon_us,
            };
            assert_eq!(Config::from_text(&config.to_text()), Some(config));
        }
        assert_eq!(Config::from_text("1\n2\n3\nnone"), None);
    }
}
