//! CPUs for the threads of a migration.
//!
//! **Guarantee.** With a list, all threads that a migration starts run on these CPUs only, and so
//! does the calling thread while the library borrows it. Afterwards that thread has its old CPUs
//! again. vCPU threads keep theirs.
//!
//! **Mechanism.** A new thread inherits the CPUs of the thread that starts it (`fork(2)`,
//! `sched_setaffinity(2)`). So it is enough to pin the supervisor's thread before it starts others.
//! vCPU threads belong to the caller, who starts them while its thread is not pinned.

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use std::fmt;
use std::io;
use std::marker::PhantomData;
use std::str::FromStr;

/// CPUs of this host, written as `0-3,8`.
///
/// ```
/// use pageferry_migration::CpuList;
///
/// let list: CpuList = "8,0-3".parse()?;
/// assert_eq!(list.to_string(), "0-3,8");
/// # Ok::<(), pageferry_migration::CpuListError>(())
/// ```
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct CpuList {
    /// Ascending, without repetitions, and never empty.
    cpus: Vec<usize>,
}

/// Why a text is no list of CPUs, or why this process cannot use one.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CpuListError {
    /// There is no CPU in it.
    #[error("no CPU is named: expected a list such as 0-3,8")]
    Empty,
    /// A part is neither a CPU nor a range.
    #[error("'{0}' is no CPU and no range of CPUs: expected a list such as 0-3,8")]
    Part(String),
    /// The first CPU of a range is above its last.
    #[error("the range {0}-{1} runs backwards: expected {1}-{0}")]
    Reversed(usize, usize),
    /// Two parts name the same CPU.
    #[error("CPU {0} is named twice")]
    Twice(usize),
    /// The host has no such CPU that is online.
    #[error("this host has no CPU {cpu}: its CPUs are {online}")]
    NotHere {
        /// The CPU.
        cpu: usize,
        /// The CPUs that are online.
        online: String,
    },
    /// The process may not run on it.
    #[error("this process may not run on CPU {cpu}: its own CPUs are {allowed}")]
    NotAllowed {
        /// The CPU.
        cpu: usize,
        /// The CPUs that it may use.
        allowed: String,
    },
    /// The kernel does not say which CPUs there are, or refuses the list.
    #[error("cannot choose the CPUs of a thread: {0}")]
    Refused(String),
}

impl FromStr for CpuList {
    type Err = CpuListError;

    fn from_str(text: &str) -> Result<Self, CpuListError> {
        let mut cpus = Vec::new();
        if text.trim().is_empty() {
            return Err(CpuListError::Empty);
        }
        for part in text.split(',').map(str::trim) {
            let wrong = || CpuListError::Part(part.to_owned());
            let (first, last) = part.split_once('-').unwrap_or((part, part));
            let (first, last) = (
                number(first).ok_or_else(wrong)?,
                number(last).ok_or_else(wrong)?,
            );
            if first > last {
                return Err(CpuListError::Reversed(first, last));
            }
            cpus.extend(first..=last);
        }
        cpus.sort_unstable();
        match cpus.windows(2).find(|pair| pair[0] == pair[1]) {
            Some(pair) => Err(CpuListError::Twice(pair[0])),
            None => Ok(Self { cpus }),
        }
    }
}

/// A CPU's number. `None` if it is not one, or above those that a mask of the kernel's size holds.
fn number(text: &str) -> Option<usize> {
    let digits = text.bytes().all(|byte| byte.is_ascii_digit());
    let number = text.parse().ok().filter(|_| digits)?;
    (number < CpuSet::MAX_CPU).then_some(number)
}

impl fmt::Display for CpuList {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let runs = self.cpus.chunk_by(|a, b| a + 1 == *b);
        for (index, run) in runs.enumerate() {
            let comma = if index > 0 { "," } else { "" };
            match run {
                [first, .., last] => write!(f, "{comma}{first}-{last}")?,
                [one] => write!(f, "{comma}{one}")?,
                [] => {}
            }
        }
        Ok(())
    }
}

impl CpuList {
    /// Checks that this host has the CPUs, and that the calling thread may run on them.
    ///
    /// # Errors
    /// The first CPU that is not usable, and those that are.
    pub fn check(&self) -> Result<(), CpuListError> {
        let unknown = |e: io::Error| CpuListError::Refused(e.to_string());
        let allowed = sched_getaffinity(None).map_err(|e| unknown(e.into()))?;
        let Some(cpu) = self.cpus.iter().copied().find(|cpu| !allowed.is_set(*cpu)) else {
            return Ok(());
        };
        let online = std::fs::read_to_string("/sys/devices/system/cpu/online").map_err(unknown)?;
        let online = online.trim();
        let is_online = online
            .parse()
            .is_ok_and(|list: Self| list.cpus.contains(&cpu));
        Err(if is_online {
            let cpus = (0..CpuSet::MAX_CPU).filter(|cpu| allowed.is_set(*cpu));
            let allowed = Self {
                cpus: cpus.collect(),
            };
            CpuListError::NotAllowed {
                cpu,
                allowed: allowed.to_string(),
            }
        } else {
            CpuListError::NotHere {
                cpu,
                online: online.to_owned(),
            }
        })
    }
}

