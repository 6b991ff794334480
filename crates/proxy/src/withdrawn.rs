//! The set of generations that are over, in bounded memory.
//!
//! A withdrawn generation is never accepted again, however late an answer that names it arrives. Generations are handed
//! out in ascending order and all of them end, so the set is a few ranges with gaps where something still lives.

use std::collections::BTreeMap;

/// Disjoint inclusive ranges, first -> last; ranges that touch are one.
#[derive(Debug, Default)]
pub struct Withdrawn {
    ranges: BTreeMap<u64, u64>,
}

impl Withdrawn {
    pub fn contains(&self, generation: u64) -> bool {
        self.ranges
            .range(..=generation)
            .next_back()
            .is_some_and(|(_, last)| *last >= generation)
    }

    pub fn insert(&mut self, generation: u64) {
        self.insert_range(generation, generation);
    }

    /// Everything below `below` that is not in `live`. Never takes a withdrawal back.
    pub fn insert_all_below(&mut self, below: u64, live: &[u64]) {
        let mut live: Vec<u64> = live.iter().copied().filter(|generation| *generation < below).collect();
        live.sort_unstable();
        let mut first = 0;
        for generation in live {
            if generation > first {
                self.insert_range(first, generation - 1);
            }
            first = generation.saturating_add(1);
        }
        if first < below {
            self.insert_range(first, below - 1);
        }
    }

    /// Forgets detail until at most `ranges_max` ranges are left, by closing the lowest gaps in which `is_live` finds
    /// nothing. The lowest are the oldest: what the server never withdrew there, it never will.
    pub fn compact(&mut self, ranges_max: usize, is_live: impl Fn(u64, u64) -> bool) {
        let mut from = 0;
        while self.ranges.len() > ranges_max {
            let mut pair = self.ranges.range(from..);
            let (Some((&first, &last)), Some((&next_first, &next_last))) = (pair.next(), pair.next()) else {
                return;
            };
            if is_live(last + 1, next_first - 1) {
                from = next_first;
            } else {
                self.insert_range(first, next_last);
            }
        }
    }

    fn insert_range(&mut self, mut first: u64, mut last: u64) {
        // A range before this one that overlaps or touches it becomes part of it, and so does every one after.
        if let Some((&before_first, &before_last)) = self.ranges.range(..=first).next_back()
            && before_last.saturating_add(1) >= first
        {
            first = before_first;
            last = last.max(before_last);
        }
        while let Some((&inside_first, &inside_last)) = self.ranges.range(first..=last.saturating_add(1)).next() {
            last = last.max(inside_last);
            self.ranges.remove(&inside_first);
        }
        self.ranges.insert(first, last);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    proptest! {
        #[test]
        fn behaves_as_a_plain_set(steps in prop::collection::vec((0u64..60, prop::option::of(prop::collection::vec(0u64..60, 0..5))), 0..40)) {
            let mut model = BTreeSet::new();
            let mut set = Withdrawn::default();
            for (number, live) in steps {
                match live {
                    None => { model.insert(number); set.insert(number); }
                    Some(live) => {
                        model.extend((0..number).filter(|g| !live.contains(g)));
                        set.insert_all_below(number, &live);
                    }
                }
                for generation in 0..62 {
                    prop_assert_eq!(set.contains(generation), model.contains(&generation), "{}", generation);
                }
                let ranges: Vec<_> = set.ranges.iter().collect();
                prop_assert!(ranges.windows(2).all(|pair| *pair[0].1 + 1 < *pair[1].0), "{:?}", ranges);
            }
        }
    }

    #[test]
    fn compaction_closes_only_gaps_without_life() {
        let mut set = Withdrawn::default();
        for generation in [1, 3, 5, 7, 9] {
            set.insert(generation);
        }
        set.compact(2, |first, last| (first..=last).contains(&2));
        assert!(!set.contains(2), "a live generation was withdrawn");
        assert!(
            [1, 3, 4, 5, 6, 7, 8, 9]
                .into_iter()
                .all(|generation| set.contains(generation))
        );
    }

    #[test]
    fn the_largest_generation_does_not_overflow() {
        let mut set = Withdrawn::default();
        set.insert(u64::MAX);
        set.insert_all_below(u64::MAX, &[]);
        assert!(set.contains(u64::MAX) && set.contains(0));
    }
}
