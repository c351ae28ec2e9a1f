//! The recipe's `[reward]` table: which rule, and its settings.

use datasets::Prompt;
use serde::{Deserialize, Serialize};

use crate::reasoning_gym::{ReasoningGym, ReasoningGymConfig};
use crate::{RewardError, RewardFn};

/// Which rule scores the rollouts. `type` picks it; the other keys are the rule's own.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum RewardConfig {
    /// The checkers of the package reasoning-gym; the row's `metadata.source_dataset` says which.
    ReasoningGym(ReasoningGymConfig),
}

impl Default for RewardConfig {
    fn default() -> Self {
        Self::ReasoningGym(ReasoningGymConfig::default())
    }
}

impl RewardConfig {
    /// The rule, after every prompt was found to carry what it reads.
    ///
    /// # Errors
    /// `RewardError::NoPrompts` without prompts; else the first row that the rule could not score.
    pub fn build(&self, prompts: &[Prompt]) -> Result<Box<dyn RewardFn>, RewardError> {
        let rule: Box<dyn RewardFn> = match self {
            Self::ReasoningGym(config) => Box::new(ReasoningGym::new(config.clone())),
        };
        if prompts.is_empty() {
            return Err(RewardError::NoPrompts { rule: rule.name() });
        }
        for prompt in prompts {
            rule.check(prompt)?;
        }
        Ok(rule)
    }
}
