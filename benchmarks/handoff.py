"""What a KV handoff over shm costs on one host, beside the ceiling.

Two pools of the default model's format in this process, 1,000 tokens. Measures, each as the best of
several runs and as a ratio to one plain memcpy of as many bytes (the ceiling, from the same run):
copying block by block, copying with every digest verified, and sealing (digesting) at the source.
The last line is JSON.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable

import numpy as np
import xxhash

from splitserve.kv.format import KVFormat
from splitserve.transport.segment import Segment
from splitserve.transport.shm import ShmTransport

FORMAT = KVFormat("float32", block_size=16, num_layers=30, num_kv_heads=3, head_dim=64)
NUM_TOKENS = 1000
REPEATS = 15


def best_s(work: Callable[[], object]) -> float:
    """Seconds of the fastest run."""
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times)


def main() -> None:
    num_blocks = -(-NUM_TOKENS // FORMAT.block_size)
    num_bytes = num_blocks * FORMAT.block_bytes
    source = Segment.create(num_blocks, FORMAT.block_bytes)
    target = Segment.create(num_blocks, FORMAT.block_bytes)
    source.blocks[:] = np.random.default_rng(0).integers(0, 255, source.blocks.shape, np.uint8)
    export = ShmTransport(source).export()
    fds = [os.dup(fd) for fd in export.descriptors()]
    link = ShmTransport(target).open(export.card, fds, num_bytes)
    order = np.random.default_rng(1).permutation(num_blocks)
    size, never = FORMAT.block_bytes, threading.Event()
    offsets = [int(block) * size for block in order]
    digests = [xxhash.xxh3_128_digest(block) for block in source.blocks]

    def copy() -> None:
        for _ in link.read(offsets, offsets, size, never):
            pass

    def copy_and_verify() -> None:
        for i in link.read(offsets, offsets, size, never):
            block = order[i]
            assert xxhash.xxh3_128_digest(target.blocks[block]) == digests[block]

    def seal() -> None:
        for block in source.blocks:
            xxhash.xxh3_128_digest(block)

    ceiling_s = best_s(lambda: np.copyto(target.blocks, source.blocks))
    print(f"{NUM_TOKENS} tokens, {num_bytes / 2**20:.1f} MiB in {num_blocks} blocks")
    rate = num_bytes / ceiling_s / 1e9
    print(f"ceiling: one memcpy      {ceiling_s * 1e3:7.2f} ms  {rate:.2f} GB/s")
    result: dict[str, float] = {"memcpy_gb_per_s": round(rate, 2)}
    for name, work in (("copy", copy), ("copy + verify", copy_and_verify), ("seal", seal)):
        seconds = best_s(work)
        ratio = ceiling_s / seconds
        print(f"{name:24s} {seconds * 1e3:7.2f} ms  {ratio:.2f} of memcpy")
        result[name.replace(" + ", "_and_") + "_of_memcpy"] = round(ratio, 3)
    print(json.dumps({"benchmark": "handoff", **result}))


if __name__ == "__main__":
    main()
