//! Text in a fixed buffer, for header fields without an allocation and for messages that `const fn` can build; and text
//! whose length is known before it is written.

use bytes::Bytes;

/// At most `N` bytes of ASCII; what does not fit is cut off.
#[derive(Clone, Copy)]
pub(crate) struct Text<const N: usize> {
    bytes: [u8; N],
    len: usize,
}

impl<const N: usize> Text<N> {
    pub(crate) const fn new() -> Self {
        Self { bytes: [0; N], len: 0 }
    }

    /// Appends `part`, which must be ASCII so that a cut cannot split a character.
    #[must_use]
    pub(crate) const fn str(mut self, part: &str) -> Self {
        let part = part.as_bytes();
        let mut i = 0;
        while i < part.len() && self.len < N {
            debug_assert!(part[i].is_ascii());
            self.bytes[self.len] = part[i];
            self.len += 1;
            i += 1;
        }
        self
    }

    /// Appends `number` in decimal digits.
    #[must_use]
    pub(crate) const fn number(mut self, number: u128) -> Self {
        let mut digits = [0; 39];
        let mut rest = number;
        let mut start = digits.len();
        loop {
            start -= 1;
            digits[start] = b'0' + (rest % 10) as u8;
            rest /= 10;
            if rest == 0 {
                break;
            }
        }
        while start < digits.len() && self.len < N {
            self.bytes[self.len] = digits[start];
            self.len += 1;
            start += 1;
        }
        self
    }

    pub(crate) const fn as_bytes(&self) -> &[u8] {
        self.bytes.split_at(self.len).0
    }

    pub(crate) const fn as_str(&self) -> &str {
        match std::str::from_utf8(self.as_bytes()) {
            Ok(text) => text,
            Err(_) => "",
        }
    }
}

/// Takes ASCII text in place: what is handed on would be copied for each part.
pub(crate) trait Sink {
    fn push(&mut self, part: &str) -> &mut Self;

    /// Appends `number` in decimal digits.
    fn push_number(&mut self, number: u64) -> &mut Self;
}

impl<const N: usize> Sink for Text<N> {
    #[inline]
    fn push(&mut self, part: &str) -> &mut Self {
        debug_assert!(part.is_ascii());
        match self.bytes.get_mut(self.len..self.len + part.len()) {
            Some(room) => {
                room.copy_from_slice(part.as_bytes());
                self.len += part.len();
            }
            None => *self = self.str(part),
        }
        self
    }

    #[inline]
    fn push_number(&mut self, number: u64) -> &mut Self {
        let end = self.len + digits(number);
        let mut rest = number;
        for i in (self.len..end).rev() {
            if let Some(digit) = self.bytes.get_mut(i) {
                *digit = b'0' + (rest % 10) as u8;
            }
            rest /= 10;
        }
        self.len = end.min(N);
        self
    }
}

impl Sink for Vec<u8> {
    #[inline]
    fn push(&mut self, part: &str) -> &mut Self {
        self.extend_from_slice(part.as_bytes());
        self
    }

    #[inline]
    fn push_number(&mut self, number: u64) -> &mut Self {
        match small_number(number) {
            Some(digits) => self.extend_from_slice(digits.as_bytes()),
            None => self.extend_from_slice(Text::<20>::new().push_number(number).as_bytes()),
        }
        self
    }
}

/// Takes nothing but the length.
struct Length(usize);

impl Sink for Length {
    #[inline]
    fn push(&mut self, part: &str) -> &mut Self {
        self.0 += part.len();
        self
    }

    #[inline]
    fn push_number(&mut self, number: u64) -> &mut Self {
        self.0 += digits(number);
        self
    }
}

/// Text that can be written more than once.
pub(crate) trait Written {
    fn write(&self, to: &mut impl Sink);

    /// The text, for which its length is written first: one allocation of as many bytes as it has.
    #[inline]
    fn to_bytes(&self) -> Bytes {
        let mut length = Length(0);
        self.write(&mut length);
        let mut text = Vec::with_capacity(length.0);
        self.write(&mut text);
        Bytes::from(text)
    }
}

/// How many decimal digits a number has.
#[inline]
fn digits(number: u64) -> usize {
    number.checked_ilog10().unwrap_or(0) as usize + 1
}

/// The numbers from 0 to 999 in a row, in three digits each.
const NUMBERS: &str = {
    const DIGITS: [u8; 3_000] = {
        let mut digits = [b'0'; 3_000];
        let mut i = 0;
        while i < 1_000 {
            digits[3 * i] += (i / 100) as u8;
            digits[3 * i + 1] += (i / 10 % 10) as u8;
            digits[3 * i + 2] += (i % 10) as u8;
            i += 1;
        }
        digits
    };
    match std::str::from_utf8(&DIGITS) {
        Ok(digits) => digits,
        Err(_) => unreachable!(),
    }
};

/// The decimal digits of a number below 1 000: nothing has to be made for it.
pub(crate) fn small_number(number: u64) -> Option<&'static str> {
    let digits = match number {
        0..=9 => 1,
        10..=99 => 2,
        100..=999 => 3,
        _ => return None,
    };
    let end = 3 * number as usize + 3;
    NUMBERS.get(end - digits..end)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn small_numbers_are_those_below_a_thousand() {
        for number in 0..1_000 {
            assert_eq!(small_number(number), Some(number.to_string().as_str()));
        }
        assert_eq!((small_number(1_000), small_number(u64::MAX)), (None, None));
    }

    #[test]
    fn text_and_numbers_are_joined_and_cut_at_the_end() {
        assert_eq!(Text::<32>::new().str("q=").number(100).str(";w=").number(0).as_str(), "q=100;w=0");
        assert_eq!(Text::<64>::new().number(u128::MAX).as_str(), u128::MAX.to_string());
        assert_eq!(Text::<3>::new().str("ab").number(789).as_str(), "ab7");
    }

    #[test]
    fn in_place_is_the_same() {
        for number in [0, 9, 10, 100, u64::MAX] {
            let in_place = *Text::<32>::new().push("q=").push_number(number).push(";");
            assert_eq!(in_place.as_str(), Text::<32>::new().str("q=").number(number.into()).str(";").as_str());
        }
        assert_eq!(Text::<3>::new().push("ab").push_number(789).push("x").as_str(), "ab7");
    }
}
