//! New weights go to the engine: masters are quantised once, sent with a checksum, and the engine proves that what its
//! kernels will compute on is what was sent. A sync that did not arrive is an error, never silent.

use rollout::engine::Engine;
use rollout::model::{WeightUpdate, WeightUpdateError, checksum, to_engine_format};

use crate::policy::Policy;

/// Publishes the policy's weights as `version`; rollouts from here on carry it.
///
/// # Errors
/// When the engine refused them; it then still serves the version before.
pub fn publish(policy: &Policy, engine: &Engine, version: u64) -> Result<(), WeightUpdateError> {
    let weights = to_engine_format(policy.config(), policy.to_weights());
    let checksum = checksum(&weights);
    engine.update_weights(&WeightUpdate { version, weights, checksum })
}
