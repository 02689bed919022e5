//! Carries streams.
