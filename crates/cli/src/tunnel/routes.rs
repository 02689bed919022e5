//! The routes of a tunnel, of which some come and go.
//!
//! **Mechanism.** A file is a route. So a restart of the tunnel keeps them, and whatever starts VMs
//! needs no more than `mv` and `rm`. The directory is read from time to time.

use super::args::{TunnelArgs, route};
use pageferry_bridge::tunnel::Route;
use std::collections::BTreeMap;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// The interval at which the directory is read.
const LOOK: Duration = Duration::from_secs(1);
/// The most bytes of a file that are read: an address is shorter.
const MOST: u64 = 1024;

pub(super) struct Routes {
    fixed: Vec<Route>,
    directory: Option<PathBuf>,
    looked: Option<Instant>,
    current: Vec<Route>,
    /// What was told of the directory and of its files.
    told: BTreeMap<PathBuf, String>,
}

impl Routes {
    pub(super) fn new(args: &TunnelArgs) -> Self {
        let fixed = args.routes();
        Self {
            current: fixed.clone(),
            fixed,
            directory: args.route_dir.clone(),
            looked: None,
            told: BTreeMap::new(),
        }
    }

    /// All routes, if they have changed.
    pub(super) fn changed(&mut self) -> Option<&[Route]> {
        let directory = self.directory.as_ref()?;
        if self.looked.is_some_and(|at| at.elapsed() < LOOK) {
            return None;
        }
        self.looked = Some(Instant::now());
        let mut routes = self.fixed.clone();
        let mut wrong = BTreeMap::new();
        match names(directory) {
            Ok(names) => {
                for name in names {
                    match read(directory, &name) {
                        Ok(route) => routes.push(route),
                        Err(why) => drop(wrong.insert(directory.join(name), why)),
                    }
                }
            }
            // Its routes stay: a directory that cannot be read says nothing of them.
            Err(why) => {
                routes.clone_from(&self.current);
                wrong.insert(directory.clone(), why.to_string());
            }
        }
        for (path, why) in &wrong {
            if self.told.get(path) != Some(why) {
                tracing::warn!("{} is no route: {why}", path.display());
            }
        }
        self.told = wrong;
        if routes == self.current {
            return None;
        }
        self.current = routes;
        Some(&self.current)
    }
}

/// The names of the files, sorted. Those that begin with a dot are not finished.
fn names(directory: &Path) -> std::io::Result<Vec<String>> {
    let mut names = Vec::new();
    for entry in std::fs::read_dir(directory)? {
        let name = entry?.file_name().to_string_lossy().into_owned();
        if !name.starts_with('.') {
            names.push(name);
        }
    }
    names.sort();
    Ok(names)
}

fn read(directory: &Path, name: &str) -> Result<Route, String> {
    let path = directory.join(name);
    // A FIFO would hold the tunnel up.
    if !path.is_file() {
        return Err("it is no file".into());
    }
    let mut text = String::new();
    let file = std::fs::File::open(path).map_err(|why| why.to_string())?;
    let read = file.take(MOST).read_to_string(&mut text);
    read.map_err(|why| why.to_string())?;
    route(&format!("{name}={}", text.trim()))
}
