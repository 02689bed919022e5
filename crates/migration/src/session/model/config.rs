//! The scope of one search, and the rules that hold in it.

/// A bulk or urgent channel of the model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Lane {
    Bulk,
    Urgent,
}

/// Where a search begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Start {
    /// The first control channel is open, and nothing else has happened.
    Setup,
    /// Pre-copy is about to end. All channels are open.
    Precopy,
}

/// The rules of the session. Each can be switched off, to show that it is needed.
#[derive(Clone, Copy, Debug)]
pub(super) struct Rules {
    /// Messages of older generations have no effect.
    pub generations: bool,
    /// The destination ends old readers before it names what is missing or in place.
    pub readers_first: bool,
    /// The destination runs the guest on `Go`, not as soon as it is ready.
    pub go: bool,
    /// The source answers requests from SwitchOver on, not from `Go` on.
    pub answers_before_go: bool,
    /// The source ends the channels that read guest memory before it resumes the guest.
    pub channels_first: bool,
    /// The source frees a page after its receipt, not when it is sent.
    pub receipts: bool,
    /// The source frees no page before it knows that the guest runs at the destination.
    pub free_when_running: bool,
    /// A destination that discards keeps that answer.
    pub kept_answer: bool,
    /// A source that cancels ends when the destination does not know the session.
    pub unknown_session: bool,
}

impl Rules {
    pub(super) const ALL: Self = Self {
        generations: true,
        readers_first: true,
        go: true,
        answers_before_go: true,
        channels_first: true,
        receipts: true,
        free_when_running: true,
        kept_answer: true,
        unknown_session: true,
    };
}

/// The bounds of one search.
#[derive(Clone, Copy, Debug)]
pub(super) struct Config {
    pub start: Start,
    /// The channels other than control.
    pub lanes: &'static [Lane],
    /// The number of missing pages.
    pub pages: usize,
    /// No control channel of this generation is cut.
    pub generations: u32,
    /// No channel of this incarnation is cut.
    pub incarnations: u32,
    /// Whether another VMM has the VM at the destination: it needs pages to load, and says later
    /// that it runs.
    pub foreign: bool,
    /// Whether machines fail and operators cancel or give up.
    pub failures: bool,
    /// The search stops with a failure at more states.
    pub most_states: usize,
    pub rules: Rules,
}

impl Config {
    /// A search that ends within seconds.
    pub(super) const SMALL: Self = Self {
        start: Start::Precopy,
        lanes: &[Lane::Bulk, Lane::Urgent],
        pages: 2,
        generations: 2,
        incarnations: 2,
        foreign: true,
        failures: true,
        most_states: 4_000_000,
        rules: Rules::ALL,
    };
}
