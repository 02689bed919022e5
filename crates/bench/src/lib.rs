//! How fast is it, beside its floor and its peers, in one run?
