//! A list that mostly has one element.

use std::ops::{Deref, DerefMut};

/// Charges and outcomes: one of them, as most requests have, lies where the list lies, and is moved and dropped without a
/// loop or an allocation. Room for a second one would be moved with every request that has none.
#[derive(Clone, Debug, Default)]
pub(crate) enum Few<T> {
    #[default]
    None,
    One(T),
    Several(Vec<T>),
}

impl<T> Few<T> {
    #[inline]
    pub(crate) fn push(&mut self, element: T) {
        match self {
            Self::Several(all) => all.push(element),
            Self::None => *self = Self::One(element),
            Self::One(_) => {
                let mut all = Vec::with_capacity(4);
                if let Self::One(first) = std::mem::take(self) {
                    all.push(first);
                }
                all.push(element);
                *self = Self::Several(all);
            }
        }
    }
}

impl<T> Deref for Few<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        match self {
            Self::None => &[],
            Self::One(one) => std::slice::from_ref(one),
            Self::Several(all) => all,
        }
    }
}

impl<T> DerefMut for Few<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        match self {
            Self::None => &mut [],
            Self::One(one) => std::slice::from_mut(one),
            Self::Several(all) => all,
        }
    }
}

impl<T> FromIterator<T> for Few<T> {
    fn from_iter<I: IntoIterator<Item = T>>(elements: I) -> Self {
        let mut elements = elements.into_iter();
        match (elements.next(), elements.next()) {
            (None, _) => Self::None,
            (Some(one), None) => Self::One(one),
            (Some(first), Some(second)) => {
                let mut all = Vec::with_capacity(2 + elements.size_hint().0);
                all.extend([first, second]);
                all.extend(elements);
                Self::Several(all)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_number_of_elements_is_kept_in_order() {
        for n in 0..6 {
            let numbers: Vec<usize> = (0..n).collect();
            let mut pushed = Few::default();
            numbers.iter().for_each(|number| pushed.push(*number));
            assert_eq!(*pushed, numbers[..]);
            let mut collected: Few<usize> = numbers.iter().copied().collect();
            assert_eq!(*collected, numbers[..]);
            collected.iter_mut().for_each(|number| *number += 1);
            assert_eq!(collected.iter().sum::<usize>(), n * (n + 1) / 2);
        }
    }
}
