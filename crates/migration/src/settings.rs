//! The settings that an operator chooses for a migration, and may change while it is under way.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

/// The end of pre-copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Switch {
    /// When little is left, or when another pass would not help. Never while the expected blackout
    /// is above [`Settings::max_blackout`].
    Auto,
    /// After this number of passes at most, and earlier when a pass leaves few dirty pages
    /// ([`Switch::FEW_PAGES`]). With 0 the VM switches over as soon as it can, also in the middle
    /// of a pass. One pass more follows if the destination still allocates memory, for longer than
    /// the last pass took.
    AfterPasses(u32),
    /// When the operator chooses another value.
    Manual,
}

impl Switch {
    /// Switch over as soon as possible.
    pub const NOW: Self = Self::AfterPasses(0);
    /// The most passes. Each may cost as much as the first, and after a few there is no gain.
    pub const MAX_PASSES: u32 = 64;
    /// A pass that leaves this number of dirty pages, or fewer, is the last one. To send so few
    /// takes less time than the round trip of another pass.
    pub const FEW_PAGES: u64 = 64;
}

impl fmt::Display for Switch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::Auto => f.write_str("auto"),
            Self::NOW => f.write_str("now"),
            Self::AfterPasses(passes) => write!(f, "after-passes {passes}"),
            Self::Manual => f.write_str("manual"),
        }
    }
}

impl FromStr for Switch {
    type Err = SettingsError;

    fn from_str(text: &str) -> Result<Self, SettingsError> {
        match text {
            "auto" => return Ok(Self::Auto),
            "manual" => return Ok(Self::Manual),
            "now" => return Ok(Self::NOW),
            _ => {}
        }
        let passes = text.strip_prefix("after-passes ");
        match passes.and_then(|passes| passes.parse().ok()) {
            Some(passes) if passes <= Self::MAX_PASSES => Ok(Self::AfterPasses(passes)),
            _ => Err(SettingsError::Switch(text.into())),
        }
    }
}

/// The settings that an operator chooses for a migration, and may change while it is under way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Settings {
    /// The end of pre-copy.
    pub switch: Switch,
    /// The longest blackout that [`Switch::Auto`] accepts, by the forecast at the end of each pass.
    /// Above 0. `None`: any.
    pub max_blackout: Option<Duration>,
    /// The most bytes of pages a second, [`Settings::MIN_RATE`] to [`Settings::MAX_RATE`]. Pages
    /// that vCPUs wait for count, but they never wait. `None`: what the link carries.
    pub max_bandwidth: Option<u64>,
    /// The most bytes a second of the background push in post-copy, in the same range. At most
    /// [`Settings::max_bandwidth`].
    pub max_postcopy_bandwidth: Option<u64>,
}

impl Default for Settings {
    fn default() -> Self {
        Switch::AfterPasses(1).into()
    }
}

impl From<Switch> for Settings {
    fn from(switch: Switch) -> Self {
        Self {
            switch,
            max_blackout: None,
            max_bandwidth: None,
            max_postcopy_bandwidth: None,
        }
    }
}

/// A change of [`Settings`]. `None` leaves a setting as it is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Change {
    /// Another end of pre-copy. Any but [`Switch::Auto`] ends a limit of the blackout too.
    pub switch: Option<Switch>,
    /// Another limit of the blackout, or none.
    pub max_blackout: Option<Option<Duration>>,
    /// Another limit for all pages, or none.
    pub max_bandwidth: Option<Option<u64>>,
    /// Another limit for the background push, or none.
    pub max_postcopy_bandwidth: Option<Option<u64>>,
}

/// Settings that cannot be, or cannot change. Each message says what would be right.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SettingsError {
    /// There is no migration.
    #[error("no migration is under way: there is nothing to set")]
    NoMigration,
    /// Pre-copy is over.
    #[error("too late: the VM has switched over, and only the limits of rates can change")]
    TooLate,
    /// The text names no end of pre-copy.
    #[error(
        "unknown end of pre-copy '{0}': expected auto, manual, now, or after-passes N (N: 0 to {max})",
        max = Switch::MAX_PASSES
    )]
    Switch(String),
    /// More passes than [`Switch::MAX_PASSES`].
    #[error("{0} passes are too many: choose at most {max}", max = Switch::MAX_PASSES)]
    Passes(u32),
    /// A rate so low that nothing would move.
    #[error("{0} bytes/s are too few to move a VM: choose at least {min} (64 KiB/s)", min = Settings::MIN_RATE)]
    LowRate(u64),
    /// A rate that no link has.
    #[error("no link carries {0} bytes/s: choose at most {max} (1 TiB/s), or no limit", max = Settings::MAX_RATE)]
    HighRate(u64),
    /// The limit of the push is above that of all pages.
    #[error(
        "the limit for post-copy, {postcopy} bytes/s, is above that for all pages, {all} bytes/s"
    )]
    PostcopyAbove {
        /// The limit of the push.
        postcopy: u64,
        /// The limit of all pages.
        all: u64,
    },
    /// No VM moves without a blackout.
    #[error("no VM moves without a blackout: choose 1 ms at least")]
    NoBlackout,
    /// The limit of the blackout would have no effect.
    #[error("a limit for the blackout counts with `auto` only, not with `{0}`")]
    BlackoutWithoutAuto(Switch),
}

