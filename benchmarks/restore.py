"""A prefix of 1,000 tokens restored from a store on disk, against computing it: on one core.

Whole engines with the default model, float32: ask the store, get blocks, read, prove by digests,
then compute what is left and draw a token. Beside it the same engine without a store. `warm`: the
files are in the page cache; `cold`: written back and dropped from it (what lies under this
machine's disk may still have them). The ceiling of a restore is one memcpy of as many bytes. Each
figure is the best of REPEATS turns, taken in turn; each ratio is within this run. Digests: what
they cost of the time to the first token when a prompt is computed and handed over (once at each
side). The last line is JSON.

    python benchmarks/restore.py [DIRECTORY]
"""

from __future__ import annotations

import gc
import json
import os
import shutil
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash

from splitserve import wire
from splitserve.clock import MonotonicClock
from splitserve.connector.offers import P2PConfig
from splitserve.connector.p2p import make_p2p
from splitserve.engine.engine import Engine
from splitserve.engine.scheduler import Scheduler, SchedulerConfig
from splitserve.kv.lease import LeaseTable
from splitserve.kv.pool import BlockPool
from splitserve.model import loader
from splitserve.model.fetch import resolve_model
from splitserve.model.loader import LoadedModel
from splitserve.model.runner import TorchRunner
from splitserve.sampling import Sampling
from splitserve.store.chain import KVStore
from splitserve.store.registry import make_tier, parse_tier
from splitserve.transport.registry import make_transport
from splitserve.transport.segment import Segment

NUM_TOKENS = 1000
BLOCK = 16
NUM_BLOCKS = 256
REPEATS = 3
GREEDY = Sampling(seed=0, max_tokens=1, temperature=0.0)
FLOORS = {"warm": 30.0, "cold": 8.0}


@dataclass(frozen=True, slots=True)
class Run:
    """ttft_s: from the request to its token; restore_s: of that, until the blocks were proved."""

    ttft_s: float
    restore_s: float
    num_loaded: int
    token_id: int


class Host:
    """A fresh engine: nothing in its cache."""

    def __init__(self, loaded: LoadedModel, directory: Path | None) -> None:
        clock = MonotonicClock()
        kv_format = loaded.kv_format(BLOCK)
        self.segment = Segment.create(NUM_BLOCKS, kv_format.block_bytes)
        self.woken = threading.Event()
        self.store = None
        if directory is not None:
            tier = make_tier(parse_tier(f"disk:{directory}"), b"benchmark", kv_format.block_bytes)
            self.store = KVStore([tier], clock)
        leases = LeaseTable("epoch", 30.0)
        self.connector = make_p2p(
            P2PConfig("w", f"{id(self):x}", b"identity", kv_format),
            make_transport("shm", self.segment),
            self.segment,
            leases,
            clock,
            self.woken.set,
            store=self.store,
        )
        runner = TorchRunner(loaded, self.segment.blocks, BLOCK, False, 1)
        scheduler = Scheduler(SchedulerConfig(), BlockPool(NUM_BLOCKS, BLOCK), leases)
        self.engine = Engine(scheduler, runner, self.connector, clock, b"identity")

    def run(self, prompt: list[int]) -> Run:
        start = time.perf_counter()
        restored_s, num_loaded = 0.0, 0
        self.engine.submit(wire.Submit("r", wire.Leg.WHOLE, prompt, [], GREEDY))
        while True:
            self.engine.pump()
            for notice in self.engine.take_outbox().notices:
                if isinstance(notice, wire.Loaded):
                    restored_s, num_loaded = time.perf_counter() - start, notice.num_tokens
            progressed = self.engine.step()
            outbox = self.engine.take_outbox()
            if outbox.tokens:
                took = time.perf_counter() - start
                return Run(took, restored_s, num_loaded, outbox.tokens[0].token_id)
            if not progressed:
                self.woken.wait(1.0)
                self.woken.clear()

    def close(self) -> None:
        while not self.engine.is_idle:  # what it computed is saved
            self.engine.pump()
            self.woken.wait(0.01)
            self.woken.clear()
        self.connector.worker.close()
        self.segment.close()
        gc.collect()


