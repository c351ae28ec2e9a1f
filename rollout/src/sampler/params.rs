//! How tokens are drawn and when a response ends, under the names that SGLang, vLLM and OpenAI's API use.

/// How a response is made.
#[derive(Clone, Debug, PartialEq)]
pub struct SamplingParams {
    /// Divides the logits; 0 takes the likeliest token, ties to the lowest id.
    pub temperature: f32,
    /// Only the k likeliest tokens are drawn.
    pub top_k: Option<usize>,
    /// Only the likeliest tokens that together reach this probability are drawn, at least one.
    pub top_p: f32,
    /// Only tokens at least this likely, as a fraction of the likeliest one's probability, are drawn.
    pub min_p: f32,
    /// Logits of tokens that the prompt or the response has are divided by it where positive, multiplied where negative
    /// (Keskar et al., CTRL, arXiv 1909.05858, section 4.1).
    pub repetition_penalty: f32,
    /// Is taken from the logits of tokens that the response has.
    pub presence_penalty: f32,
    /// Is taken from the logits of tokens that the response has, as often as it has them.
    pub frequency_penalty: f32,
    /// Is added to the logits of these tokens.
    pub logit_bias: Vec<(u32, f32)>,
    /// Keys the random stream, with the rollout id and the position.
    pub seed: u64,
    /// What would end the response is barred until it has as many tokens.
    pub min_tokens: usize,
    /// The response ends when it has as many tokens; 0 only reads the prompt.
    pub max_tokens: usize,
    /// Tokens that end the response, besides those that end any response of the model.
    pub stop_token_ids: Vec<u32>,
    /// Texts that end the response, of which they are then no part.
    pub stop: Vec<String>,
    /// Whether the tokens that end any response of the model do not end this one.
    pub ignore_eos: bool,
    /// How many of the likeliest tokens are told with their log-probabilities at each position.
    pub top_logprobs: usize,
}

impl Default for SamplingParams {
    fn default() -> Self {
        Self {
            temperature: 1.0,
            top_k: None,
            top_p: 1.0,
            min_p: 0.0,
            repetition_penalty: 1.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            logit_bias: Vec::new(),
            seed: 0,
            min_tokens: 0,
            max_tokens: 128,
            stop_token_ids: Vec::new(),
            stop: Vec::new(),
            ignore_eos: false,
            top_logprobs: 0,
        }
    }
}

/// The largest number of likeliest tokens that can be told, as OpenAI's.
pub const MAX_TOP_LOGPROBS: usize = 20;
/// The largest number of stop texts, and of bytes in one.
pub const MAX_STOP_TEXTS: (usize, usize) = (16, 1024);

/// A parameter that cannot be: which one, what it is, and what it may be.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[error("`{name}` is {found}, expected {expected}")]
pub struct ParamsError {
    /// The parameter.
    pub name: &'static str,
    /// Its value.
    pub found: String,
    /// What it may be.
    pub expected: String,
}

impl SamplingParams {
    /// Whether the parameters make sense for a model with this vocabulary.
    ///
    /// # Errors
    /// When one does not.
    pub fn check(&self, vocab_size: usize) -> Result<(), ParamsError> {
        let fail =
            |name, found: String, expected: &str| Err(ParamsError { name, found, expected: expected.to_owned() });
        let number = |name, value: f32, is_fine: bool, expected: &str| match value.is_finite() && is_fine {
            true => Ok(()),
            false => fail(name, value.to_string(), expected),
        };
        number("temperature", self.temperature, self.temperature >= 0.0, "a number from 0 on")?;
        number("top_p", self.top_p, self.top_p > 0.0 && self.top_p <= 1.0, "a number above 0, up to 1")?;
        number("min_p", self.min_p, (0.0..=1.0).contains(&self.min_p), "a number from 0 to 1")?;
        let repetition = self.repetition_penalty;
        number("repetition_penalty", repetition, repetition > 0.0 && repetition <= 10.0, "a number above 0, up to 10")?;
        for (name, penalty) in
            [("presence_penalty", self.presence_penalty), ("frequency_penalty", self.frequency_penalty)]
        {
            number(name, penalty, (-2.0..=2.0).contains(&penalty), "a number from -2 to 2")?;
        }
        if self.top_k == Some(0) {
            return fail("top_k", "0".into(), "a number of tokens from 1 on, or none (-1)");
        }
        if self.min_tokens > self.max_tokens {
            let expected = format!("at most `max_tokens`, which is {}", self.max_tokens);
            return fail("min_tokens", self.min_tokens.to_string(), &expected);
        }
        if self.top_logprobs > MAX_TOP_LOGPROBS {
            return fail("top_logprobs", self.top_logprobs.to_string(), &format!("at most {MAX_TOP_LOGPROBS}"));
        }
        let below = format!("tokens below {vocab_size}");
        for (name, token) in self
            .stop_token_ids
            .iter()
            .map(|token| ("stop_token_ids", token))
            .chain(self.logit_bias.iter().map(|(token, _)| ("logit_bias", token)))
        {
            if *token as usize >= vocab_size {
                return fail(name, format!("for token {token}"), &below);
            }
        }
        if let Some((_, bias)) = self.logit_bias.iter().find(|(_, bias)| !(-100.0..=100.0).contains(bias)) {
            return fail("logit_bias", bias.to_string(), "numbers from -100 to 100");
        }
        let (most, longest) = MAX_STOP_TEXTS;
        if self.stop.len() > most {
            return fail("stop", format!("{} texts", self.stop.len()), &format!("at most {most}"));
        }
        if let Some(text) = self.stop.iter().find(|text| text.is_empty() || text.len() > longest) {
            return fail("stop", format!("a text of {} bytes", text.len()), &format!("texts of 1 to {longest} bytes"));
        }
        Ok(())
    }

    /// Whether logits are changed by what stands before.
    pub fn has_penalties(&self) -> bool {
        self.repetition_penalty != 1.0 || self.presence_penalty != 0.0 || self.frequency_penalty != 0.0
    }

    /// Whether tokens are drawn from the model's distribution, tempered and nothing else.
    pub(super) fn is_plain(&self) -> bool {
        self.top_k.is_none()
            && self.top_p >= 1.0
            && self.min_p <= 0.0
            && self.logit_bias.is_empty()
            && !self.has_penalties()
    }
}
