//! Cores, memory and huge pages.

use super::{Finding, Grade};
use crate::memory;
use pageferry_harness::size::human;
use pageferry_machine::Backing;
use std::fs;

/// The kinds of memory for guests.
pub(super) fn backings() -> Finding {
    let lacks: Vec<String> = (Backing::ALL.into_iter())
        .filter_map(|backing| {
            let why = backing.check(backing.page_size().bytes()).err()?;
            Some(why.to_string())
        })
        .collect();
    let has: Vec<&str> = (Backing::ALL.into_iter())
        .filter(|backing| backing.check(backing.page_size().bytes()).is_ok())
        .map(Backing::name)
        .collect();
    Finding {
        name: "backings",
        state: if lacks.is_empty() {
            Grade::Good
        } else {
            Grade::Limited
        },
        found: has.join(", "),
        means: "--backing takes these".into(),
        advice: (!lacks.is_empty()).then(|| lacks.join("; ")),
    }
}

/// Pools of hugetlb pages.
pub(super) fn huge_pages() -> Finding {
    let mut pools = Vec::new();
    for entry in fs::read_dir("/sys/kernel/mm/hugepages")
        .into_iter()
        .flatten()
        .flatten()
    {
        let name = entry.file_name().to_string_lossy().into_owned();
        let kib = name
            .strip_prefix("hugepages-")
            .and_then(|n| n.strip_suffix("kB"))
            .and_then(|n| n.parse::<u64>().ok());
        let number = |file: &str| -> Option<u64> {
            fs::read_to_string(entry.path().join(file))
                .ok()?
                .trim()
                .parse()
                .ok()
        };
        if let (Some(kib), Some(all), Some(free)) =
            (kib, number("nr_hugepages"), number("free_hugepages"))
        {
            pools.push((kib, all, free));
        }
    }
    pools.sort_unstable();
    let list: Vec<String> = pools
        .iter()
        .map(|(kib, all, free)| format!("{}: {free} of {all} free", human(kib << 10)))
        .collect();
    let some = pools.iter().any(|pool| pool.1 > 0);
    Finding {
        name: "huge-pages",
        state: if some { Grade::Good } else { Grade::Limited },
        found: if list.is_empty() {
            "no pools of hugetlb pages".into()
        } else {
            list.join(", ")
        },
        means: "they back guest memory with --backing hugetlb-2m or hugetlb-1g".into(),
        advice: None,
    }
}

/// Transparent huge pages, mainly of shared memory.
pub(super) fn transparent_huge_pages() -> Finding {
    let chosen = |name: &str| -> Option<String> {
        let text =
            fs::read_to_string(format!("/sys/kernel/mm/transparent_hugepage/{name}")).ok()?;
        let start = text.find('[')? + 1;
        Some(text[start..start + text[start..].find(']')?].to_owned())
    };
    let shmem = chosen("shmem_enabled");
    let split = matches!(shmem.as_deref(), Some("always" | "force" | "within_size"));
    let show = |value: Option<String>| value.unwrap_or_else(|| "unknown".into());
    Finding {
        name: "transparent-huge-pages",
        state: if split { Grade::Limited } else { Grade::Good },
        found: format!(
            "anonymous: {}, shared memory: {}",
            show(chosen("enabled")),
            show(shmem)
        ),
        means: if split {
            "guest memory may be made of huge pages, which the kernel splits where single pages are delivered".into()
        } else {
            "guest memory is made of 4 KiB pages, as post-copy delivers them".into()
        },
        advice: split.then(|| {
            "for even stalls: echo never > /sys/kernel/mm/transparent_hugepage/shmem_enabled".into()
        }),
    }
}

/// Cores that this process may use.
pub(super) fn cores() -> Finding {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let few = cores < 4;
    Finding {
        name: "cores",
        state: if few { Grade::Limited } else { Grade::Good },
        found: cores.to_string(),
        means: if few {
            "vCPUs, the source and the destination of a demo share them: stalls are longer than on two hosts".into()
        } else {
            "enough for a demo's two sides".into()
        },
        advice: few.then(|| "measure on a larger host, or between two".into()),
    }
}

/// Memory of the host.
pub(super) fn memory() -> Finding {
    let show = |bytes: Option<u64>| bytes.map_or("unknown".into(), human);
    let available = memory::available_bytes();
    let demo = 2 * (512u64 << 20);
    let enough = available.is_none_or(|bytes| bytes >= demo);
    Finding {
        name: "memory",
        state: if enough { Grade::Good } else { Grade::Limited },
        found: format!(
            "{} available of {}",
            show(available),
            show(memory::host_bytes())
        ),
        means: format!(
            "a demo needs its --memory twice: up to {} each",
            available.map_or("unknown".into(), |bytes| human(bytes / 2))
        ),
        advice: (!enough).then(|| "choose a smaller --memory than the default".into()),
    }
}
