//! Which prompts a step trains on: a pure function of the step, so that a resumed run needs no state to go on.

/// The order in which prompts are trained on.
///
/// The prompts form one endless sequence: epoch 0, then epoch 1, and so on. Each epoch visits every prompt exactly once,
/// in its own order. A step takes the next `prompts_per_step` of the sequence, so a step may end one epoch and begin the
/// next, and a data set smaller than a step is gone through more than once.
///
/// The order of an epoch is a Fisher-Yates shuffle whose draws are those of the generator SplitMix64 (Steele, Lea, Flood,
/// "Fast splittable pseudorandom number generators", OOPSLA 2014), started at a hash of (seed, epoch). It is part of
/// what a run is: the same seed gives the same order in every later version of this crate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PromptOrder {
    num_prompts: usize,
    seed: u64,
    shuffle: bool,
}

impl PromptOrder {
    /// An order of `num_prompts` prompts. Without `shuffle` every epoch runs from prompt 0 to the last.
    ///
    /// # Panics
    /// If there is no prompt.
    pub fn new(num_prompts: usize, seed: u64, shuffle: bool) -> Self {
        assert!(num_prompts > 0, "an order of {num_prompts} prompts");
        Self { num_prompts, seed, shuffle }
    }

    /// The prompts of a step, each as (index, epoch), in the order in which they are trained on.
    ///
    /// Entry `i` stands at position `step * prompts_per_step + i` of the endless sequence. Costs one shuffle of the data
    /// set for each epoch that the step touches.
    ///
    /// # Panics
    /// If the position is beyond 2^64.
    pub fn batch(&self, step: u64, prompts_per_step: usize) -> Vec<(usize, u64)> {
        let num_prompts = self.num_prompts as u64;
        let end = step.checked_add(1).and_then(|steps| steps.checked_mul(prompts_per_step as u64));
        let end = end.unwrap_or_else(|| panic!("step {step} of {prompts_per_step} prompts is beyond 2^64 prompts"));

        let mut batch = Vec::with_capacity(prompts_per_step);
        let mut position = end - prompts_per_step as u64;
        while position < end {
            let epoch = position / num_prompts;
            let first = (position % num_prompts) as usize;
            let count = (end - position).min(num_prompts - first as u64) as usize;
            if self.shuffle {
                batch.extend(self.permutation(epoch)[first..first + count].iter().map(|&index| (index, epoch)));
            } else {
                batch.extend((first..first + count).map(|index| (index, epoch)));
            }
            position += count as u64;
        }
        batch
    }

    /// Every prompt's index once, in the order of an epoch.
    fn permutation(&self, epoch: u64) -> Vec<usize> {
        // Both words pass through the finaliser, so that (seed 1, epoch 2) and (seed 2, epoch 1) have nothing in common.
        let mut draws = SplitMix64 { state: mix(mix(self.seed.wrapping_add(GOLDEN_GAMMA)) ^ epoch) };
        let mut order: Vec<usize> = (0..self.num_prompts).collect();
        for last in (1..self.num_prompts).rev() {
            order.swap(last, draws.below(last as u64 + 1) as usize);
        }
        order
    }
}

/// 2^64 over the golden ratio: the step between the counters of SplitMix64.
const GOLDEN_GAMMA: u64 = 0x9e37_79b9_7f4a_7c15;

/// The finaliser of SplitMix64, a bijection of 64-bit words.
fn mix(word: u64) -> u64 {
    let word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    word ^ (word >> 31)
}

struct SplitMix64 {
    state: u64,
}

impl SplitMix64 {
    fn next(&mut self) -> u64 {
        self.state = self.state.wrapping_add(GOLDEN_GAMMA);
        mix(self.state)
    }

    /// A draw from `0..bound`, as the high word of a product. Its bias is below `bound / 2^64`, which no data set can show;
    /// in exchange every swap costs exactly one draw.
    fn below(&mut self, bound: u64) -> u64 {
        ((u128::from(self.next()) * u128::from(bound)) >> 64) as u64
    }
}
