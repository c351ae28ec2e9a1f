//! Which parameters training leaves as they are: patterns over the release's tensor names.

use std::collections::BTreeMap;

use rollout::model::{MTP_PREFIX, ModelConfig};

use crate::recipe::TrainConfig;

/// The patterns of `train.frozen`, and multi-token prediction where it is not trained.
#[derive(Clone, Debug)]
pub struct Frozen {
    patterns: Vec<String>,
}

/// Why patterns make no sense for a model.
#[derive(Debug, thiserror::Error)]
pub enum FrozenError {
    /// No parameter has such a name.
    #[error("`train.frozen`: no parameter is called `{pattern}`{near}")]
    NoMatch {
        /// The pattern.
        pattern: String,
        /// A name that is like it.
        near: String,
    },
    /// Some experts of a layer are frozen and others are not.
    #[error(
        "`train.frozen`: {num_frozen} of the {num} experts in `{stack}` are frozen, expected all or none of a layer's; widen \
         the pattern"
    )]
    Experts {
        /// Which matrices.
        stack: String,
        /// How many are frozen.
        num_frozen: usize,
        /// Of how many.
        num: usize,
    },
    /// A bias is frozen and moved.
    #[error(
        "`train.frozen` matches `{name}`, which `train.router_bias_update_speed` is to move; set that to 0 or narrow the \
         pattern"
    )]
    Bias {
        /// The first such bias.
        name: String,
    },
    /// Nothing is left to train.
    #[error("`train.frozen` matches every parameter, expected one that is trained; remove a pattern")]
    Everything,
    /// The recipe trains what the model does not have.
    #[error("`train.mtp_loss_weight` is {weight}, but the model has no multi-token-prediction block; set it to 0")]
    NoMtp {
        /// The weight.
        weight: f64,
    },
}

impl Frozen {
    /// Checks the recipe's patterns, in which `*` stands for any characters, against the parameters of `config`. Multi-token
    /// prediction is frozen while its loss has no weight: no gradient reaches it then.
    ///
    /// # Errors
    /// When a pattern matches nothing or a part of a layer's experts, nothing is left to train, or another key of the recipe
    /// wants what the patterns or the model do not allow.
    pub fn new(train: &TrainConfig, config: &ModelConfig) -> Result<Self, FrozenError> {
        let TrainConfig { frozen: patterns, mtp_loss_weight, router_bias_update_speed, .. } = train;
        let mtp_loss_weight = *mtp_loss_weight;
        if mtp_loss_weight > 0.0 && !config.has_mtp() {
            return Err(FrozenError::NoMtp { weight: mtp_loss_weight });
        }
        let parameters = config.parameters();
        for pattern in patterns {
            if !parameters.iter().any(|(name, _)| matches(pattern, name)) {
                let likeness = |name: &str| strsim::jaro_winkler(pattern, name);
                let near = parameters.iter().max_by(|a, b| likeness(&a.0).total_cmp(&likeness(&b.0)));
                let near = near.map_or(String::new(), |(name, _)| format!("; the nearest name is `{name}`"));
                return Err(FrozenError::NoMatch { pattern: pattern.clone(), near });
            }
        }
        let mut patterns = patterns.to_vec();
        if mtp_loss_weight == 0.0 {
            patterns.push(format!("{MTP_PREFIX}.*"));
        }
        let this = Self { patterns };
        let frozen = |name: &&String| this.contains(name);
        let names = || parameters.iter().map(|(name, _)| name);
        if names().all(|name| this.contains(name)) {
            return Err(FrozenError::Everything);
        }
        let is_moved = |name: &&String| name.starts_with("layers.") && name.ends_with(".ffn.gate.bias");
        if let Some(name) = names().filter(is_moved).find(frozen).filter(|_| *router_bias_update_speed > 0.0) {
            return Err(FrozenError::Bias { name: name.clone() });
        }
        let mut stacks: BTreeMap<String, (usize, usize)> = BTreeMap::new();
        for name in names() {
            let Some((block, expert)) = name.split_once(".ffn.experts.") else { continue };
            let matrix = expert.split_once('.').map_or(expert, |(_, matrix)| matrix);
            let (num_frozen, num) = stacks.entry(format!("{block}.ffn.experts.*.{matrix}")).or_default();
            *num_frozen += usize::from(this.contains(name));
            *num += 1;
        }
        match stacks.into_iter().find(|(_, (num_frozen, num))| *num_frozen != 0 && num_frozen != num) {
            Some((stack, (num_frozen, num))) => Err(FrozenError::Experts { stack, num_frozen, num }),
            None => Ok(this),
        }
    }

    /// Whether training changes the parameter `name` by its gradient: not what is frozen, and not the indexers and the
    /// routers' selection biases, which no gradient reaches.
    pub fn is_trained(&self, name: &str) -> bool {
        !(self.contains(name) || name.ends_with(".ffn.gate.bias") || name.contains(".attn.indexer."))
    }

    /// Whether the parameter `name` is frozen.
    pub fn contains(&self, name: &str) -> bool {
        self.patterns.iter().any(|pattern| matches(pattern, name))
    }
}

/// Whether `name` is `pattern`, where `*` stands for any characters.
fn matches(pattern: &str, name: &str) -> bool {
    let mut parts = pattern.split('*');
    let Some(mut rest) = name.strip_prefix(parts.next().unwrap_or_default()) else { return false };
    let mut parts: Vec<&str> = parts.collect();
    let Some(last) = parts.pop() else { return rest.is_empty() };
    for part in parts {
        match rest.find(part) {
            Some(at) => rest = &rest[at + part.len()..],
            None => return false,
        }
    }
    rest.ends_with(last)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stars_stand_for_anything() {
        let name = "layers.3.ffn.experts.12.w1.weight";
        for pattern in [name, "*", "layers.3.*", "*.w1.weight", "layers.*.experts.*.w1.*", "*layers*weight*"] {
            assert!(matches(pattern, name), "{pattern}");
        }
        for pattern in ["", "layers.3", "*.w2.weight", "layers.*.experts.*.w2.*", "x*", "*x", "layers.33*"] {
            assert!(!matches(pattern, name), "{pattern}");
        }
        assert!(!matches("ab*ba", "aba"));
    }
}
