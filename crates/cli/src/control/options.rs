//! The options of a migration, as a request carries them.

use super::change::ChangeOptions;
use pageferry_migration::{
    CpuList, CpuListError, Limits, PlainPolicy, Settings, SourceConfig, Switch, Tls, TlsFiles,
};
use serde::{Deserialize, Serialize};
use std::path::PathBuf;
use std::time::Duration;

/// The files for TLS. The VM's process reads them, so their paths are absolute.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct TlsOptions {
    /// This side's certificate chain.
    pub(crate) cert: PathBuf,
    /// Its key.
    pub(crate) key: PathBuf,
    /// The authority that signed the peer's certificate.
    pub(crate) ca: PathBuf,
    /// The name in the peer's certificate.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) peer_name: Option<String>,
}

impl TlsOptions {
    /// The VM's process has its own current directory.
    fn check(&self) -> Result<(), String> {
        let paths = [&self.cert, &self.key, &self.ca];
        match paths.into_iter().find(|path| !path.is_absolute()) {
            None => Ok(()),
            Some(path) => Err(format!(
                "the path {} is not absolute: the VM's process reads it, from another directory",
                path.display()
            )),
        }
    }
}

impl From<&TlsOptions> for Tls {
    fn from(options: &TlsOptions) -> Self {
        TlsFiles {
            cert: options.cert.clone(),
            key: options.key.clone(),
            ca: options.ca.clone(),
            peer_name: options.peer_name.clone(),
        }
        .into()
    }
}

/// The options of a migration, beside its destination. Everything has a default.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct MigrateOptions {
    /// Bulk channels.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) channels: Option<u16>,
    /// Urgent channels.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) urgent_channels: Option<u16>,
    /// See [`SourceConfig::queue`], in microseconds.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) queue_us: Option<u64>,
    /// See [`SourceConfig::tracking`]: `log` or `hash`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) track: Option<String>,
    /// See [`Limits::dead_after`], in milliseconds.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) dead_after_ms: Option<u64>,
    /// See [`Limits::give_up_after`], in milliseconds.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) give_up_after_ms: Option<u64>,
    /// TLS.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) tls: Option<TlsOptions>,
    /// Whether plain TCP may leave this host.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub(crate) insecure: bool,
    /// The CPUs of the migration's threads, such as `0-3,8`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) cpus: Option<String>,
    /// The end of pre-copy, and the limits of rates.
    #[serde(skip_serializing_if = "is_default")]
    pub(crate) settings: ChangeOptions,
}

fn is_default(options: &ChangeOptions) -> bool {
    *options == ChangeOptions::default()
}

/// The limits with the user's choices.
pub(crate) fn limits(dead_after: Option<Duration>, give_up_after: Option<Duration>) -> Limits {
    let defaults = Limits::default();
    Limits {
        dead_after: dead_after.unwrap_or(defaults.dead_after),
        give_up_after,
        ..defaults
    }
}

/// Where plain TCP may lead.
pub(crate) fn plain(insecure: bool) -> PlainPolicy {
    if insecure {
        PlainPolicy::Anywhere
    } else {
        PlainPolicy::LoopbackOnly
    }
}

/// Checks a time for which the push may keep the link busy.
pub(crate) fn check_queue(time: Duration) -> Result<Duration, String> {
    let (least, most) = (SourceConfig::MIN_QUEUE, SourceConfig::MAX_QUEUE);
    if (least..=most).contains(&time) {
        return Ok(time);
    }
    let (us, least, most) = (time.as_micros(), least.as_micros(), most.as_secs());
    Err(format!(
        "the push cannot keep a queue of {us}us: choose {least}us to {most}s"
    ))
}

impl MigrateOptions {
    /// The configuration of the source.
    ///
    /// # Errors
    /// The option that is out of range, and its range.
    pub(crate) fn config(&self, precopy_passes: Option<u32>) -> Result<SourceConfig, String> {
        let defaults = SourceConfig::default();
        let channels = |name: &str, given: Option<u16>, default: u16| match given {
            None => Ok(default),
            Some(count) if (1..=SourceConfig::MAX_CHANNELS).contains(&count) => Ok(count),
            Some(count) => Err(format!(
                "{count} {name} channels: choose 1 to {}",
                SourceConfig::MAX_CHANNELS
            )),
        };
        if self
            .dead_after_ms
            .is_some_and(|ms| Duration::from_millis(ms) < Limits::MIN_DEAD_AFTER)
        {
            return Err(format!(
                "a channel cannot count as lost that early: choose {} ms at least",
                Limits::MIN_DEAD_AFTER.as_millis()
            ));
        }
        if self.tls.is_some() && self.insecure {
            return Err("give either `tls` or `insecure`: with TLS no channel is plain".into());
        }
        if let Some(tls) = &self.tls {
            tls.check()?;
        }
        let cpus: Option<CpuList> = match self.cpus.as_deref().map(str::parse) {
            None => None,
            Some(list) => Some(list.map_err(|e: CpuListError| e.to_string())?),
        };
        if let Some(list) = &cpus {
            list.check().map_err(|e| e.to_string())?;
        }
        Ok(SourceConfig {
            settings: self.settings(precopy_passes)?,
            bulk_channels: channels("bulk", self.channels, defaults.bulk_channels)?,
            urgent_channels: channels("urgent", self.urgent_channels, defaults.urgent_channels)?,
            queue: match self.queue_us {
                Some(us) => check_queue(Duration::from_micros(us))?,
                None => defaults.queue,
            },
            tracking: match self.track.as_deref() {
                None => defaults.tracking,
                Some(text) => text.parse()?,
            },
            limits: limits(
                self.dead_after_ms.map(Duration::from_millis),
                self.give_up_after_ms.map(Duration::from_millis),
            ),
            tls: self.tls.as_ref().map(Into::into),
            plain: plain(self.insecure),
            cpus,
            ..defaults
        })
    }

