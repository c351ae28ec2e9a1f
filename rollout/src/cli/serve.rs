//! `rollout serve`: the engine behind HTTP until it is told to end.

use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, bail};
use clap::Args;
use rollout::engine::SchedulerOptions;
use rollout::server::{ServerOptions, serve};
use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};

use super::engine::{EngineArgs, load_engine};
use super::say;

/// Threads that read requests and write answers; forward passes have their own.
const NUM_THREADS: usize = 2;

#[derive(Args, Clone, Debug)]
pub struct ServeArgs {
    /// A checkpoint folder
    #[arg(long)]
    model: PathBuf,
    /// The address to listen at; one that others reach needs an API key
    #[arg(long, default_value = "127.0.0.1")]
    host: IpAddr,
    /// The port; 0 takes a free one
    #[arg(long, default_value_t = 30000)]
    port: u16,
    /// What clients must send as `Authorization: Bearer KEY`; better given as ROLLOUT_API_KEY, which no list of processes shows
    #[arg(long, env = "ROLLOUT_API_KEY", hide_env_values = true)]
    api_key: Option<String>,
    /// What clients call the model; the folder's name unless said
    #[arg(long)]
    served_model_name: Option<String>,
    /// Requests that may wait before others are told to try again later
    #[arg(long, default_value_t = 16384)]
    max_waiting: usize,
    /// Samples of one request, over all its prompts
    #[arg(long, default_value_t = 4096)]
    max_samples: usize,
    /// Longest body of a request, in MiB
    #[arg(long, default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..=4096))]
    max_body_mib: u32,
    /// Seconds that an answer may take
    #[arg(long, default_value_t = 3600, value_parser = clap::value_parser!(u64).range(1..=1_000_000))]
    request_timeout: u64,
    /// Seconds that answers may go on after SIGTERM
    #[arg(long, default_value_t = 60, value_parser = clap::value_parser!(u64).range(0..=1_000_000))]
    drain_timeout: u64,
    /// Record the choices of experts and of the indexer, for `return_routed_experts` and `return_indexer_topk`
    #[arg(long)]
    record_choices: bool,
    #[command(flatten)]
    engine: EngineArgs,
}

pub fn run_serve(args: ServeArgs) -> anyhow::Result<()> {
    let api_key = args.api_key.filter(|key| !key.is_empty());
    if !args.host.is_loopback() && api_key.is_none() {
        bail!(
            "{} can be reached from other machines, expected an API key with it: set ROLLOUT_API_KEY, or listen at 127.0.0.1",
            args.host
        );
    }
    let name = match args.served_model_name {
        Some(name) => name,
        None => {
            let dir = args.model.canonicalize().unwrap_or_else(|_| args.model.clone());
            dir.file_name().map_or("model".into(), |name| name.to_string_lossy().into_owned())
        }
    };
    let options = SchedulerOptions {
        max_waiting: args.max_waiting,
        record_choices: args.record_choices,
        ..args.engine.options()
    };
    let engine = Arc::new(load_engine(&args.model, options)?);
    let server = ServerOptions {
        model_name: name,
        model_dir: args.model,
        api_key,
        max_body_bytes: (args.max_body_mib as usize) << 20,
        max_samples: args.max_samples,
        request_timeout: Duration::from_secs(args.request_timeout),
        drain_timeout: Duration::from_secs(args.drain_timeout),
    };
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(NUM_THREADS)
        .thread_name("serve")
        .enable_all()
        .build()
        .context("cannot start the server's threads")?;
    runtime.block_on(async {
        let mut terminate = signal(SignalKind::terminate()).context("cannot listen for SIGTERM")?;
        let mut interrupt = signal(SignalKind::interrupt()).context("cannot listen for SIGINT")?;
        let address = SocketAddr::new(args.host, args.port);
        let listener = TcpListener::bind(address)
            .await
            .with_context(|| format!("cannot listen at {address}; choose another --port, or end who listens there"))?;
        let address = listener.local_addr().context("cannot tell the address")?;
        let stats = engine.stats();
        say(format!(
            "serving {} at http://{address}: {} threads, {:.0} MiB for sequences, up to {} tokens in one",
            server.model_name,
            engine.options().num_threads,
            (stats.pages * stats.page_bytes) as f64 / f64::from(1 << 20),
            engine.max_sequence_len(),
        ))?;
        let end = async move {
            tokio::select! { _ = terminate.recv() => {}, _ = interrupt.recv() => {} }
            // Who asks twice does not want to wait.
            tokio::spawn(async move {
                tokio::select! { _ = terminate.recv() => {}, _ = interrupt.recv() => {} }
                std::process::exit(130);
            });
        };
        serve(engine, listener, server, end).await.context("the server failed")
    })
}
