//! The copied array against a plain model, and both schemes against each other.
