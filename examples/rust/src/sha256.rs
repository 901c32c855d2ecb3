//! SHA-256 (FIPS 180-4), which names pages (SPEC 11.3) and guards saved caches (SPEC 11.4).
//!
//! Its constants are the first 32 bits of the fractions of roots of the first primes.

use std::sync::OnceLock;

fn primes() -> impl Iterator<Item = u128> {
    (2..).filter(|n| (2..*n).all(|divisor| n % divisor != 0))
}

/// The first 32 bits of the fraction of the square or cube root of a prime below 400.
fn fraction_of_root(prime: u128, degree: u32) -> u32 {
    let (mut low, mut high) = (0u128, 1 << 37);
    while high - low > 1 {
        let middle = (low + high) / 2;
        if middle.pow(degree) <= prime << (32 * degree) {
            low = middle;
        } else {
            high = middle;
        }
    }
    low as u32
}

fn round_constants() -> &'static [u32; 64] {
    static CONSTANTS: OnceLock<[u32; 64]> = OnceLock::new();
    CONSTANTS.get_or_init(|| {
        let mut constants = [0; 64];
        for (constant, prime) in constants.iter_mut().zip(primes()) {
            *constant = fraction_of_root(prime, 3);
        }
        constants
    })
}

fn schedule(block: &[u8]) -> [u32; 64] {
    let mut words = [0u32; 64];
    for (word, bytes) in words.iter_mut().zip(block.chunks_exact(4)) {
        *word = u32::from_be_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
    }
    for i in 16..64 {
        let (early, late) = (words[i - 15], words[i - 2]);
        let early = early.rotate_right(7) ^ early.rotate_right(18) ^ (early >> 3);
        let late = late.rotate_right(17) ^ late.rotate_right(19) ^ (late >> 10);
        words[i] = words[i - 16].wrapping_add(early).wrapping_add(words[i - 7]).wrapping_add(late);
    }
    words
}

fn compress(state: &mut [u32; 8], block: &[u8]) {
    let [mut a, mut b, mut c, mut d, mut e, mut f, mut g, mut h] = *state;
    for (word, constant) in schedule(block).iter().zip(round_constants()) {
        let sum = e.rotate_right(6) ^ e.rotate_right(11) ^ e.rotate_right(25);
        let choice = (e & f) ^ (!e & g);
        let first =
            h.wrapping_add(sum).wrapping_add(choice).wrapping_add(*constant).wrapping_add(*word);
        let sum = a.rotate_right(2) ^ a.rotate_right(13) ^ a.rotate_right(22);
        let second = sum.wrapping_add((a & b) ^ (a & c) ^ (b & c));
        (h, g, f, e) = (g, f, e, d.wrapping_add(first));
        (d, c, b, a) = (c, b, a, first.wrapping_add(second));
    }
    for (word, more) in state.iter_mut().zip([a, b, c, d, e, f, g, h]) {
        *word = word.wrapping_add(more);
    }
}

/// The digest of the data.
pub fn sha256(data: &[u8]) -> [u8; 32] {
    let mut padded = data.to_vec();
    padded.push(0x80);
    padded.resize((padded.len() + 8).next_multiple_of(64) - 8, 0);
    padded.extend_from_slice(&(data.len() as u64 * 8).to_be_bytes());
    let mut state = [0; 8];
    for (word, prime) in state.iter_mut().zip(primes()) {
        *word = fraction_of_root(prime, 2);
    }
    padded.chunks_exact(64).for_each(|block| compress(&mut state, block));
    let mut digest = [0; 32];
    for (bytes, word) in digest.chunks_exact_mut(4).zip(state) {
        bytes.copy_from_slice(&word.to_be_bytes());
    }
    digest
}
