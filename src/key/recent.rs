//! Hashes of texts that this thread has seen a moment ago: most requests come with a key that has come before, and BLAKE3
//! is dear.
//!
//! No text is kept. A text is known again by a fingerprint of 256 bits: twice the universal hash NH (Black, Halevi,
//! Krawczyk, Krovetz and Rogaway, "UMAC: Fast and Secure Message Authentication", 1999) of words of 64 bits, with random
//! numbers of this process, plus a random multiple of the length.
//!
//! Two different texts, whoever chooses them, have the same fingerprint with a probability of at most 2⁻¹²⁸, since nothing
//! tells the random numbers. Each half has its own, and in each it is at most 2⁻⁶⁴:
//!
//! - Texts of one length have as many words, and some of these differ: that is the theorem about NH.
//! - The sums of texts of two lengths differ by r · (l − l') and by terms without r, which is random and has 64 bits. The
//!   product modulo 2¹²⁸ is another one for each r, so that one r at most makes the sums equal.
//!
//! Who reads this memory can find out what a short text was; but the requests themselves lie there as well.

use std::cell::Cell;
use std::hash::{BuildHasher as _, RandomState};
use std::sync::LazyLock;

use super::{CREDENTIAL_MAX, Hash128};

/// Bytes of one step: two words.
const STEP: usize = 16;
/// Steps before the last one.
const STEPS: usize = CREDENTIAL_MAX / STEP - 1;
/// A text takes the place of an older one on which it falls.
const PLACES: usize = 256;

type Fingerprint = [u128; 2];

static FINGERPRINTS: LazyLock<Fingerprints> = LazyLock::new(Fingerprints::random);

thread_local! {
    // An empty place holds the fingerprint 0, which a text has with a probability of at most 2⁻¹²⁶.
    static RECENT: [Cell<(Fingerprint, Hash128)>; PLACES] = const { [const { Cell::new(([0; 2], [0; 16])) }; PLACES] };
}

/// The hash of a text: the one that is remembered, or what `hash` makes of it.
pub(super) fn recall(text: &[u8], hash: impl FnOnce(&[u8]) -> Hash128) -> Hash128 {
    if text.len() > CREDENTIAL_MAX {
        return hash(text);
    }
    let fingerprint = FINGERPRINTS.of(text);
    RECENT.with(|recent| {
        let place = &recent[(fingerprint[0] >> 64) as usize % PLACES];
        let (known, remembered) = place.get();
        if known == fingerprint {
            return remembered;
        }
        let hash = hash(text);
        place.set((fingerprint, hash));
        hash
    })
}

/// Random numbers for each half of a fingerprint.
struct Fingerprints {
    length: [u64; 2],
    last: [[u64; 2]; 2],
    steps: [[[u64; 2]; 2]; STEPS],
}

impl Fingerprints {
    fn random() -> Self {
        let random = RandomState::new();
        let mut drawn = 0u32;
        let mut number = || {
            drawn += 1;
            random.hash_one(drawn)
        };
        let mut step = || [[number(), number()], [number(), number()]];
        Self { last: step(), steps: std::array::from_fn(|_| step()), length: [number(), number()] }
    }

    /// Of a text of at most [`CREDENTIAL_MAX`] bytes.
    #[inline]
    fn of(&self, text: &[u8]) -> Fingerprint {
        let mut sums = self.length.map(|random| u128::from(random) * text.len() as u128);
        let mut step = |bytes: &[u8; STEP], random: &[[u64; 2]; 2]| {
            let bits = u128::from_le_bytes(*bytes);
            for (sum, [low, high]) in sums.iter_mut().zip(random) {
                let (low, high) = (low.wrapping_add(bits as u64), high.wrapping_add((bits >> 64) as u64));
                *sum = sum.wrapping_add(u128::from(low) * u128::from(high));
            }
        };
        // The last bytes, some of which may be in the step before as well: only a short text has to be filled up.
        let mut filled = [0; STEP];
        let last = text.last_chunk().unwrap_or_else(|| {
            filled[..text.len()].copy_from_slice(text);
            &filled
        });
        step(last, &self.last);
        let (steps, _) = text[..text.len().saturating_sub(1)].as_chunks();
        steps.iter().zip(&self.steps).for_each(|(bytes, random)| step(bytes, random));
        sums
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::super::hash_128;
    use super::*;

    /// Texts of one length that differ in one bit, or in none.
    fn alike(length: usize) -> impl Iterator<Item = Vec<u8>> {
        let bits = (0..8 * length).filter(move |bit| bit % 64 == 0 || bit % 64 == 63 || bit % 101 == 0);
        [0x00, 0xff, b'a'].into_iter().flat_map(move |byte| {
            let flipped = bits.clone().map(move |bit| {
                let mut text = vec![byte; length];
                text[bit / 8] ^= 1 << (bit % 8);
                text
            });
            flipped.chain([vec![byte; length]])
        })
    }

    #[test]
    fn different_texts_have_different_fingerprints() {
        let mut known = HashSet::from([[0; 2]]);
        for length in 0..=CREDENTIAL_MAX {
            let texts: HashSet<Vec<u8>> = alike(length).collect();
            texts.iter().for_each(|text| assert!(known.insert(FINGERPRINTS.of(text)), "{text:?}"));
        }
        // Each half by itself tells them apart.
        let halves = [0, 1].map(|half| known.iter().map(|fingerprint| fingerprint[half]).collect::<HashSet<_>>().len());
        assert_eq!(halves, [known.len(); 2]);
    }

    #[test]
    fn a_text_has_its_hash_whatever_else_has_been_seen() {
        let check = |text: &[u8]| (0..2).for_each(|_| assert_eq!(recall(text, hash_128), hash_128(text), "{text:?}"));
        let all = |first: usize| {
            (first..=600).step_by(4).flat_map(|length| alike(length).step_by(31)).for_each(|text| check(&text));
        };
        std::thread::scope(|scope| (0..4).for_each(|first| drop(scope.spawn(move || all(first)))));
    }

    #[test]
    fn a_text_is_hashed_again_when_another_has_taken_its_place() {
        fn is_hashed(text: &[u8]) -> bool {
            let mut hashed = false;
            let hash = recall(text, |text| {
                hashed = true;
                hash_128(text)
            });
            assert_eq!(hash, hash_128(text));
            hashed
        }
        assert_eq!([&b"alpha"[..], b"alpha", b"alpha ", b"alpha"].map(is_hashed), [true, false, true, false]);
        assert!(std::thread::spawn(|| is_hashed(b"alpha")).join().unwrap(), "each thread has seen its own");
        // So many that one at least falls on each place.
        assert!((0..20 * PLACES as u32).all(|i| is_hashed(&i.to_le_bytes())));
        assert_eq!([&b"alpha"[..], b"alpha"].map(is_hashed), [true, false]);
        let long = [b'x'; CREDENTIAL_MAX + 1];
        assert_eq!([&long[1..], &long[1..], &long, &long].map(is_hashed), [true, false, true, true]);
    }
}