    /// The settings at the start. A limit of the blackout alone asks for `auto`.
    ///
    /// # Errors
    /// One sentence that names the fault.
    pub(crate) fn settings(&self, precopy_passes: Option<u32>) -> Result<Settings, String> {
        let mut change = self.settings.change()?;
        let limited = matches!(change.max_blackout, Some(Some(_)));
        match precopy_passes {
            Some(_) if change.switch.is_some() || limited => {
                return Err(
                    "a number of passes is an end of pre-copy: give no other, and no limit for the blackout"
                        .into(),
                );
            }
            Some(passes) => change.switch = Some(Switch::AfterPasses(passes)),
            None if limited => {
                change.switch.get_or_insert(Switch::Auto);
            }
            None => {}
        }
        let settings = Settings::default().with(&change);
        settings.map_err(|e| e.to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_out_of_range_are_told() {
        let good = MigrateOptions::default();
        assert_eq!(good.config(Some(1)).unwrap().bulk_channels, 1);
        let tls = TlsOptions {
            cert: "/cert".into(),
            key: "key".into(),
            ca: "/ca".into(),
            peer_name: None,
        };
        let absolute = TlsOptions {
            key: "/key".into(),
            ..tls.clone()
        };
        let change = |change: fn(&mut MigrateOptions)| {
            let mut options = good.clone();
            change(&mut options);
            options
        };
        let (mut relative, mut both) = (good.clone(), good.clone());
        relative.tls = Some(tls);
        both.tls = Some(absolute.clone());
        assert!(both.config(None).is_ok());
        both.insecure = true;
        for (bad, part) in [
            (change(|o| o.channels = Some(0)), "1 to 16"),
            (change(|o| o.urgent_channels = Some(17)), "1 to 16"),
            (change(|o| o.dead_after_ms = Some(99)), "100 ms at least"),
            (
                change(|o| o.queue_us = Some(49)),
                "a queue of 49us: choose 50us to 1s",
            ),
            (
                change(|o| o.track = Some("dirty".into())),
                "'dirty': expected log or hash",
            ),
            (change(|o| o.cpus = Some("3-1".into())), "runs backwards"),
            (change(|o| o.cpus = Some("1023".into())), "no CPU 1023"),
            (relative, "key is not absolute"),
            (both, "either `tls` or `insecure`"),
        ] {
            let why = bad.config(Some(1)).unwrap_err();
            assert!(why.contains(part), "{why}");
        }
    }

    #[test]
    fn one_end_of_precopy_is_enough() {
        let options = |switch: Option<&str>, max_blackout_ms| MigrateOptions {
            settings: ChangeOptions {
                switch: switch.map(Into::into),
                max_blackout_ms,
                ..ChangeOptions::default()
            },
            ..MigrateOptions::default()
        };
        let switch = |options: &MigrateOptions, passes| {
            let config = options.config(passes)?;
            Ok::<_, String>(config.settings.switch)
        };
        let none = options(None, None);
        assert_eq!(switch(&none, None), Ok(Switch::AfterPasses(1)));
        assert_eq!(switch(&none, Some(0)), Ok(Switch::NOW));
        assert_eq!(
            switch(&options(Some("manual"), None), None),
            Ok(Switch::Manual)
        );
        let limited = options(None, Some(Some(50)));
        assert_eq!(switch(&limited, None), Ok(Switch::Auto));
        for (bad, passes, part) in [
            (&limited, Some(2), "no other"),
            (&options(Some("auto"), None), Some(2), "no other"),
            (
                &options(Some("manual"), Some(Some(50))),
                None,
                "`auto` only",
            ),
            (&options(Some("later"), None), None, "expected auto"),
            (&none, Some(65), "at most 64"),
        ] {
            let why = switch(bad, passes).expect_err(part);
            assert!(why.contains(part), "{why}");
        }
    }
}
