//! `rollout serve` over real sockets: what clients are told, that nothing is left of those that go away, and that the
//! server ends well.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

const DEADLINE: Duration = Duration::from_secs(30);

fn base() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../recipes/quickstart_base")
}

struct Server {
    process: Child,
    address: String,
}

struct Reply {
    status: u16,
    head: String,
    body: String,
}

impl Reply {
    fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|error| panic!("{error}: {}", self.body))
    }

    /// The objects of a stream, whose end must be there.
    fn events(&self) -> Vec<Value> {
        let data: Vec<&str> = self.body.lines().filter_map(|line| line.strip_prefix("data: ")).collect();
        assert_eq!(data.last(), Some(&"[DONE]"), "{}", self.body);
        data[..data.len() - 1].iter().map(|data| serde_json::from_str(data).expect("JSON")).collect()
    }

    fn error(&self) -> String {
        self.json()["error"]["message"].as_str().expect("a sentence").to_owned()
    }
}

impl Server {
    fn start(model: &std::path::Path, arguments: &[&str]) -> Self {
        let mut process = Command::new(env!("CARGO_BIN_EXE_rollout"))
            .args(["serve", "--port", "0", "--threads", "1", "--kv-cache-mib", "64", "--model"])
            .arg(model)
            .args(arguments)
            .stdout(Stdio::piped())
            .spawn()
            .expect("starts");
        let mut line = String::new();
        BufReader::new(process.stdout.take().expect("piped")).read_line(&mut line).expect("a line");
        let address = line.split("http://").nth(1).and_then(|rest| rest.split(": ").next()).expect("an address");
        Self { address: address.to_owned(), process }
    }

    fn connect(&self, method: &str, path: &str, head: &str, body: &str) -> TcpStream {
        let mut stream = TcpStream::connect(&self.address).expect("listens");
        stream.set_read_timeout(Some(DEADLINE)).expect("a limit");
        let request = format!(
            "{method} {path} HTTP/1.1\r\nHost: test\r\nConnection: close\r\nContent-Type: application/json\r\n\
             Content-Length: {}\r\n{head}\r\n{body}",
            body.len()
        );
        // A server that refuses a body early may close before all of it is written.
        let _ = stream.write_all(request.as_bytes());
        stream
    }

    fn ask(&self, method: &str, path: &str, head: &str, body: &str) -> Reply {
        let mut text = Vec::new();
        self.connect(method, path, head, body).read_to_end(&mut text).expect("an answer");
        let text = String::from_utf8(text).expect("UTF-8");
        let (head, body) = text.split_once("\r\n\r\n").expect("a head");
        let status = head.split(' ').nth(1).and_then(|status| status.parse().ok()).expect("a status");
        let is_chunked = head.to_lowercase().contains("transfer-encoding: chunked");
        let body = if is_chunked { dechunk(body) } else { body.to_owned() };
        Reply { status, head: head.to_lowercase(), body }
    }

    fn post(&self, path: &str, body: &Value) -> Reply {
        self.ask("POST", path, "", &body.to_string())
    }

    fn get(&self, path: &str) -> Value {
        self.ask("GET", path, "", "").json()
    }

