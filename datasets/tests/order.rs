use datasets::PromptOrder;
use proptest::prelude::*;

/// The indices of a whole epoch.
fn epoch(num_prompts: usize, seed: u64, epoch: u64) -> Vec<usize> {
    PromptOrder::new(num_prompts, seed, true).batch(epoch, num_prompts).into_iter().map(|(index, _)| index).collect()
}

#[test]
fn without_shuffle_the_prompts_come_in_file_order() {
    let order = PromptOrder::new(5, 7, false);
    assert_eq!(order.batch(0, 3), [(0, 0), (1, 0), (2, 0)]);
    assert_eq!(order.batch(1, 3), [(3, 0), (4, 0), (0, 1)]);
    assert_eq!(order.batch(2, 3), [(1, 1), (2, 1), (3, 1)]);
}

#[test]
fn a_data_set_smaller_than_a_step_wraps() {
    let batch = PromptOrder::new(3, 0, false).batch(0, 8);
    assert_eq!(batch, [(0, 0), (1, 0), (2, 0), (0, 1), (1, 1), (2, 1), (0, 2), (1, 2)]);
    let batch = PromptOrder::new(3, 0, true).batch(0, 8);
    assert_eq!(batch.iter().map(|&(_, epoch)| epoch).collect::<Vec<_>>(), [0, 0, 0, 1, 1, 1, 2, 2]);
    assert_eq!(PromptOrder::new(1, 0, true).batch(4, 2), [(0, 8), (0, 9)]);
}

#[test]
fn a_step_of_no_prompts_is_empty() {
    assert_eq!(PromptOrder::new(3, 0, true).batch(5, 0), []);
}

/// A resumed run depends on these numbers: they come from a second implementation, in Python, and must not change.
///
/// ```python
/// M, G = 2**64 - 1, 0x9e3779b97f4a7c15
/// def mix(z):
///     z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9 & M
///     z = (z ^ z >> 27) * 0x94d049bb133111eb & M
///     return z ^ z >> 31
/// def permutation(n, seed, epoch):
///     s, order = mix(mix(seed + G & M) ^ epoch), list(range(n))
///     for last in range(n - 1, 0, -1):
///         s = s + G & M
///         j = mix(s) * (last + 1) >> 64
///         order[last], order[j] = order[j], order[last]
///     return order
/// ```
#[test]
fn the_order_of_an_epoch_is_fixed_for_ever() {
    assert_eq!(epoch(10, 0, 0), [1, 4, 5, 0, 7, 6, 9, 8, 2, 3]);
    assert_eq!(epoch(10, 0, 1), [9, 4, 3, 0, 6, 8, 1, 7, 2, 5]);
    assert_eq!(epoch(10, 42, 0), [8, 1, 9, 2, 6, 0, 4, 5, 3, 7]);
    assert_eq!(epoch(10, 42, 7), [4, 5, 9, 1, 0, 3, 7, 2, 8, 6]);
    assert_eq!(epoch(10, u64::MAX, 3), [8, 0, 2, 6, 9, 1, 5, 4, 3, 7]);
}

#[test]
fn every_place_of_an_epoch_gets_every_prompt_equally_often() {
    let (num_prompts, num_epochs) = (6, 6000);
    let mut counts = [[0u32; 6]; 6];
    for e in 0..num_epochs {
        for (place, index) in epoch(num_prompts, 3, e).into_iter().enumerate() {
            counts[place][index] += 1;
        }
    }
    // 1000 expected, standard deviation 29.
    for count in counts.into_iter().flatten() {
        assert!((850..1150).contains(&count), "{counts:?}");
    }
}

#[test]
#[should_panic(expected = "an order of 0 prompts")]
fn no_prompts_have_no_order() {
    PromptOrder::new(0, 0, true);
}

proptest! {
    #[test]
    fn every_epoch_visits_every_prompt_once(
        num_prompts in 1usize..200, seed: u64, shuffle: bool, per_step in 1usize..50,
    ) {
        let order = PromptOrder::new(num_prompts, seed, shuffle);
        let num_steps = (3 * num_prompts).div_ceil(per_step) as u64;
        let mut sequence: Vec<_> = (0..num_steps).flat_map(|step| order.batch(step, per_step)).collect();
        prop_assert_eq!(sequence.len(), num_steps as usize * per_step);
        sequence.truncate(3 * num_prompts);
        for (e, visits) in sequence.chunks(num_prompts).enumerate() {
            prop_assert!(visits.iter().all(|&(_, epoch)| epoch == e as u64));
            let mut indices: Vec<_> = visits.iter().map(|&(index, _)| index).collect();
            indices.sort_unstable();
            prop_assert_eq!(indices, (0..num_prompts).collect::<Vec<_>>());
        }
    }

    #[test]
    fn the_sequence_does_not_depend_on_the_size_of_a_step(
        num_prompts in 1usize..100, seed: u64, per_step in 1usize..40,
    ) {
        let order = PromptOrder::new(num_prompts, seed, true);
        let stepwise: Vec<_> = (0..7).flat_map(|step| order.batch(step, per_step)).collect();
        prop_assert_eq!(stepwise, order.batch(0, 7 * per_step));
    }

    #[test]
    fn epochs_and_seeds_differ(seed in 0..u64::MAX - 1, e in 0u64..1000) {
        prop_assert_ne!(epoch(60, seed, e), epoch(60, seed, e + 1));
        prop_assert_ne!(epoch(60, seed, e), epoch(60, seed + 1, e));
        prop_assert_ne!(epoch(60, seed, e + 1), epoch(60, seed + 1, e));
    }
}
