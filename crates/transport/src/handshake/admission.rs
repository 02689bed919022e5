//! The channels that a destination accepts: generations and incarnations.

use std::cmp::Ordering;
use std::collections::BTreeMap;

use crate::wire::{ChannelKey, Role, Status};

/// The channels accepted so far in one session.
///
/// No pair of generation and incarnation of a channel is accepted twice. So a connection that
/// lingers in the network never takes the place of a later one. Whether an accepted connection
/// still lives is not known here.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Admission {
    /// The generation of the last control channel, 0 before the first.
    generation: u32,
    bulk: u16,
    urgent: u16,
    /// The last incarnation of each channel in this generation.
    last: BTreeMap<(Role, u16), u32>,
}

impl Admission {
    /// Returns the state before the session is open.
    #[must_use]
    pub const fn new() -> Self {
        Self {
            generation: 0,
            bulk: 0,
            urgent: 0,
            last: BTreeMap::new(),
        }
    }

    /// The current generation, 0 before the first control channel.
    #[must_use]
    pub const fn generation(&self) -> u32 {
        self.generation
    }

    /// Sets the numbers of bulk and urgent channels, as the set-up announces them. Both are 0
    /// before.
    pub const fn announce(&mut self, bulk: u16, urgent: u16) {
        self.bulk = bulk;
        self.urgent = urgent;
    }

    /// Checks whether the channel would be accepted.
    ///
    /// # Errors
    /// `UnknownSession` if the session is not open and the channel does not open it.
    /// `ChannelTaken` for the same channel again. `OldGeneration` for a generation that is over,
    /// and for an incarnation below the last one. `FutureGeneration` for a bulk or urgent channel
    /// of a generation without a control channel. `BadRole` for a tunnel. `TooManyChannels` for an
    /// index that was not announced.
    pub fn check(&self, key: ChannelKey) -> Result<(), Status> {
        if self.generation == 0 && !key.opens_session() {
            return Err(Status::UnknownSession);
        }
        let announced = match key.role {
            Role::Control if key.generation > self.generation => return Ok(()),
            Role::Control if key.generation == self.generation => return Err(Status::ChannelTaken),
            Role::Control => return Err(Status::OldGeneration),
            Role::Bulk => self.bulk,
            Role::Urgent => self.urgent,
            Role::Tunnel | Role::Share => return Err(Status::BadRole),
        };
        if key.generation < self.generation {
            return Err(Status::OldGeneration);
        }
        if key.generation > self.generation {
            return Err(Status::FutureGeneration);
        }
        if key.index >= announced {
            return Err(Status::TooManyChannels);
        }
        let last = self.last.get(&(key.role, key.index)).copied();
        match key.incarnation.cmp(&last.unwrap_or(0)) {
            Ordering::Less => Err(Status::OldGeneration),
            Ordering::Equal => Err(Status::ChannelTaken),
            Ordering::Greater => Ok(()),
        }
    }

    /// Accepts the channel. A control channel begins its generation.
    ///
    /// # Errors
    /// Those of [`check`](Self::check). Nothing changes then.
    pub fn admit(&mut self, key: ChannelKey) -> Result<(), Status> {
        self.check(key)?;
        if key.role == Role::Control {
            self.generation = key.generation;
            self.last.clear();
        }
        self.last.insert((key.role, key.index), key.incarnation);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::HashSet;

    fn key(role: Role, index: u16, generation: u32, incarnation: u32) -> ChannelKey {
        ChannelKey {
            role,
            index,
            generation,
            incarnation,
        }
    }

    fn open() -> Admission {
        let mut admission = Admission::new();
        admission.admit(ChannelKey::control(1)).unwrap();
        admission.announce(2, 1);
        admission
    }

    #[test]
    fn a_session_opens_with_the_first_control_channel_only() {
        let mut admission = Admission::new();
        for early in [
            ChannelKey::control(2),
            key(Role::Bulk, 0, 1, 1),
            key(Role::Urgent, 0, 1, 1),
        ] {
            assert_eq!(admission.admit(early), Err(Status::UnknownSession));
        }
        assert_eq!(admission.admit(ChannelKey::control(1)), Ok(()));
        let again = admission.admit(ChannelKey::control(1));
        assert_eq!(again, Err(Status::ChannelTaken));
    }

    #[test]
    fn channels_are_announced_before_they_are_accepted() {
        let mut admission = Admission::new();
        admission.admit(ChannelKey::control(1)).unwrap();
        let bulk = key(Role::Bulk, 1, 1, 1);
        assert_eq!(admission.admit(bulk), Err(Status::TooManyChannels));
        admission.announce(2, 1);
        assert_eq!(admission.admit(bulk), Ok(()));
        for beyond in [key(Role::Bulk, 2, 1, 1), key(Role::Urgent, 1, 1, 1)] {
            assert_eq!(admission.admit(beyond), Err(Status::TooManyChannels));
        }
    }

    #[test]
    fn a_channel_is_dialled_again_with_a_higher_incarnation() {
        let mut admission = open();
        assert_eq!(admission.admit(key(Role::Bulk, 0, 1, 3)), Ok(()));
        for (old, why) in [
            (1, Status::OldGeneration),
            (2, Status::OldGeneration),
            (3, Status::ChannelTaken),
        ] {
            assert_eq!(admission.admit(key(Role::Bulk, 0, 1, old)), Err(why));
        }
        assert_eq!(admission.admit(key(Role::Bulk, 0, 1, 4)), Ok(()));
        assert_eq!(admission.admit(key(Role::Bulk, 1, 1, 1)), Ok(()));
    }

    #[test]
    fn a_new_generation_ends_the_old_one() {
        let mut admission = open();
        let early = admission.admit(key(Role::Urgent, 0, 4, 1));
        assert_eq!(early, Err(Status::FutureGeneration));
        assert_eq!(admission.admit(key(Role::Urgent, 0, 1, 7)), Ok(()));
        assert_eq!(admission.admit(ChannelKey::control(4)), Ok(()));
        for old in [ChannelKey::control(3), key(Role::Urgent, 0, 1, 8)] {
            assert_eq!(admission.admit(old), Err(Status::OldGeneration));
        }
        let again = admission.admit(ChannelKey::control(4));
        assert_eq!(again, Err(Status::ChannelTaken));
        // Incarnations count anew, and the announced numbers stay.
        assert_eq!(admission.admit(key(Role::Urgent, 0, 4, 1)), Ok(()));
        assert_eq!(admission.generation(), 4);
    }

    fn any_key() -> impl Strategy<Value = ChannelKey> {
        (0..3usize, 0..4u16, 1..6u32, 1..6u32).prop_map(|(role, index, generation, incarnation)| {
            let role = Role::ALL[role];
            let index = if role == Role::Control { 0 } else { index };
            key(role, index, generation, incarnation)
        })
    }

    proptest! {
        #[test]
        fn no_accepted_connection_repeats(keys in prop::collection::vec(any_key(), 0..200)) {
            let mut admission = Admission::new();
            let mut seen = HashSet::new();
            let mut generation = 0;
            for key in keys {
                let before = admission.clone();
                let checked = admission.check(key);
                let admitted = admission.admit(key);
                prop_assert_eq!(checked, admitted);
                if admitted.is_ok() {
                    prop_assert!(seen.insert(key), "{} twice", key);
                    prop_assert!(key.generation >= generation);
                    generation = key.generation;
                    if key.opens_session() {
                        admission.announce(3, 2);
                    }
                } else {
                    prop_assert_eq!(&before, &admission);
                }
                prop_assert_eq!(admission.generation(), generation);
            }
        }
    }
}
