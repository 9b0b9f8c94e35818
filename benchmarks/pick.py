"""How long it takes to pick workers, of 256 with an index of a million granules.

Half of the workers prefill, half decode. Each request has 1,000 tokens (62 granules), of which some
worker has a random part. Measured: the pair and the two picks of a split request by policy `cost`,
the look-up of who has what included, the hashing of the prompt's keys not (that is done once per
request, and printed beside). Ceiling: the look-up and the array reads that any such pick needs.

The last line is JSON.
"""

from __future__ import annotations

import gc
import json
import statistics
import time
from collections.abc import Callable

import numpy as np

from splitserve.kv.keys import GRANULE, granule_keys, root_key
from splitserve.latency.model import StepModel
from splitserve.router.policy import Ask
from splitserve.router.router import Router
from splitserve.wire import KEY_BYTES, Leg, Role, View

NUM_WORKERS, NUM_GRANULES, NUM_TOKENS = 256, 1_000_000, 1_000
TURNS = 400
LIMIT_US = 150.0


def fill(router: Router, rng: np.random.Generator) -> list[list[bytes]]:
    """Workers with views, and prompts of which they have parts."""
    model = StepModel()
    for size in (1, 2, 4, 16, 64, 256) * 20:
        model.add(size, size * 500, 0.03 + size * 1e-3)
    for i in range(NUM_WORKERS):
        role = Role.PREFILL if i < NUM_WORKERS // 2 else Role.DECODE
        slot = router.fleet.add(
            f"{role.value}-{i}", role, 0.0, num_blocks=5000, block_size=16, budget=256, model=model
        )
        view = View(
            free_blocks=int(rng.integers(500, 5000)),
            running=int(rng.integers(0, 32)),
            context_tokens=int(rng.integers(0, 30_000)),
        )
        router.fleet.set_view(slot, view, 0.0)
        router.fleet.legs[slot] = view.running
        router.fleet.pending[slot] = float(rng.integers(0, 4000))
    root = root_key(b"benchmark")
    per_prompt = NUM_TOKENS // GRANULE
    prompts = []
    held = 0
    while held < NUM_GRANULES:
        keys = [
            key[:KEY_BYTES]
            for key in granule_keys(root, rng.integers(0, 50_000, NUM_TOKENS).tolist())
        ]
        prompts.append(keys)
        for worker in rng.integers(0, NUM_WORKERS, 4):
            role = Role.PREFILL if worker < NUM_WORKERS // 2 else Role.DECODE
            router.index.add(f"{role.value}-{worker}", keys[: int(rng.integers(1, per_prompt + 1))])
        held = len(router.index)
    return prompts


def timed(work: Callable[[int], object]) -> float:
    """Median of one call, in microseconds."""
    times = []
    for turn in range(TURNS):
        start = time.perf_counter_ns()
        work(turn)
        times.append((time.perf_counter_ns() - start) / 1e3)
    return statistics.median(times)


def main() -> None:
    rng = np.random.default_rng(0)
    router = Router("cost")
    prompts = fill(router, rng)
    chosen = [prompts[i] for i in rng.integers(0, len(prompts), TURNS)]
    gc.freeze()

    def hits(turn: int) -> np.ndarray:
        return router.hits(chosen[turn], GRANULE)

    def pair(turn: int) -> None:
        ask = Ask(NUM_TOKENS, 0.0, hits=hits(turn), bytes_per_token=46_080)
        assert router.pick_pair(ask) is not None

    def both(turn: int) -> None:
        ask = Ask(NUM_TOKENS, 0.0, hits=hits(turn), bytes_per_token=46_080)
        assert router.pick_pair(ask) is not None
        assert router.pick(Leg.PREFILL, ask) is not None

    tokens = rng.integers(0, 50_000, NUM_TOKENS).tolist()
    root = root_key(b"benchmark")
    result = {
        "benchmark": "pick",
        "workers": NUM_WORKERS,
        "granules": len(router.index),
        "hits_us": round(timed(hits), 1),
        "pair_us": round(timed(pair), 1),
        "pair_and_prefill_pick_us": round(timed(both), 1),
        "keys_us": round(timed(lambda turn: granule_keys(root, tokens)), 1),
        "limit_us": LIMIT_US,
    }
    verdict = "met" if float(result["pair_us"]) <= LIMIT_US else "MISSED"  # type: ignore[arg-type]
    print(f"{NUM_WORKERS} workers, {len(router.index):,} granules, {NUM_TOKENS} tokens a prompt")
    print(f"look-up of who has what  {result['hits_us']:7.1f} us (ceiling: a pick needs it)")
    print(f"a pair, look-up included {result['pair_us']:7.1f} us, limit {LIMIT_US:.0f}: {verdict}")
    print(f"and the prefill leg's own pick {result['pair_and_prefill_pick_us']:7.1f} us")
    print(f"hashing the prompt's keys {result['keys_us']:7.1f} us, once per request")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
