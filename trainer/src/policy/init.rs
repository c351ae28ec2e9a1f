//! Weights to train from scratch. Our own random numbers, so that a seed means the same on every libtorch.

use rollout::model::{HostTensor, ModelConfig, TensorData, Weights};

/// Splitmix64 (Steele, Lea & Flood 2014), and normal numbers by Box-Muller.
struct Rng(u64);

impl Rng {
    /// The stream of one tensor: FNV-1a of its name, so that adding a tensor leaves the others as they were.
    fn of(seed: u64, name: &str) -> Self {
        let hash = name.bytes().fold(0xcbf2_9ce4_8422_2325, |h, b| (h ^ u64::from(b)).wrapping_mul(0x0100_0000_01b3));
        let mut rng = Self(seed);
        Self(rng.next() ^ hash)
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Uniform in (0, 1].
    fn uniform(&mut self) -> f64 {
        ((self.next() >> 11) + 1) as f64 / (1u64 << 53) as f64
    }

    fn normals(&mut self, count: usize, std: f64) -> Vec<f32> {
        let mut out = Vec::with_capacity(count + 1);
        while out.len() < count {
            let radius = std * (-2.0 * self.uniform().ln()).sqrt();
            let angle = std::f64::consts::TAU * self.uniform();
            out.extend([(radius * angle.cos()) as f32, (radius * angle.sin()) as f32]);
        }
        out.truncate(count);
        out
    }
}

/// Weights for training from scratch; the same `seed` gives the same bits.
///
/// Published are only `initializer_range` 0.02 and the mHC scale 0.01 (SPEC section 11). Ours: matrices are normal with
/// variance 1 / fan-in, so that small models start with signals of order one; those that write to the residual streams
/// (`wo_b`, `w2`) are divided by sqrt(2 * layers) more; the embedding is `initializer_range` and so is the head, which
/// starts near the uniform distribution. Norms are 1; mHC bases, sinks, `ape` and selection biases 0: a block begins by
/// reading the mean of its streams and writing to all of them. Hash tables give each token K distinct experts, all
/// experts equally often up to one.
pub fn initial_weights(config: &ModelConfig, seed: u64) -> Weights {
    let range = f64::from(config.initializer_range.unwrap_or(0.02));
    let residual = 1.0 / (2.0 * config.num_hidden_layers as f64).sqrt();
    let mut weights = Weights::new();
    for (name, shape) in config.parameters() {
        let count: usize = shape.iter().product();
        let fan_in = 1.0 / (shape[shape.len() - 1] as f64).sqrt();
        let normals = |std: f64| Rng::of(seed, &name).normals(count, std);
        let values = if name.ends_with("norm.weight") {
            vec![1.0; count]
        } else if name.ends_with("_scale") {
            vec![0.01; count]
        } else if ["_base", "attn_sink", ".ape", ".bias"].iter().any(|end| name.ends_with(end)) {
            vec![0.0; count]
        } else if name.ends_with("_fn") || name == "embed.weight" || name == "head.weight" {
            normals(range)
        } else if name.ends_with(".wo_b.weight") || name.ends_with(".w2.weight") {
            normals(fan_in * residual)
        } else {
            normals(fan_in)
        };
        weights.insert(name, HostTensor::f32(&shape, values));
    }
    let (e, k) = (config.n_routed_experts, config.num_experts_per_tok);
    for name in config.hash_tables() {
        let mut rng = Rng::of(seed, &name);
        let values = hash_table(&mut rng, config.vocab_size, e, k);
        weights.insert(name, HostTensor { shape: vec![config.vocab_size, k], data: TensorData::I64(values) });
    }
    weights
}

/// Deals shuffled decks of all experts, `K` cards a token; a token that would get an expert twice takes the next card
/// of the deck that it does not hold.
fn hash_table(rng: &mut Rng, vocab: usize, experts: usize, k: usize) -> Vec<i64> {
    let mut deck: Vec<i64> = Vec::new();
    let mut table: Vec<i64> = Vec::with_capacity(vocab * k);
    for _ in 0..vocab {
        let token = table.len();
        while table.len() < token + k {
            match deck.iter().rposition(|e| !table[token..].contains(e)) {
                Some(card) => table.push(deck.remove(card)),
                None => {
                    // Beneath what is left, so that no expert falls behind.
                    let mut fresh: Vec<i64> = (0..experts as i64).collect();
                    for i in (1..experts).rev() {
                        fresh.swap(i, (rng.next() % (i as u64 + 1)) as usize);
                    }
                    deck.splice(0..0, fresh);
                }
            }
        }
    }
    table
}
