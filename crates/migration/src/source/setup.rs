//! Set-up at the source: the offer, and the destination's progress until the switch-over.

use super::{SourceConfig, Supervisor};
use crate::control::ControlLink;
use crate::devices;
use crate::error::MigrationError;
use crate::protocol_error::ProtocolError;
use crate::session::source::Event;
use crate::session::{ChannelId, Generation};
use crate::vm::RunningVm;
use crate::wire::{self, Frame, Role, Setup, SetupProgress, Side};
use pageferry_transport::channel::Connection;
use std::sync::Arc;

/// The channels of a session, in their first incarnations.
pub(super) fn channel_ids(config: &SourceConfig) -> impl Iterator<Item = ChannelId> {
    let all = |role, count| {
        (0..count).map(move |index| ChannelId {
            role,
            index,
            incarnation: 1,
        })
    };
    all(Role::Bulk, config.bulk_channels).chain(all(Role::Urgent, config.urgent_channels))
}

/// Describes the VM that the destination must build.
pub(crate) fn offer(
    vm: &RunningVm<'_>,
    guest: &[u8],
    [bulk_channels, urgent_channels]: [u16; 2],
) -> Result<Setup, MigrationError> {
    let layout = vm.machine.ram().layout();
    let regions = layout.regions().iter();
    let setup = Setup {
        kind: crate::vm::kind_of(&**vm.machine)?,
        vcpus: u32::try_from(vm.vcpus.count())
            .map_err(|_| MigrationError::Internal("too many vCPUs".into()))?,
        memory_bytes: layout.bytes(),
        regions: regions
            .map(|r| wire::Region {
                slot: r.slot,
                gfn: r.gfn,
                pages: r.pages,
            })
            .collect(),
        devices: devices::announce(vm.devices)?,
        description: guest.to_vec(),
        bulk_channels,
        urgent_channels,
    };
    setup.check()?;
    Ok(setup)
}

impl Supervisor<'_, '_, '_> {
    /// A control channel is open: the first one offers the VM.
    pub(super) fn opened(&mut self, generation: Generation, connection: Connection) {
        if generation != self.state.generation || self.link.control.is_some() {
            return connection.shutdown();
        }
        let pages = self.guest.vm.machine.ram().pages();
        let mut control =
            ControlLink::new(Arc::new(connection), generation, Side::Destination, pages);
        let offered = match generation {
            1 => {
                self.control_works();
                control.send(&Frame::Setup(self.offer.clone()))
            }
            _ => Ok(()),
        };
        self.record.report.protected = control.protection();
        self.link.control = Some(control);
        self.events.push_back(Event::Opened(generation));
        if let Err(error) = offered {
            self.lose_control(error);
        }
    }

    /// The destination answers on the control channel. One that only accepts connections does not
    /// end the wait for it.
    pub(super) fn control_works(&mut self) {
        self.link.lost_since = None;
        self.link.channels.control_is_open();
    }

    pub(super) fn note_setup_progress(
        &mut self,
        progress: SetupProgress,
    ) -> Result<(), MigrationError> {
        if self.guest.precopy.destination_ready {
            return Err(ProtocolError::ReadyTwice.into());
        }
        self.guest.precopy.destination_ready = progress.ready;
        let total = self.guest.vm.machine.ram().pages();
        self.record.observer.allocated(progress.pages, total);
        if progress.ready {
            self.decide()?;
        }
        Ok(())
    }
}
