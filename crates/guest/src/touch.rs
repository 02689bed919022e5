//! The work of a toucher: the access, the order and the number of passes.

/// The access that a toucher makes to a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum TouchAccess {
    /// Load the page's first word, and add it to the sum in the control page.
    Read,
    /// Store the page's RAM page index plus 1 to its first word.
    Write,
}

/// The order in which a toucher visits its pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum TouchOrder {
    /// From the first to the last.
    Ascending,
    /// In the order of [`crate::Order`], a different one in each pass.
    Random,
}

/// The work of a toucher.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Touch {
    /// The access to each page.
    pub access: TouchAccess,
    /// The order of the visits.
    pub order: TouchOrder,
    /// The number of passes before [`crate::Event::Finished`]; 0 means no end.
    pub passes: u64,
}
