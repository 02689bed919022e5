//! Arithmetic that the ISA defines differently from Rust's operators.
//!
//! Division never traps (M extension, "Division Operations", table of results):
//! - Division by zero gives a quotient of all ones. The remainder is the dividend.
//! - The only overflow is the most negative number divided by -1. The quotient is the dividend, and
//!   the remainder is 0.

/// MULH: the upper half of the signed product.
#[inline(always)]
pub(super) const fn mulh(a: u64, b: u64) -> u64 {
    ((a as i64 as i128 * b as i64 as i128) >> 64) as u64
}

/// MULHSU: the upper half of the product of a signed and an unsigned number.
#[inline(always)]
pub(super) const fn mulhsu(a: u64, b: u64) -> u64 {
    ((a as i64 as i128 * b as i128) >> 64) as u64
}

/// MULHU: the upper half of the unsigned product.
#[inline(always)]
pub(super) const fn mulhu(a: u64, b: u64) -> u64 {
    ((a as u128 * b as u128) >> 64) as u64
}

macro_rules! division {
    ($div:ident, $divu:ident, $rem:ident, $remu:ident, $signed:ty, $unsigned:ty) => {
        /// Signed quotient, rounded towards zero and sign-extended.
        #[inline(always)]
        pub(super) const fn $div(a: u64, b: u64) -> u64 {
            let (a, b) = (a as $signed, b as $signed);
            if b == 0 {
                u64::MAX
            } else {
                a.wrapping_div(b) as i64 as u64
            }
        }

        /// Unsigned quotient, sign-extended from the operation's width.
        #[inline(always)]
        pub(super) const fn $divu(a: u64, b: u64) -> u64 {
            match (a as $unsigned).checked_div(b as $unsigned) {
                Some(quotient) => quotient as $signed as i64 as u64,
                None => u64::MAX,
            }
        }

        /// Signed remainder with the dividend's sign, sign-extended.
        #[inline(always)]
        pub(super) const fn $rem(a: u64, b: u64) -> u64 {
            let (a, b) = (a as $signed, b as $signed);
            (if b == 0 { a } else { a.wrapping_rem(b) }) as i64 as u64
        }

        /// Unsigned remainder, sign-extended from the operation's width.
        #[inline(always)]
        pub(super) const fn $remu(a: u64, b: u64) -> u64 {
            let (a, b) = (a as $unsigned, b as $unsigned);
            (if b == 0 { a } else { a % b }) as $signed as i64 as u64
        }
    };
}

division!(div, divu, rem, remu, i64, u64);
division!(divw, divuw, remw, remuw, i32, u32);

/// A 32-bit result, sign-extended.
#[inline(always)]
pub(super) const fn word(value: u32) -> u64 {
    value as i32 as i64 as u64
}
