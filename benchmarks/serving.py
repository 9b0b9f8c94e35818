"""Split against colocated on equal hardware: the same requests, the same two cores.

For each of three settings (one prefill and one decode worker; two mixed workers with chunked
prefill; two mixed workers, prompts first and whole) a real server answers the same closed-loop load
through HTTP. Printed: TTFT, TPOT and gaps between tokens as clients see them, request rate, and the
share of requests within both SLOs. There is no ceiling to a closed loop but the slowest part: the
prefill rate that one core reaches is printed beside. The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import time
from dataclasses import dataclass, field

import numpy as np
import uvloop
from openai import AsyncOpenAI

from splitserve.cluster.runtime import Runtime
from splitserve.config import GatewayConfig, ServeConfig, SplitMode
from splitserve.model.fetch import resolve_model

SETTINGS = {
    "split 1P1D": {"num_prefill": 1, "num_decode": 1},
    "mixed 2 chunked": {"num_mixed": 2},
    "mixed 2 unchunked": {"num_mixed": 2, "chunked_prefill": False},
}


@dataclass
class Seen:
    """What clients measured, in seconds."""

    ttft: list[float] = field(default_factory=list)
    tpot: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)


async def one(client: AsyncOpenAI, model: str, prompt: str, max_tokens: int, seen: Seen) -> None:
    start = time.perf_counter()
    times: list[float] = []
    stream = await client.completions.create(
        model=model,
        prompt=prompt,
        max_tokens=max_tokens,
        temperature=0,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    async for event in stream:
        if event.choices and event.choices[0].text:
            times.append(time.perf_counter())
    seen.ttft.append(times[0] - start)
    if len(times) > 1:
        seen.tpot.append((times[-1] - times[0]) / (len(times) - 1))
        seen.gaps += [b - a for a, b in itertools.pairwise(times)]


async def load(url: str, model: str, args: argparse.Namespace) -> tuple[Seen, float]:
    """`clients` at once, each `requests` in turn, no two prompts alike."""
    client = AsyncOpenAI(base_url=f"{url}/v1", api_key="-", max_retries=0, timeout=600)
    seen = Seen()

    async def loop(number: int) -> None:
        chooser = np.random.default_rng(number)
        for _ in range(args.requests):
            words = int(chooser.integers(args.words // 2, args.words * 3 // 2))
            prompt = " ".join(f"w{x}" for x in chooser.integers(0, 99999, words))
            await one(client, model, prompt, args.tokens, seen)

    await one(client, model, "warm up", 4, Seen())
    start = time.perf_counter()
    await asyncio.gather(*(loop(i) for i in range(args.clients)))
    return seen, time.perf_counter() - start


async def measure(name: str, args: argparse.Namespace) -> dict[str, float]:
    model = resolve_model(None, lambda _: None)
    config = ServeConfig(
        port=0,
        kv_memory_bytes=512 << 20,
        gateway=GatewayConfig(split=SplitMode.AUTO),
        **SETTINGS[name],
    )
    runtime = Runtime(config, model.path, model.name, lambda _: None)
    await runtime.start()
    try:
        seen, wall_s = await load(runtime.url, model.name, args)
    finally:
        await runtime.stop()
    good = sum(
        t <= args.ttft_slo and p <= args.tpot_slo for t, p in zip(seen.ttft, seen.tpot, strict=True)
    )
    row = {
        "ttft_p50": float(np.quantile(seen.ttft, 0.5)),
        "ttft_p90": float(np.quantile(seen.ttft, 0.9)),
        "tpot_p50": float(np.quantile(seen.tpot, 0.5)),
        "tpot_p90": float(np.quantile(seen.tpot, 0.9)),
        "gap_p99": float(np.quantile(seen.gaps, 0.99)),
        "requests_per_s": len(seen.ttft) / wall_s,
        "attainment": good / len(seen.ttft),
    }
    print(
        f"{name:18s} TTFT p50 {row['ttft_p50']:5.2f} p90 {row['ttft_p90']:5.2f} s   "
        f"TPOT p50 {row['tpot_p50'] * 1e3:4.0f} p90 {row['tpot_p90'] * 1e3:4.0f} ms   "
        f"gap p99 {row['gap_p99'] * 1e3:5.0f} ms   {row['requests_per_s']:.2f} req/s   "
        f"within SLO {row['attainment']:.0%}",
        flush=True,
    )
    return {key: round(value, 4) for key, value in row.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=6)
    parser.add_argument("--requests", type=int, default=4)
    parser.add_argument("--words", type=int, default=40, help="mean; about 5 tokens each")
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--ttft-slo", type=float, default=3.0)
    parser.add_argument("--tpot-slo", type=float, default=0.2)
    args = parser.parse_args()
    print(
        f"{args.clients} clients x {args.requests} requests, about {args.words * 5} prompt and "
        f"{args.tokens} output tokens; SLO: TTFT {args.ttft_slo} s, TPOT {args.tpot_slo} s"
    )
    rows = {name: uvloop.run(measure(name, args)) for name in SETTINGS}
    print(json.dumps({"benchmark": "serving", **rows}))


if __name__ == "__main__":
    main()