def drop_page_cache(directory: Path) -> None:
    os.sync()
    for path in directory.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def memcpy_s(num_bytes: int) -> float:
    source, target = np.ones(num_bytes, np.uint8), np.zeros(num_bytes, np.uint8)
    best = float("inf")
    for _ in range(5):
        start = time.perf_counter()
        np.copyto(target, source)
        best = min(best, time.perf_counter() - start)
    return best


def digest_s(num_blocks: int, block_bytes: int) -> float:
    blocks = np.random.default_rng(0).integers(0, 256, (num_blocks, block_bytes), np.uint8)
    start = time.perf_counter()
    for block in blocks:
        xxhash.xxh3_128_digest(block)
    return time.perf_counter() - start


def main() -> None:
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    loaded = loader.load(resolve_model(None, lambda _: None).path)
    root = Path(tempfile.mkdtemp(dir=sys.argv[1] if len(sys.argv) > 1 else None))
    prompt = [int(x) for x in np.random.default_rng(1).integers(100, 40_000, NUM_TOKENS)]
    runs: dict[str, list[Run]] = {"computed": [], "warm": [], "cold": []}
    try:
        for host in (Host(loaded, None), Host(loaded, root)):  # compiled, and kept
            host.run(prompt)
            host.close()
        for _ in range(REPEATS):
            for kind in runs:
                if kind == "cold":
                    drop_page_cache(root)
                host = Host(loaded, None if kind == "computed" else root)
                runs[kind].append(host.run(prompt))
                host.close()
    finally:
        shutil.rmtree(root)
    report(loaded, runs)


def report(loaded: LoadedModel, runs: dict[str, list[Run]]) -> None:
    assert len({run.token_id for kind in runs.values() for run in kind}) == 1, "another token"
    block_bytes = loaded.kv_format(BLOCK).block_bytes
    num_blocks = (NUM_TOKENS - 1) // BLOCK
    computed_s = min(run.ttft_s for run in runs["computed"])
    prefix_s = computed_s * num_blocks * BLOCK / NUM_TOKENS
    ceiling_s = memcpy_s(num_blocks * block_bytes)
    result = {
        "tokens": num_blocks * BLOCK,
        "mib": round(num_blocks * block_bytes / 2**20, 1),
        "computed_ttft_ms": round(computed_s * 1e3, 1),
        "memcpy_ms": round(ceiling_s * 1e3, 1),
    }
    print(f"prefix of {num_blocks * BLOCK} tokens, {result['mib']} MiB; best of {REPEATS}")
    print(f"computed: TTFT {computed_s * 1e3:8.1f} ms")
    print(f"ceiling:  memcpy {ceiling_s * 1e3:6.1f} ms")
    for kind in ("warm", "cold"):
        loads = [run.num_loaded for run in runs[kind]]
        assert loads == [num_blocks * BLOCK] * REPEATS, loads
        restore_s = min(run.restore_s for run in runs[kind])
        ttft_s = min(run.ttft_s for run in runs[kind])
        ratio = prefix_s / restore_s
        print(
            f"{kind}:     restored in {restore_s * 1e3:6.1f} ms, {ratio:5.1f}x faster than "
            f"computed (floor {FLOORS[kind]:.0f}); TTFT {ttft_s * 1e3:6.1f} ms, "
            f"{computed_s / ttft_s:4.1f}x"
        )
        result[f"{kind}_restore_ms"] = round(restore_s * 1e3, 1)
        result[f"{kind}_ratio"] = round(ratio, 1)
        result[f"{kind}_ttft_ratio"] = round(computed_s / ttft_s, 1)
    share = 2 * digest_s(num_blocks + 1, block_bytes) / computed_s
    print(f"digests of a handoff, both sides: {share:.2%} of TTFT (limit 1 %)")
    result["digest_share_of_ttft"] = round(share, 5)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
