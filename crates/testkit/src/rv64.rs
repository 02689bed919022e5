//! RV64 machine code for small guests, and a kernel made of it.

/// `x0`, which is 0.
pub const ZERO: u32 = 0;
/// `a0`: the first operand and the error of a call.
pub const A0: u32 = 10;
/// `a1`: the second operand and the value of a call.
pub const A1: u32 = 11;
/// `a2`.
pub const A2: u32 = 12;
/// `a6`: the function of a call.
pub const A6: u32 = 16;
/// `a7`: the extension of a call.
pub const A7: u32 = 17;
/// `ecall`.
pub const ECALL: u32 = 0x73;
/// `wfi`.
pub const WFI: u32 = 0x1050_0073;

/// SBI's extension for interrupts between harts.
pub const IPI: u32 = 0x73_5049;
/// SBI's extension for hart states.
pub const HSM: u32 = 0x48_534d;
/// SBI's extension for the end of a guest.
pub const SRST: u32 = 0x5352_5354;
/// SBI's debug console.
pub const DBCN: u32 = 0x4442_434e;

/// `lui` and `addiw`: the register gets `value`, which is below 2^31.
#[must_use]
pub const fn li(rd: u32, value: u32) -> [u32; 2] {
    let low = value & 0xfff;
    let high = value.wrapping_add(0x800) & 0xffff_f000;
    [high | rd << 7 | 0x37, low << 20 | rd << 15 | rd << 7 | 0x1b]
}

/// `addi rd, rs, value`, with a value from -2048 to 2047.
#[must_use]
pub const fn addi(rd: u32, rs: u32, value: i32) -> u32 {
    (value as u32) << 20 | rs << 15 | rd << 7 | 0x13
}

/// `add rd, a, b`.
#[must_use]
pub const fn add(rd: u32, a: u32, b: u32) -> u32 {
    b << 20 | a << 15 | rd << 7 | 0x33
}

/// `and rd, a, b`.
#[must_use]
pub const fn and(rd: u32, a: u32, b: u32) -> u32 {
    add(rd, a, b) | 7 << 12
}

/// `slli rd, rs, bits`.
#[must_use]
pub const fn slli(rd: u32, rs: u32, bits: u32) -> u32 {
    bits << 20 | rs << 15 | 1 << 12 | rd << 7 | 0x13
}

/// `csrs csr, rs`.
#[must_use]
pub const fn csrs(csr: u32, rs: u32) -> u32 {
    csr << 20 | rs << 15 | 2 << 12 | 0x73
}

/// `sd rs, 0(base)`.
#[must_use]
pub const fn sd(rs: u32, base: u32) -> u32 {
    rs << 20 | base << 15 | 3 << 12 | 0x23
}

/// `ld rd, 0(base)`.
#[must_use]
pub const fn ld(rd: u32, base: u32) -> u32 {
    base << 15 | 3 << 12 | rd << 7 | 0x03
}

/// `beq a, b`, over a distance of less than 4 KiB.
#[must_use]
pub const fn beq(a: u32, b: u32, distance: i32) -> u32 {
    branch(0, a, b, distance)
}

/// `bne a, b`, as [`beq`].
#[must_use]
pub const fn bne(a: u32, b: u32, distance: i32) -> u32 {
    branch(1, a, b, distance)
}

/// `bltu a, b`, as [`beq`].
#[must_use]
pub const fn bltu(a: u32, b: u32, distance: i32) -> u32 {
    branch(6, a, b, distance)
}

const fn branch(kind: u32, a: u32, b: u32, distance: i32) -> u32 {
    let to = distance as u32;
    (to >> 12 & 1) << 31
        | (to >> 5 & 0x3f) << 25
        | b << 20
        | a << 15
        | kind << 12
        | (to >> 1 & 0xf) << 8
        | (to >> 11 & 1) << 7
        | 0x63
}

/// An SBI call with up to six operands.
#[must_use]
pub fn call(extension: u32, function: u32, operands: &[u32]) -> Vec<u32> {
    let mut code = Vec::new();
    for (register, operand) in (A0..).zip(operands) {
        code.extend(li(register, *operand));
    }
    code.extend(li(A6, function));
    code.extend(li(A7, extension));
    code.push(ECALL);
    code
}

/// A riscv64 kernel `Image` of this code. It is placed 2 MiB behind the start of RAM, and its code
/// [`CODE`] bytes behind that.
#[must_use]
pub fn image(code: &[u32]) -> Vec<u8> {
    let mut bytes = vec![0; CODE];
    // jal x0, CODE
    bytes[..4].copy_from_slice(&((CODE as u32 >> 1) << 21 | 0x6f).to_le_bytes());
    bytes.extend(code.iter().flat_map(|word| word.to_le_bytes()));
    bytes[8..16].copy_from_slice(&(2_u64 << 20).to_le_bytes());
    let length = bytes.len() as u64;
    bytes[16..24].copy_from_slice(&length.to_le_bytes());
    bytes[48..56].copy_from_slice(b"RISCV\0\0\0");
    bytes[56..60].copy_from_slice(b"RSC\x05");
    bytes
}

/// The bytes of an [`image`] before its code.
pub const CODE: usize = 64;
