//! The numbers that the guest's machine code and the model share.

/// Upper 48 bits of a data page's first word; the lower 16 are the owner.
pub(crate) const PAGE_MAGIC: u64 = 0x5046_4441_5441 << 16;

/// 2^64 divided by the golden ratio, odd: spreads small numbers over the word.
pub(crate) const GOLDEN: u64 = 0x9E37_79B9_7F4A_7C15;

/// Multiplier of the generator that fills pages: Knuth's for MMIX (The Art of Computer Programming,
/// volume 2, section 3.3.4).
pub(crate) const FILL_MULTIPLIER: u64 = 6_364_136_223_846_793_005;
/// Increment of that generator: odd, and an immediate of 31 bits, which x86-64 can add.
pub(crate) const FILL_INCREMENT: u64 = 1_013_904_223;

/// Start of the checksum. An odd number makes the checksum of a zero page differ from zero.
pub(crate) const HASH_START: u64 = 0xC2B2_AE3D_27D4_EB4F;
/// Multiplier of the checksum: odd, and an immediate of 31 bits, which x86-64 can multiply by.
pub(crate) const HASH_MULTIPLIER: u64 = 668_265_263;

/// Multiplier of the generator that orders visits: 1 modulo 4.
pub(crate) const ORDER_MULTIPLIER: u64 = 1_664_525;

/// Words per page.
pub(crate) const WORDS: usize = 512;
/// Word of a data page that holds the magic number and the owner.
pub(crate) const WORD_TAG: usize = 0;
/// Word that holds the RAM page index.
pub(crate) const WORD_INDEX: usize = 1;
/// Word that holds the sequence number.
pub(crate) const WORD_SEQUENCE: usize = 2;
/// First word of the payload, which is everything between the header and the checksum.
pub(crate) const WORD_PAYLOAD: usize = 3;
/// Word that holds the checksum: the last, so that it is written last.
pub(crate) const WORD_CHECKSUM: usize = 511;
/// Words per round of an unrolled loop.
pub(crate) const UNROLL: usize = 4;
const _: () = assert!((WORD_CHECKSUM - WORD_PAYLOAD).is_multiple_of(UNROLL));
const _: () = assert!(HASH_MULTIPLIER % 2 == 1 && HASH_MULTIPLIER < 1 << 31);
const _: () = assert!(FILL_INCREMENT % 2 == 1 && FILL_INCREMENT < 1 << 31);
const _: () = assert!(ORDER_MULTIPLIER % 4 == 1 && ORDER_MULTIPLIER < 1 << 31);

/// The first word of a page of `vcpu`.
pub(crate) const fn tag(vcpu: u32) -> u64 {
    PAGE_MAGIC | vcpu as u64
}
