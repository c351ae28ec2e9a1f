//! Which parameters training leaves as they are: patterns over the release's tensor names.

use rollout::model::{MTP_PREFIX, ModelConfig};

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
    /// Checks `patterns`, in which `*` stands for any characters, against the parameters of `config`. Multi-token
    /// prediction is frozen while its loss has no weight: no gradient reaches it then.
    ///
    /// # Errors
    /// When a pattern matches nothing, nothing is left to train, or the weight is for what the model does not have.
    pub fn new(patterns: &[String], mtp_loss_weight: f64, config: &ModelConfig) -> Result<Self, FrozenError> {
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
        match parameters.iter().all(|(name, _)| this.contains(name)) {
            true => Err(FrozenError::Everything),
            false => Ok(this),
        }
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