    /// Waits until `server_info` satisfies something.
    fn wait(&self, what: &str, is_so: impl Fn(&Value) -> bool) {
        let start = Instant::now();
        while !is_so(&self.get("/server_info")) {
            assert!(start.elapsed() < DEADLINE, "{what} did not come: {}", self.get("/server_info"));
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    fn is_idle(&self) {
        self.wait("an idle engine", |info| info["num_running_reqs"] == 0 && info["num_queue_reqs"] == 0);
    }

    fn signal(&self, name: &str) {
        let pid = self.process.id().to_string();
        assert!(Command::new("kill").args([name, &pid]).status().expect("kill").success());
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn dechunk(mut body: &str) -> String {
    let mut text = String::new();
    while let Some((len, rest)) = body.split_once("\r\n") {
        let len = usize::from_str_radix(len, 16).expect("a length");
        text.push_str(&rest[..len]);
        body = rest[len..].strip_prefix("\r\n").expect("a border");
        if len == 0 {
            break;
        }
    }
    text
}

/// A completion that takes long: thousands of tokens, one by one.
fn long() -> Value {
    json!({"prompt": "sun", "max_tokens": 4000, "ignore_eos": true, "stream": true})
}

#[test]
fn completions_say_the_same_whole_and_in_pieces() {
    let server = Server::start(&base(), &[]);
    let mut body = json!({
        "model": "quickstart_base", "prompt": ["Spell: sun", "bear"], "n": 2, "max_tokens": 12, "seed": 5,
        "logprobs": 2, "temperature": 1.3, "stop": ["e"],
    });
    let whole = server.post("/v1/completions", &body);
    assert_eq!(whole.status, 200, "{}", whole.body);
    let whole = whole.json();
    assert_eq!(whole["choices"].as_array().map(Vec::len), Some(4));
    assert_eq!(
        whole["choices"],
        server.post("/v1/completions", &body).json()["choices"],
        "a seed gives the same again"
    );
    body["stream"] = true.into();
    body["stream_options"] = json!({"include_usage": true});
    let pieces = server.post("/v1/completions", &body).events();
    let (usage, pieces) = pieces.split_last().expect("a last one");
    assert_eq!(usage["usage"]["total_tokens"], whole["usage"]["total_tokens"]);
    for choice in whole["choices"].as_array().expect("choices") {
        let of_it =
            || pieces.iter().map(|piece| &piece["choices"][0]).filter(|piece| piece["index"] == choice["index"]);
        let text: String = of_it().filter_map(|piece| piece["text"].as_str()).collect();
        assert_eq!(choice["text"], text);
        let logprobs: Vec<&Value> =
            of_it().filter_map(|piece| piece["logprobs"]["token_logprobs"].as_array()).flatten().collect();
        let want: Vec<&Value> = choice["logprobs"]["token_logprobs"].as_array().expect("logprobs").iter().collect();
        assert_eq!(logprobs[..want.len()], want);
        assert_eq!(of_it().next_back().expect("an end")["finish_reason"], choice["finish_reason"]);
    }
}

#[test]
fn generate_tells_what_a_trainer_needs() {
    let server = Server::start(&base(), &["--record-choices"]);
    let body = json!({
        "input_ids": [40, 41, 42, 43, 44], "return_logprob": true, "top_logprobs_num": 2, "rollout_id": 7,
        "sampling_params": {"max_new_tokens": 6, "sampling_seed": 3, "temperature": 0.7, "ignore_eos": true},
        "return_routed_experts": true, "return_indexer_topk": true,
    });
    let told = server.post("/generate", &body).json();
    let meta = &told["meta_info"];
    let ids: Vec<u64> = told["output_ids"].as_array().expect("ids").iter().filter_map(Value::as_u64).collect();
    assert_eq!(ids.len(), 6);
    let of = |key: &str| meta[key].as_array().unwrap_or_else(|| panic!("no {key}")).clone();
    for (token, [drawn, own]) in ids
        .iter()
        .zip(of("output_token_logprobs").iter().zip(of("output_token_base_logprobs")).map(|(a, b)| [a.clone(), b]))
    {
        assert_eq!(drawn[1].as_u64(), Some(*token));
        assert_ne!(drawn[0], own[0], "at 0.7 the two distributions differ");
    }
    assert!(of("output_top_logprobs").iter().all(|top| top.as_array().map(Vec::len) == Some(2)));
    assert_eq!(meta["weight_versions"], json!([{"version": "0", "start": 0, "end": 6}]));
    assert_eq!(meta["finish_reason"], json!({"type": "length", "length": 6}));
    // 10 tokens went through the model: 4 layers with 2 experts each, 2 CSA layers with 4 blocks each.
    let len = |key: &str| meta[key].as_str().map(|text| text.trim_end_matches('=').len() * 3 / 4);
    assert_eq!((len("routed_experts"), len("indexer_topk")), (Some(10 * 4 * 2 * 4), Some(10 * 2 * 4 * 4)));
    let mut streamed = body.clone();
    streamed["stream"] = true.into();
    let last = server.post("/generate", &streamed).events().pop().expect("an end");
    assert_eq!(last["output_ids"], told["output_ids"], "the same seed and rollout");
    assert_eq!(last["meta_info"]["output_token_logprobs"], meta["output_token_logprobs"]);
    let many = server.post("/generate", &json!({"text": ["a", "b"], "sampling_params": {"max_new_tokens": 1, "n": 2}}));
    assert_eq!(many.json().as_array().map(Vec::len), Some(4));
}

#[test]
fn a_response_goes_on_under_new_weights_and_a_published_number_ends_nothing() {
    let server = Server::start(&base(), &[]);
    let asks: Vec<_> = (0..4)
        .map(|i| {
            let body = json!({"text": format!("sun {i}"), "return_logprob": true,
                "sampling_params": {"max_new_tokens": 600, "ignore_eos": true}});
            server.connect("POST", "/generate", "", &body.to_string())
        })
        .collect();
    server.wait("four at work", |info| info["num_running_reqs"] == 4);
    assert_eq!(server.post("/pause_generation", &json!({"mode": "in_place"})).status, 200);
    assert_eq!(server.post("/flush_cache", &json!({})).status, 400, "their state is held");
    assert_eq!(server.post("/update_weight_version", &json!({"new_version": "3"})).status, 200);
    assert_eq!(server.post("/update_weight_version", &json!({"new_version": 3})).status, 400, "it must count up");
    server.post("/continue_generation", &json!({}));
    assert_eq!(server.post("/pause_generation", &json!({"mode": "retract"})).status, 200);
    let update = server.post("/update_weights_from_disk", &json!({"model_path": base(), "keep_pause": true}));
    assert_eq!(update.status, 200, "{}", update.body);
    assert_eq!(server.post("/flush_cache", &json!({})).status, 200, "after a retraction nothing is held");
    assert_eq!(server.get("/server_info")["kv_pages_in_use"], 0);
    let wrong = json!({"model_path": base(), "checksum": "1"});
    let wrong = server.post("/update_weights_from_disk", &wrong);
    assert!(wrong.status == 400 && wrong.error().contains("keeps version 4"), "{}", wrong.body);
    server.post("/continue_generation", &json!({}));
    for mut ask in asks {
        let mut text = String::new();
        ask.read_to_string(&mut text).expect("an answer");
        let told: Value = serde_json::from_str(text.split_once("\r\n\r\n").expect("a head").1).expect("JSON");
        let meta = &told["meta_info"];
        assert_eq!(meta["finish_reason"]["type"], "length", "none was aborted");
        let spans = meta["weight_versions"].as_array().expect("spans");
        let (first, last) = (spans.first().expect("one"), spans.last().expect("one"));
        assert!(first["version"] != "4" && last["version"] == "4" && last["end"] == 600, "{spans:?}");
        let anew = meta["recomputed"].as_array().expect("places").last().expect("one").clone();
        assert_eq!((&anew["position"], &anew["version"]), (&last["start"], &json!("4")), "on a state made anew");
    }
}

#[test]
fn an_aborted_response_goes_on_where_it_was() {
    let server = Server::start(&base(), &[]);
    let mut body = json!({"text": "sun", "rid": "one", "return_logprob": true, "rollout_id": 9,
        "sampling_params": {"max_new_tokens": 3000, "ignore_eos": true, "sampling_seed": 2}});
    let whole = server.post("/generate", &body).json();
    let mut first = server.connect("POST", "/generate", "", &body.to_string());
    server.wait("one at work", |info| info["num_running_reqs"] == 1);
    let again = server.post("/generate", &body);
    assert!(again.status == 400 && again.error().contains("rid"), "{}", again.body);
    server.post("/abort_request", &json!({"rid": "one"}));
    let mut text = String::new();
    first.read_to_string(&mut text).expect("an answer");
    let part: Value = serde_json::from_str(text.split_once("\r\n\r\n").expect("a head").1).expect("JSON");
    assert_eq!(part["meta_info"]["finish_reason"]["type"], "abort");
    body["resume"] = part["meta_info"]["resume"].clone();
    let rest = server.post("/generate", &body).json();
    assert_eq!(rest["output_ids"], whole["output_ids"]);
    assert_eq!(rest["meta_info"]["output_token_logprobs"], whole["meta_info"]["output_token_logprobs"]);
}

#[test]
fn wrong_requests_are_told_in_a_sentence() {
    let server = Server::start(&base(), &["--max-body-mib", "1", "--max-samples", "8"]);
    let complete = |more: Value| {
        let mut body = json!({"prompt": "a", "max_tokens": 1});
        body.as_object_mut().expect("an object").extend(more.as_object().expect("an object").clone());
        server.post("/v1/completions", &body)
    };
    for (more, status, sentence) in [
        (json!({"temperature": -1}), 400, "`temperature` is -1, expected a number from 0 on"),
        (json!({"temperature": "hot"}), 400, "`temperature`: invalid type: string \"hot\", expected f32"),
        (
            json!({"max_tokens": 1, "min_tokens": 2}),
            400,
            "`min_tokens` is 2, expected at most `max_tokens`, which is 1",
        ),
        (json!({"top_k": -2}), 400, "`top_k` is -2, expected -1 or a number of tokens"),
        (json!({"prompt": [9999]}), 400, "token 9999 at position 0 is outside the model's vocabulary of 272"),
        (json!({"prompt": ""}), 400, "the prompt has no token, expected at least one"),
        (json!({"prompt": ["a", ""]}), 400, "prompt 1: the prompt has no token, expected at least one"),
        (json!({"n": 9}), 400, "9 samples are asked for in one request, expected at most 8; split it"),
        (json!({"n": 0}), 400, "no sample is asked for, expected at least one"),
        (json!({"suffix": "b"}), 400, "`suffix` is no field of /v1/completions here; leave it out"),
        (json!({"logit_bias": {"x": 1}}), 400, "`logit_bias` is for \"x\", expected tokens as keys"),
        (
            json!({"model": "gpt"}),
            404,
            "there is no model \"gpt\" here, expected \"quickstart_base\", which GET /v1/models lists",
        ),
    ] {
        let reply = complete(more);
        assert_eq!((reply.status, reply.error().as_str()), (status, sentence));
    }
    let reply = complete(json!({"max_token": 3}));
    assert!(reply.status == 400 && reply.error().starts_with("`max_token`: unknown field"), "{}", reply.body);
    let reply = server.ask("POST", "/v1/completions", "", "{\"prompt\": ");
    assert_eq!((reply.status, reply.error().starts_with("the body is no JSON: EOF")), (400, true), "{}", reply.body);
    let reply = server.ask("POST", "/v1/completions", "", &format!("{{\"prompt\": \"{}\"}}", "a".repeat(1 << 20)));
    assert_eq!(reply.status, 413, "{}", reply.body);
    assert_eq!(server.ask("GET", "/generate", "", "").status, 405);
    assert_eq!(server.ask("GET", "/nowhere", "", "").status, 404);
    let reply = server.post("/generate", &json!({"text": "a", "return_hidden_states": true}));
    assert_eq!(
        (reply.status, reply.error().as_str()),
        (501, "this engine has no `return_hidden_states`; leave it out")
    );
    assert_eq!(server.post("/load_lora_adapter", &json!({})).status, 501);
    let reply = server.post("/v1/chat/completions", &json!({"messages": [{"role": "robot", "content": "a"}]}));
    assert!(reply.status == 400 && reply.error().starts_with("message 0: unknown variant `robot`"), "{}", reply.body);
    server.is_idle();
}

#[test]
fn what_is_null_is_left_out() {
    let server = Server::start(&base(), &[]);
    for path in ["/v1/completions", "/generate"] {
        let mut body = json!({"rid": null, "stream": null, "sampling_params": null});
        let names =
            ["temperature", "top_p", "top_k", "stop", "stop_token_ids", "seed", "n", "logit_bias", "ignore_eos"];
        if path == "/generate" {
            body["text"] = "a".into();
            let params = names.into_iter().filter(|name| *name != "seed").map(|name| (name.to_owned(), Value::Null));
            body["sampling_params"] = Value::Object(params.collect());
            body["sampling_params"]["max_new_tokens"] = 2.into();
        } else {
            body.as_object_mut().expect("an object").remove("sampling_params");
            body["prompt"] = "a".into();
            body["max_tokens"] = 2.into();
            names.into_iter().chain(["stream_options", "logprobs", "echo"]).for_each(|name| body[name] = Value::Null);
        }
        let reply = server.post(path, &body);
        assert_eq!(reply.status, 200, "{path}: {}", reply.body);
    }
}

#[test]
fn a_prompt_is_scored_where_that_is_asked_for() {
    let server = Server::start(&base(), &[]);
    let tokens: Vec<u32> = (0..150).map(|i| 100 + i * 7 % 150).collect();
    // Twice: the second time its state is kept, and must not be used for what is scored.
    for round in 0..2 {
        let score = |from: i64, more: Value| {
            let mut body = json!({"input_ids": tokens, "return_logprob": true, "logprob_start_len": from,
                "top_logprobs_num": 2, "sampling_params": {"max_new_tokens": 0}});
            body.as_object_mut().expect("an object").extend(more.as_object().expect("an object").clone());
            server.post("/generate", &body)
        };
        let whole = score(0, json!({})).json();
        let (meta, all) = (&whole["meta_info"], &whole["meta_info"]["input_token_logprobs"]);
        assert_eq!((meta["completion_tokens"].as_u64(), &meta["finish_reason"]["type"]), (Some(0), &json!("length")));
        let all = all.as_array().expect("an array");
        assert_eq!((all.len(), &all[0]), (150, &json!([null, 100, null])));
        assert!(all[1..].iter().all(|one| one[0].as_f64().is_some_and(|p| p < 0.0)), "{all:?}");
        assert_eq!(meta["input_top_logprobs"].as_array().map(Vec::len), Some(150));
        // From a later position on they are the same, with what was not asked for left out.
        let late = score(100, json!({})).json();
        let cached = late["meta_info"]["cached_tokens"].as_u64().expect("a number");
        assert!(cached <= 99, "round {round}: {cached} tokens");
        assert_eq!(late["meta_info"]["input_token_logprobs"].as_array().expect("an array"), &all[100..]);
        let streamed = score(0, json!({"stream": true, "sampling_params": {"max_new_tokens": 3}})).events();
        assert!(
            streamed
                .iter()
                .all(|told| &told["meta_info"]["input_token_logprobs"]
                    == meta.get("input_token_logprobs").expect("there"))
        );
        // OpenAI's way to ask, as evaluation harnesses do.
        let body = json!({"prompt": tokens, "echo": true, "logprobs": 1, "max_tokens": 0});
        let echoed = server.post("/v1/completions", &body).json();
        let logprobs = &echoed["choices"][0]["logprobs"];
        let expected: Vec<&Value> = all.iter().map(|one| &one[0]).collect();
        assert_eq!(logprobs["token_logprobs"].as_array().expect("an array").iter().collect::<Vec<_>>(), expected);
        assert_eq!(logprobs["tokens"].as_array().map(Vec::len), Some(150));
        assert!(!echoed["choices"][0]["text"].as_str().expect("a text").is_empty());
        let body = json!({"prompt": tokens, "echo": true, "logprobs": 1, "max_tokens": 4, "stream": true, "seed": 1});
        let events = server.post("/v1/completions", &body).events();
        let told = |event: &Value| event["choices"][0]["logprobs"]["token_logprobs"].as_array().map_or(0, Vec::len);
        assert!(told(&events[0]) == 151 && events[1..].iter().all(|event| told(event) <= 1), "{events:?}");
    }
    server.is_idle();
}

#[test]
fn only_who_has_the_key_may_ask() {
    let server = Server::start(&base(), &["--api-key", "secret"]);
    let ask = |head: &str| server.ask("GET", "/v1/models", head, "").status;
    assert_eq!(ask(""), 401);
    assert_eq!(ask("Authorization: Bearer secre\r\n"), 401);
    assert_eq!(ask("Authorization: Bearer secrets\r\n"), 401);
    assert_eq!(ask("Authorization: Bearer secret\r\n"), 200);
    assert_eq!(server.ask("GET", "/health", "", "").status, 200, "a probe has no key");
    let open = Command::new(env!("CARGO_BIN_EXE_rollout"))
        .args(["serve", "--host", "0.0.0.0", "--model"])
        .arg(base())
        .env_remove("ROLLOUT_API_KEY")
        .output()
        .expect("runs");
    assert_eq!(open.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&open.stderr).contains("expected an API key"), "{open:?}");
}

#[test]
fn who_goes_away_leaves_nothing_behind() {
    let server = Server::start(&base(), &["--no-prefix-cache"]);
    for round in 0..20 {
        let mut body = long();
        body["stream"] = (round % 2 == 0).into();
        let mut stream = server.connect("POST", "/v1/completions", "", &body.to_string());
        if round % 2 == 0 {
            stream.read_exact(&mut [0; 400]).expect("the first words");
        } else if round % 3 > 0 {
            server.wait("one at work", |info| info["num_running_reqs"] != 0);
        }
        drop(stream);
    }
    server.is_idle();
    assert_eq!(server.get("/server_info")["kv_pages_in_use"], 0);
}

#[test]
fn too_many_are_told_to_come_back() {
    let server = Server::start(&base(), &["--max-waiting", "2"]);
    server.post("/pause_generation", &json!({"mode": "in_place"}));
    assert_eq!(server.get("/health")["status"], "paused");
    let waiting: Vec<_> = (0..2).map(|_| server.connect("POST", "/v1/completions", "", &long().to_string())).collect();
    server.wait("two that wait", |info| info["num_queue_reqs"] == 2);
    let reply = server.post("/v1/completions", &long());
    assert_eq!(
        (reply.status, reply.error().as_str()),
        (429, "2 requests are waiting, which is as many as may: try again later")
    );
    assert!(reply.head.contains("retry-after: 1"), "{}", reply.head);
    drop(waiting);
    server.is_idle();
}

#[test]
fn what_is_being_answered_is_answered_before_the_end() {
    let mut server = Server::start(&base(), &[]);
    let mut stream = server.connect("POST", "/v1/completions", "", &long().to_string());
    stream.read_exact(&mut [0; 400]).expect("the first words");
    server.signal("-TERM");
    let mut text = String::new();
    stream.read_to_string(&mut text).expect("the rest");
    assert!(text.contains("\"finish_reason\":\"length\"") && text.contains("[DONE]"), "{text:.300}");
    assert_eq!(server.process.wait().expect("ends").code(), Some(0));
    // One that takes too long ends with what it has.
    let mut server = Server::start(&base(), &["--drain-timeout", "0"]);
    let mut stream = server.connect("POST", "/v1/completions", "", &long().to_string());
    stream.read_exact(&mut [0; 400]).expect("the first words");
    server.signal("-TERM");
    let mut text = String::new();
    stream.read_to_string(&mut text).expect("the rest");
    assert!(text.contains("\"finish_reason\":\"abort\""), "{text:.300}");
    assert_eq!(server.process.wait().expect("ends").code(), Some(0));
}

/// The base with a tokenizer that knows V4's chat: some of its words become the control tokens.
fn chat_model() -> tempfile::TempDir {
    let dir = tempfile::tempdir().expect("a folder");
    for name in ["config.json", "model.safetensors"] {
        std::fs::copy(base().join(name), dir.path().join(name)).expect("copies");
    }
    let mut json: Value =
        serde_json::from_slice(&std::fs::read(base().join("tokenizer.json")).expect("reads")).expect("JSON");
    for (token, spelling) in [(260, "<think>"), (261, "</think>"), (262, "｜DSML｜")] {
        let added = json["added_tokens"].as_array_mut().expect("added tokens");
        let added = added.iter_mut().find(|added| added["id"] == token).expect("a word");
        let word = std::mem::replace(&mut added["content"], spelling.into());
        added["normalized"] = false.into();
        let vocabulary = json["model"]["vocab"].as_object_mut().expect("a vocabulary");
        vocabulary.shift_remove(word.as_str().expect("a word"));
        vocabulary.insert(spelling.into(), token.into());
    }
    std::fs::write(dir.path().join("tokenizer.json"), json.to_string()).expect("writes");
    dir
}

#[test]
fn chats_say_the_same_whole_and_in_pieces() {
    let dir = chat_model();
    let server = Server::start(dir.path(), &["--served-model-name", "tiny"]);
    let end_of_thinking = json!({"261": 6});
    for (thinking, n) in [(false, 1), (true, 3)] {
        let mut body = json!({
            "model": "tiny", "messages": [{"role": "system", "content": "short"}, {"role": "user", "content": "sun"}],
            "n": n, "seed": 4, "max_completion_tokens": 20, "logprobs": true, "top_logprobs": 1,
            "chat_template_kwargs": {"thinking": thinking}, "logit_bias": end_of_thinking,
        });
        let whole = server.post("/v1/chat/completions", &body);
        assert_eq!(whole.status, 200, "{}", whole.body);
        let whole = whole.json();
        body["stream"] = true.into();
        let pieces = server.post("/v1/chat/completions", &body).events();
        for choice in whole["choices"].as_array().expect("choices") {
            let of_it = || pieces.iter().map(|piece| &piece["choices"][0]).filter(|p| p["index"] == choice["index"]);
            let join = |key: &str| of_it().filter_map(|piece| piece["delta"][key].as_str()).collect::<String>();
            let (content, reasoning) = (&choice["message"]["content"], &choice["message"]["reasoning_content"]);
            if choice["finish_reason"] != "abort" {
                assert_eq!(content.as_str(), Some(join("content").as_str()), "{choice}");
                assert_eq!(reasoning.as_str().unwrap_or_default(), join("reasoning_content"), "{choice}");
            }
            assert_eq!(of_it().next_back().expect("an end")["finish_reason"], choice["finish_reason"]);
            assert_eq!(reasoning.is_null(), !thinking);
        }
    }
    let metrics = server.ask("GET", "/metrics", "", "").body;
    let counted = metrics.contains("furlong_http_responses_total{path=\"/v1/chat/completions\",status=\"200\"} 4");
    assert!(counted && metrics.contains("furlong_e2e_request_latency_seconds_count 4"), "{metrics}");
}
