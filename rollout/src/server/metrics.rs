//! What the server tells Prometheus: the engine's counters as they stand, and how long answers take.

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;

use crate::engine::Stats;

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct Answer {
    path: String,
    status: u16,
}

/// What was seen since the server started.
#[derive(Debug)]
pub(super) struct Metrics {
    answers: Family<Answer, Counter>,
    first_token: Histogram,
    whole: Histogram,
}

/// Seconds, each about twice the one before.
const BUCKETS: [f64; 16] =
    [0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0];

impl Metrics {
    pub(super) fn new() -> Self {
        Self { answers: Family::default(), first_token: Histogram::new(BUCKETS), whole: Histogram::new(BUCKETS) }
    }

    pub(super) fn answered(&self, path: &str, status: u16) {
        self.answers.get_or_create(&Answer { path: path.to_owned(), status }).inc();
    }

    pub(super) fn first_token(&self, seconds: f64) {
        self.first_token.observe(seconds);
    }

    pub(super) fn finished(&self, seconds: f64) {
        self.whole.observe(seconds);
    }

    /// The page that Prometheus reads.
    pub(super) fn page(&self, stats: &Stats, weight_version: u64) -> String {
        let mut registry = Registry::with_prefix("furlong");
        let mut gauge = |name: &str, help: &str, value: f64| {
            let gauge = Gauge::<f64, std::sync::atomic::AtomicU64>::default();
            gauge.set(value);
            registry.register(name, help, gauge);
        };
        gauge("num_running_reqs", "Samples in the batch", stats.num_running as f64);
        gauge("num_queue_reqs", "Samples that wait", stats.num_waiting as f64);
        gauge("kv_pages_in_use", "Pages of sequences and of kept prefixes", stats.pages_in_use as f64);
        gauge("kv_pages", "Pages in all", stats.pages as f64);
        gauge("kv_page_bytes", "Bytes of a page", stats.page_bytes as f64);
        gauge("token_usage", "Pages in use, of all", stats.pages_in_use as f64 / stats.pages.max(1) as f64);
        gauge("num_prefixes", "States kept for requests that begin alike", stats.num_prefixes as f64);
        gauge("cache_hit_rate", "Tokens of prompts whose state was there, of all", stats.cache_hit_rate());
        gauge("weight_version", "Version of the weights", weight_version as f64);
        gauge("spec_accept_rate", "Drafts that were right, of all", stats.spec_accept_rate().unwrap_or(0.0));
        gauge("spec_accept_length", "Tokens of a pass with a draft", stats.spec_accept_length().unwrap_or(1.0));
        let mut counter = |name: &str, help: &str, value: u64| {
            let counter = Counter::<u64>::default();
            counter.inc_by(value);
            registry.register(name, help, counter);
        };
        counter("prefill_tokens", "Tokens of prompts that went through the model", stats.prefill_tokens);
        counter("cached_tokens", "Tokens of prompts whose state was there", stats.cached_tokens);
        counter("generation_tokens", "Tokens that were drawn", stats.generated_tokens);
        counter("num_finished_samples", "Samples that ended", stats.finished);
        counter("num_aborted_samples", "Samples that were aborted", stats.aborted);
        counter("num_preemptions", "Times that a sequence's memory was given up for others", stats.preemptions);
        counter("num_steps", "Forward passes", stats.steps);
        registry.register("http_responses", "Answers by path and status", self.answers.clone());
        registry.register(
            "time_to_first_token_seconds",
            "From the request to its first word",
            self.first_token.clone(),
        );
        registry.register("e2e_request_latency_seconds", "From the request to its end", self.whole.clone());
        let mut page = String::new();
        encode(&mut page, &registry).expect("a string can be written to");
        page
    }
}
