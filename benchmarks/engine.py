"""The engine's own speed on one core, beside transformers and the machine's ceilings.

Same model, float32, one thread, interleaved in one run: prefill of 512 tokens, and decode steps at
context 512 with batch 1 and 16, by our runner (default and exact mode) and by transformers with its
own cache. Ceilings: GEMM rate for prefill, weights and KV read at memory bandwidth for decode. The
last line is JSON.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from splitserve.engine.step import Draw, PlanItem, StepPlan
from splitserve.model import loader
from splitserve.model.fetch import resolve_model
from splitserve.model.runner import TorchRunner
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
    print(json.dumps({"benchmark": "engine", **result}))


if __name__ == "__main__":
    main()
