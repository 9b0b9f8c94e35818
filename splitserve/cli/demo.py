"""`splitserve demo`: one question, answered by two workers, with its timeline."""

from __future__ import annotations

import asyncio
import logging
import sys
import time
import urllib.request
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
import typer
import uvloop
from rich.markup import escape

from splitserve.cli.serve import console, fail
from splitserve.cluster.runtime import Runtime
from splitserve.config import GatewayConfig, ServeConfig, SplitMode
from splitserve.errors import SplitserveError
from splitserve.model.fetch import ResolvedModel, resolve_model

QUESTION = (
    "In two or three sentences: why does a large language model read a long question much faster "
    "than it writes the answer?"
)


def demo(
    question: Annotated[str, typer.Argument(help="What to ask.")] = QUESTION,
    model: Annotated[
        str | None, typer.Option(help="Alias, directory, GGUF file or hub id.")
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Length of the answer.")] = 96,
    exact: Annotated[bool, typer.Option("--exact", help="See `serve --exact`.")] = False,
) -> None:
    """Start one prefill and one decode worker, ask, stream the answer, show where time went."""
    logging.basicConfig(level="WARNING", format="%(asctime)s %(name)s %(levelname)s %(message)s")
    started_s = time.monotonic()
    config = ServeConfig(
        num_prefill=1,
        num_decode=1,
        port=0,
        exact=exact,
        kv_memory_bytes=256 << 20,
        gateway=GatewayConfig(split=SplitMode.ALWAYS),
    )
    try:
        resolved = resolve_model(model, console.print)
        uvloop.run(_demo(config, resolved, question, max_tokens, started_s))
    except SplitserveError as error:
        fail(error)
    except KeyboardInterrupt:
        sys.exit(130)


async def _demo(
    config: ServeConfig, resolved: ResolvedModel, question: str, max_tokens: int, started_s: float
) -> None:
    runtime = Runtime(config, resolved.path, resolved.name, console.print)
    console.print(f"model {resolved.name} ({resolved.source})")
    for line in runtime.describe_plan():
        console.print(f"  {line}")
    await runtime.start()
    try:
        body = {
            "model": resolved.name,
            "messages": [{"role": "user", "content": question}],
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        console.print(f"\n[bold]{escape(question)}[/bold]\n")
        reply = await asyncio.to_thread(_ask, runtime.url, body)
        timeline = await asyncio.to_thread(
            _get_json, f"{runtime.url}/debug/requests/{reply.request_id}"
        )
        console.print(
            f"\n\n{reply.prompt_tokens} prompt tokens, {reply.output_tokens} output tokens; first "
            f"text {reply.first_text_s - started_s:.1f} s after the command began\n"
        )
        for line in timeline_lines(timeline):
            console.print(line)
    finally:
        await runtime.stop()
    console.print("\nstopped")


@dataclass(slots=True)
class _Reply:
    request_id: str = ""
    prompt_tokens: int = 0
    output_tokens: int = 0
    first_text_s: float = 0.0


def _ask(url: str, body: dict[str, Any]) -> _Reply:
    """Stream the answer to the terminal."""
    reply = _Reply()
    request = urllib.request.Request(
        f"{url}/v1/chat/completions",
        msgspec.json.encode(body),
        {"content-type": "application/json"},
    )
    with _opener.open(request) as response:
        for line in response:
            data = line.removeprefix(b"data: ").strip()
            if data and data != b"[DONE]":
                _take_event(reply, msgspec.json.decode(data))
    return reply


def _take_event(reply: _Reply, event: dict[str, Any]) -> None:
    if "error" in event:
        raise SplitserveError(event["error"]["message"], advice="")
    reply.request_id = event["id"]
    usage = event.get("usage") or {}
    reply.prompt_tokens = usage.get("prompt_tokens", reply.prompt_tokens)
    reply.output_tokens = usage.get("completion_tokens", reply.output_tokens)
    for choice in event["choices"]:
        text = choice["delta"].get("content", "")
        if text:
            reply.first_text_s = reply.first_text_s or time.monotonic()
            sys.stdout.write(text)
            sys.stdout.flush()


def _get_json(url: str) -> dict[str, Any]:
    with _opener.open(url) as response:
        value: dict[str, Any] = msgspec.json.decode(response.read())
        return value


_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""Without the proxies of the environment: the server is on this machine."""


def timeline_lines(timeline: dict[str, Any]) -> list[str]:
    """A request's timeline as lines for a terminal."""
    spans, moments = timeline["spans_ms"], timeline["moments"]
    who = {mark["moment"]: mark["worker"] or "gateway" for mark in moments}
    megabytes = timeline["transfer_bytes"] / 2**20
    moved = f"{megabytes:.1f} MiB, proof: {timeline['transfer_proof']}"
    rows = (
        ("queue", "prefill_started", "waited for the prefill worker"),
        ("prefill", "prefill_ended", f"{timeline['cached_tokens']} prompt tokens cached"),
        ("transfer", "transfer_ended", moved),
        ("handoff_gap", "second_token", "first to second token, transfer included"),
        ("decode", "finished", f"{timeline['output_tokens']} tokens in all"),
    )
    lines = ["phase           ms  worker     "]
    for name, moment, text in rows:
        if name in spans:
            worker = who["second_token"] if name == "decode" else who[moment]
            lines.append(f"{name:11s} {spans[name]:7.1f}  {worker:10s} {text}")
    tpot = f", TPOT {spans['tpot']:.1f} ms" if "tpot" in spans else ""
    lines.append(f"TTFT {spans['ttft']:.1f} ms{tpot}, total {spans['total']:.1f} ms")
    return lines