impl Settings {
    /// The least limit of a rate, in bytes a second: 64 KiB/s.
    pub const MIN_RATE: u64 = 64 << 10;
    /// The highest limit of a rate, in bytes a second: 1 TiB/s.
    pub const MAX_RATE: u64 = 1 << 40;

    /// Returns these settings with `change`.
    ///
    /// # Errors
    /// [`SettingsError`] if they cannot be.
    pub fn with(mut self, change: &Change) -> Result<Self, SettingsError> {
        if let Some(switch) = change.switch {
            self.switch = switch;
            if switch != Switch::Auto {
                self.max_blackout = None;
            }
        }
        self.max_blackout = change.max_blackout.unwrap_or(self.max_blackout);
        self.max_bandwidth = change.max_bandwidth.unwrap_or(self.max_bandwidth);
        let postcopy = change.max_postcopy_bandwidth;
        self.max_postcopy_bandwidth = postcopy.unwrap_or(self.max_postcopy_bandwidth);
        self.check().map(|()| self)
    }

    /// Checks the ranges of all settings.
    ///
    /// # Errors
    /// [`SettingsError`] for the first that is wrong.
    pub fn check(&self) -> Result<(), SettingsError> {
        let rates = [self.max_bandwidth, self.max_postcopy_bandwidth];
        for rate in rates.into_iter().flatten() {
            Self::check_rate(rate)?;
        }
        if let [Some(all), Some(postcopy)] = rates
            && postcopy > all
        {
            return Err(SettingsError::PostcopyAbove { postcopy, all });
        }
        match (self.switch, self.max_blackout) {
            (Switch::AfterPasses(passes), _) if passes > Switch::MAX_PASSES => {
                Err(SettingsError::Passes(passes))
            }
            (_, Some(Duration::ZERO)) => Err(SettingsError::NoBlackout),
            (switch, Some(_)) if switch != Switch::Auto => {
                Err(SettingsError::BlackoutWithoutAuto(switch))
            }
            _ => Ok(()),
        }
    }

    /// Checks a limit of a rate.
    ///
    /// # Errors
    /// [`SettingsError::LowRate`] or [`SettingsError::HighRate`].
    pub fn check_rate(rate: u64) -> Result<(), SettingsError> {
        match rate {
            ..Self::MIN_RATE => Err(SettingsError::LowRate(rate)),
            Self::MIN_RATE..=Self::MAX_RATE => Ok(()),
            _ => Err(SettingsError::HighRate(rate)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ends_of_precopy_are_read_as_they_are_written() {
        for switch in [
            Switch::Auto,
            Switch::Manual,
            Switch::NOW,
            Switch::AfterPasses(Switch::MAX_PASSES),
        ] {
            assert_eq!(switch.to_string().parse(), Ok(switch));
        }
        assert_eq!("after-passes 0".parse(), Ok(Switch::NOW));
        for bad in [
            "",
            "Auto",
            "after-passes",
            "after-passes 65",
            "after-passes -1",
            "3",
        ] {
            let error = bad.parse::<Switch>().expect_err(bad);
            assert!(error.to_string().contains("expected auto"), "{error}");
        }
    }

    #[test]
    fn settings_that_cannot_be_have_a_sentence_each() {
        let auto = Settings::from(Switch::Auto);
        let rates = |all, postcopy| Change {
            max_bandwidth: all,
            max_postcopy_bandwidth: postcopy,
            ..Change::default()
        };
        let blackout = |ms| Change {
            max_blackout: Some(Some(Duration::from_millis(ms))),
            ..Change::default()
        };
        for (change, part) in [
            (rates(Some(Some(0)), None), "at least 65536"),
            (rates(None, Some(Some(65_535))), "at least 65536"),
            (rates(Some(Some(u64::MAX)), None), "or no limit"),
            (rates(Some(Some(1 << 20)), Some(Some(2 << 20))), "is above"),
            (blackout(0), "1 ms at least"),
        ] {
            let error = auto.with(&change).expect_err(part).to_string();
            assert!(error.contains(part), "{error}");
        }
        let passes = Settings::from(Switch::AfterPasses(65));
        assert_eq!(passes.check(), Err(SettingsError::Passes(65)));
        let once = Settings::default();
        let error = once.with(&blackout(3)).expect_err("no effect");
        assert!(error.to_string().contains("`after-passes 1`"), "{error}");
    }

    #[test]
    fn a_change_leaves_the_rest_and_checks_the_whole() {
        let auto = Settings {
            max_blackout: Some(Duration::from_millis(3)),
            max_postcopy_bandwidth: Some(4 << 20),
            ..Switch::Auto.into()
        };
        let less = Change {
            max_bandwidth: Some(Some(1 << 20)),
            ..Change::default()
        };
        let error = auto.with(&less).expect_err("post-copy has more");
        assert!(matches!(error, SettingsError::PostcopyAbove { .. }));
        let both = Change {
            max_postcopy_bandwidth: Some(None),
            ..less
        };
        let limited = auto.with(&both).unwrap();
        assert_eq!(limited.max_blackout, auto.max_blackout);
        assert_eq!(limited.max_bandwidth, Some(1 << 20));
        let now = Change {
            switch: Some(Switch::NOW),
            ..Change::default()
        };
        assert_eq!(limited.with(&now).unwrap().max_blackout, None);
    }
}
