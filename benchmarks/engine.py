"""The engine's own speed on one core, beside transformers and the machine's ceilings.

Same model, float32, one thread, interleaved in one run: prefill of 512 tokens, and decode steps at
context 512 with batch 1 and 16, by our runner (default and exact mode) and by transformers with its
own cache. Ceilings: GEMM rate for prefill, weights and KV read at memory bandwidth for decode.
Then decode with int8 weights against float32, and what a step costs besides the model: scheduling,
bookkeeping and wire at batch 16, sampling 16 rows, keys. The last line is JSON.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from splitserve import wire
from splitserve.clock import MonotonicClock
from splitserve.connector.local import make_local
from splitserve.engine.engine import Engine
from splitserve.engine.scheduler import Scheduler, SchedulerConfig
from splitserve.engine.step import Draw, PlanItem, StepPlan, StepResult
from splitserve.kv.keys import granule_keys
from splitserve.kv.lease import LeaseTable
from splitserve.kv.pool import BlockPool
from splitserve.model import loader
from splitserve.model.fetch import resolve_model
from splitserve.model.runner import TorchRunner
from splitserve.model.sampling import draw_batch
from splitserve.model.simulated import SimulatedRunner, simulated_format
from splitserve.sampling import Sampling

CONTEXT = 512
BLOCK = 16
REPEATS = 3
DECODE_STEPS = 8


def best_s(work: Callable[[], object], repeats: int = REPEATS) -> float:
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times)


def plan(batch: int, start: int, count: int, prompt: list[int]) -> StepPlan:
    per = CONTEXT // BLOCK + 2
    greedy = Sampling(seed=0, max_tokens=100, temperature=0.0)
    return StepPlan(
        [
            PlanItem(
                f"r{i}",
                prompt[:count],
                start,
                list(range(i * per, (i + 1) * per)),
                Draw(greedy, prompt, []),
            )
            for i in range(batch)
        ]
    )


class Transformers:
    """The reference: the same weights with SDPA and a dynamic cache."""

    def __init__(self, path: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.float32, attn_implementation="sdpa"
        ).eval()

    @torch.no_grad()
    def prefill(self, ids: torch.Tensor) -> object:
        return self.model(ids, use_cache=True, logits_to_keep=1)

    @torch.no_grad()
    def decode_s(self, ids: torch.Tensor) -> float:
        """Seconds per decode step after `ids` [batch, context]."""
        past = None
        output = self.model(ids, use_cache=True, logits_to_keep=1)
        past = getattr(output, "cache", None) or output.past_key_values
        token = ids[:, -1:]
        times = []
        for _ in range(DECODE_STEPS):
            start = time.perf_counter()
            kwargs = {"cache" if hasattr(output, "cache") else "past_key_values": past}
            output = self.model(token, use_cache=True, logits_to_keep=1, **kwargs)
            past = getattr(output, "cache", None) or output.past_key_values
            times.append(time.perf_counter() - start)
        return min(times)


def main() -> None:
    torch.set_num_threads(1)
    path = resolve_model(None, print).path
    loaded = loader.load(path)
    kv_format = loaded.kv_format(BLOCK)
    blocks = np.zeros((16 * (CONTEXT // BLOCK + 2), kv_format.block_bytes), np.uint8)
    runners = {
        "ours": TorchRunner(loaded, blocks, BLOCK),
        "ours exact": TorchRunner(loaded, blocks, BLOCK, exact=True),
    }
    reference = Transformers(path)
    prompt = [int(x) for x in np.random.default_rng(0).integers(100, 40_000, CONTEXT)]
    ids = torch.tensor([prompt])
    num_weights = loaded.info.weights_bytes // 4
    a, b = torch.randn(512, 576), torch.randn(1536, 576)
    gemm_s = best_s(lambda: torch.nn.functional.linear(a, b), 30)
    gemm_flops = 2 * 512 * 576 * 1536 / gemm_s
    big = np.ones(1 << 27, np.float32)
    read_gb = big.nbytes / best_s(lambda: big.sum(), 5) / 1e9
    print(f"ceilings: GEMM {gemm_flops / 1e9:.0f} GFLOP/s, memory read {read_gb:.1f} GB/s")
    ideal_s = 2 * num_weights * CONTEXT / gemm_flops
    result: dict[str, float] = {}

    theirs = best_s(lambda: reference.prefill(ids))
    print(f"\nprefill {CONTEXT} tokens (GEMM ceiling {CONTEXT / ideal_s:.0f} tok/s)")
    print(f"  transformers {CONTEXT / theirs:7.0f} tok/s")
    for name, runner in runners.items():
        ours = best_s(lambda runner=runner: runner.execute(plan(1, 0, CONTEXT, prompt)))
        print(f"  {name:12s} {CONTEXT / ours:7.0f} tok/s  {theirs / ours:.2f}x")
        result[f"prefill_{name.replace(' ', '_')}"] = round(theirs / ours, 3)

    for batch in (1, 16):
        theirs = reference.decode_s(ids.expand(batch, -1).contiguous())
        kv_bytes = batch * CONTEXT * kv_format.block_bytes // BLOCK
        floor_ms = (num_weights * 4 + kv_bytes) / read_gb / 1e6
        print(f"\ndecode batch {batch} at context {CONTEXT} (bandwidth ceiling {floor_ms:.0f} ms)")
        print(f"  transformers {theirs * 1e3:7.1f} ms")
        for name, runner in runners.items():
            runner.execute(plan(batch, 0, CONTEXT, prompt))
            step = plan(batch, CONTEXT, 1, prompt)
            ours = best_s(lambda runner=runner, step=step: runner.execute(step), DECODE_STEPS)
            print(f"  {name:12s} {ours * 1e3:7.1f} ms  {theirs / ours:.2f}x")
            result[f"decode_{batch}_{name.replace(' ', '_')}"] = round(theirs / ours, 3)
    runner = runners["ours"]
    prompt_plan, step = plan(1, 0, CONTEXT, prompt), plan(1, CONTEXT, 1, prompt)
    runner.execute(prompt_plan)
    loaded.packing.quantize()
    times = {}
    for int8 in (False, True):
        loaded.packing.int8 = int8
        times[int8] = best_s(lambda: runner.execute(step), DECODE_STEPS)
    loaded.packing.int8 = False
    ratio = times[False] / times[True]
    print(f"\ndecode batch 1, int8 weights {times[True] * 1e3:.1f} ms: {ratio:.2f}x our float32")
    result |= {"decode_1_int8": round(ratio, 3), **besides_the_model()}
    print(json.dumps({"benchmark": "engine", **result}))


def besides_the_model() -> dict[str, float]:
    """Milliseconds per step of everything but the forward pass."""
    clock = MonotonicClock()
    num_steps, batch = 200, 16
    pool = BlockPool(batch * 64, BLOCK)
    scheduler = Scheduler(SchedulerConfig(), pool, LeaseTable("bench", 30.0))
    kv_format = simulated_format(BLOCK)
    blocks = np.zeros((batch * 64, kv_format.block_bytes), np.uint8)
    runner = SimulatedRunner(blocks, BLOCK, verify=False)
    engine = Engine(scheduler, runner, make_local(), clock, b"bench")
    sampling = Sampling(seed=0, max_tokens=num_steps + 10, temperature=0.0)
    for i in range(batch):
        engine.submit(wire.Submit(f"r{i}", wire.Leg.WHOLE, [i] * CONTEXT, [], sampling))
    spent_s = 0.0
    execute = runner.execute

    def timed(plan: StepPlan) -> StepResult:
        nonlocal spent_s
        start = time.perf_counter()
        result = execute(plan)
        spent_s += time.perf_counter() - start
        return result

    engine.runner.execute = timed  # type: ignore[method-assign]
    while len(scheduler.running) < batch or not all(x.is_decoding for x in scheduler.running):
        engine.step()
    engine.take_outbox()
    spent_s, start = 0.0, time.perf_counter()
    for number in range(num_steps):
        engine.pump()
        engine.step()
        box = engine.take_outbox()
        frame = wire.Frame(number, box.tokens, box.notices, engine.view(), box.step_s, 0)
        wire.decode_to_gateway(wire.encode(frame))
    own_ms = (time.perf_counter() - start - spent_s) / num_steps * 1e3
    rows = (np.random.default_rng(0).standard_normal((batch, 49152)) * 3).astype(np.float32)
    samplers = {
        "greedy": Sampling(seed=0, max_tokens=1, temperature=0.0),
        "plain": Sampling(seed=0, max_tokens=1),
        "top_k": Sampling(seed=0, max_tokens=1, top_k=50),
        "top_p": Sampling(seed=0, max_tokens=1, top_p=0.9),
    }
    result = {"own_ms_per_step": round(own_ms, 3)}
    print(f"schedule, bookkeeping and wire, batch {batch}: {own_ms:.2f} ms per step")
    for name, sampling in samplers.items():
        draws = [(sampling, i) for i in range(batch)]
        ms = best_s(lambda draws=draws: draw_batch(rows, draws), 5) * 1e3
        print(f"sampling {batch} rows of 49,152, {name}: {ms:.2f} ms")
        result[f"sample_{name}_ms"] = round(ms, 3)
    tokens = list(range(16 * 1000))
    us = best_s(lambda: granule_keys(b"root", tokens), 5) / 1000 * 1e6
    print(f"keys: {us:.2f} us per granule")
    return result | {"key_us": round(us, 3)}


if __name__ == "__main__":
    main()