/// The calling thread is pinned as long as this exists.
pub(crate) struct Pinned {
    before: Option<CpuSet>,
    /// Not `Send`: another thread would restore its own CPUs.
    thread: PhantomData<*const ()>,
}

impl Pinned {
    /// Pins the calling thread to `cpus`. Without a list, nothing changes.
    ///
    /// # Errors
    /// As [`CpuList::check`]. Without that, the kernel would take a list of which only a part is
    /// usable.
    pub(crate) fn to(cpus: Option<&CpuList>) -> Result<Self, CpuListError> {
        let mut before = None;
        if let Some(list) = cpus {
            list.check()?;
            let mut set = CpuSet::new();
            list.cpus.iter().for_each(|cpu| set.set(*cpu));
            let refused = |e: rustix::io::Errno| CpuListError::Refused(e.to_string());
            before = Some(sched_getaffinity(None).map_err(refused)?);
            sched_setaffinity(None, &set).map_err(refused)?;
        }
        Ok(Self {
            before,
            thread: PhantomData,
        })
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        if let Some(before) = &self.before {
            // If its old CPUs have gone meanwhile, the kernel has chosen others.
            let _ = sched_setaffinity(None, before);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn allowed() -> Vec<usize> {
        let set = sched_getaffinity(None).unwrap();
        (0..CpuSet::MAX_CPU)
            .filter(|cpu| set.is_set(*cpu))
            .collect()
    }

    #[test]
    fn a_list_is_shown_in_its_shortest_form() {
        for (text, shown) in [
            ("0", "0"),
            ("0-0", "0"),
            ("0-3,8", "0-3,8"),
            ("8,3,2,1,0", "0-3,8"),
            (" 1 , 5-6 ", "1,5-6"),
            ("1023", "1023"),
        ] {
            assert_eq!(text.parse::<CpuList>().unwrap().to_string(), shown);
        }
    }

    #[test]
    fn a_text_that_is_no_list_is_refused_with_the_reason() {
        let why = |text: &str| text.parse::<CpuList>().unwrap_err().to_string();
        assert_eq!(why(""), "no CPU is named: expected a list such as 0-3,8");
        assert_eq!(why(" "), why(""));
        assert_eq!(why("3-1"), "the range 3-1 runs backwards: expected 1-3");
        assert_eq!(why("0-3,2-5"), "CPU 2 is named twice");
        assert_eq!(why("1,1"), "CPU 1 is named twice");
        for garbage in [
            "x", "1,", ",1", "1-", "-1", "1-2-3", "+1", "0x1", "1;2", "1024", "1.5",
        ] {
            assert!(why(garbage).contains("is no CPU"), "{garbage}");
        }
        assert!(why("99999999999999999999999").contains("is no CPU"));
    }

    #[test]
    fn only_cpus_that_this_thread_may_use_pass_the_check() {
        let all = allowed();
        let mine: CpuList = all[0].to_string().parse().unwrap();
        mine.check().unwrap();
        let absent: CpuList = "1023".parse().unwrap();
        let why = absent.check().unwrap_err().to_string();
        assert!(why.starts_with("this host has no CPU 1023: "), "{why}");
        if let [first, second, ..] = all[..] {
            let other: CpuList = second.to_string().parse().unwrap();
            let _pinned = Pinned::to(Some(&mine)).unwrap();
            let why = other.check().unwrap_err().to_string();
            let expected =
                format!("this process may not run on CPU {second}: its own CPUs are {first}");
            assert_eq!(why, expected);
        }
    }

    #[test]
    fn a_thread_has_its_old_cpus_again_and_its_children_inherit_the_new() {
        let before = allowed();
        let list: CpuList = before[before.len() - 1].to_string().parse().unwrap();
        {
            let _pinned = Pinned::to(Some(&list)).unwrap();
            assert_eq!(allowed(), list.cpus);
            assert_eq!(std::thread::spawn(allowed).join().unwrap(), list.cpus);
        }
        assert_eq!(allowed(), before);
        drop(Pinned::to(None).unwrap());
        let absent: CpuList = "1023".parse().unwrap();
        assert!(Pinned::to(Some(&absent)).is_err());
        assert_eq!(allowed(), before);
    }
}
