"""How much of a KV transfer hides behind prefill, on links that are slow for real.

Prefill and decode worker of a whole server (default model, float32, one core each) live in two
network namespaces, joined by a veth pair that `tc tbf` shapes at both ends. For each valid handoff
and each ratio of transfer time to prefill time, a prompt of 768 tokens in steps of 128 (six parts)
is served; the timeline tells the exposed transfer, from the end of prefill to the end of the
transfer, and how long the prefill took. On this CPU the ratios .25 to 3 stand for what 40 to 10
Gbit/s are to a GPU.

Beside each result: the transfer's own time T = bytes / rate (what request-pull exposes at best, the
ceiling), and for layer-push the bound of the design: T / layers + max(0, T - T_prefill) + 10 %.
Prefill's slowdown is against prompts whose KV crosses the same link unshaped by request-pull.

Of layer-push, which has bounds to meet, each number is the median of five.

    python benchmarks/links.py [HANDOFF...]

Needs root, `ip` and `tc`; without them it says so and ends with 0. The last line is JSON.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator

import msgspec
import numpy as np

from splitserve.cluster.runtime import Runtime
from splitserve.config import (
    Deadlines,
    GatewayConfig,
    Handoff,
    Network,
    ServeConfig,
    SplitMode,
)
from splitserve.gateway.journey import Generation
from splitserve.model.fetch import ResolvedModel, resolve_model
from splitserve.moments import Timeline
from splitserve.sampling import Sampling

NUM_TOKENS, STEP = 768, 128
RATIOS = (0.25, 0.8, 1.3, 3.0)
WAYS = (Handoff.REQUEST_PULL, Handoff.CHUNK_PULL, Handoff.CHUNK_PUSH, Handoff.LAYER_PUSH)
UNSHAPED_REPEATS = 3
REPEATS = {way: 5 if way is Handoff.LAYER_PUSH else 1 for way in WAYS}
PREFIX = f"ss{os.getpid() % 10000}"
ENDS = {"prefill-0": ("p", "10.77.13.1"), "decode-0": ("d", "10.77.13.2")}


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@contextlib.contextmanager
def two_namespaces() -> Iterator[None]:
    """PREFIX-p and PREFIX-d, joined by one link, gone at the end."""
    try:
        for name, _ in ENDS.values():
            ip("netns", "add", f"{PREFIX}-{name}")
        ip("-n", f"{PREFIX}-p", "link", "add", "kv", "type", "veth", "peer", "name", "kv",
           "netns", f"{PREFIX}-d")  # fmt: skip
        for name, address in ENDS.values():
            ip("-n", f"{PREFIX}-{name}", "addr", "add", f"{address}/24", "dev", "kv")
            for device in ("kv", "lo"):
                ip("-n", f"{PREFIX}-{name}", "link", "set", device, "up")
        yield
    finally:
        for name, _ in ENDS.values():
            subprocess.run(["ip", "netns", "del", f"{PREFIX}-{name}"], check=False)


def shape(bits_per_s: float | None) -> None:
    """Limit both directions, or lift the limit."""
    for name, _ in ENDS.values():
        tc = ["ip", "netns", "exec", f"{PREFIX}-{name}", "tc", "qdisc"]
        subprocess.run([*tc, "del", "dev", "kv", "root"], check=False, capture_output=True)
        if bits_per_s is not None:
            rate = ["rate", f"{int(bits_per_s)}bit", "burst", "128kb", "latency", "200ms"]
            subprocess.run([*tc, "add", "dev", "kv", "root", "tbf", *rate], check=True)


class Server:
    """A whole server whose two workers have nothing in common but the link."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._rng = np.random.default_rng(0)
        self._number = 0

    async def ask(self, way: Handoff | None = None) -> Timeline:
        """way: other than the server's."""
        service = self._runtime.service
        before = service.config
        if way is not None:
            service.config = msgspec.structs.replace(before, handoff=way)
        try:
            return await self._ask()
        finally:
            service.config = before

    async def _ask(self) -> Timeline:
        prompt = [int(one) for one in self._rng.integers(1000, 40_000, NUM_TOKENS)]
        self._number += 1
        sampling = Sampling(seed=1, max_tokens=3, temperature=0.0)
        generation = Generation(f"links-{self._number}", prompt, sampling)
        journey, task = await self._runtime.service.start(generation)
        await task
        if journey.error is not None or journey.num_retries:
            raise SystemExit(f"{journey.error!r}: {journey.timeline.notes}")
        return journey.timeline


@contextlib.asynccontextmanager
async def serving(model: ResolvedModel, way: Handoff) -> AsyncIterator[Server]:
    config = ServeConfig(
        num_prefill=1,
        num_decode=1,
        port=0,
        max_batched_tokens=STEP,
        kv_memory_bytes=256 << 20,
        zone_fraction=1.0,
        transport="tcp",
        networks=tuple(
            Network(worker_id, address, f"/var/run/netns/{PREFIX}-{name}")
            for worker_id, (name, address) in ENDS.items()
        ),
        gateway=GatewayConfig(
            split=SplitMode.ALWAYS, handoff=way, deadlines=Deadlines(transfer_s=120)
        ),
    )
    runtime = Runtime(config, model.path, model.name, lambda text: None)
    await runtime.start()
    try:
        yield Server(runtime)
    finally:
        await runtime.stop(0.0)


def prefill_s(timeline: Timeline) -> float:
    return timeline.spans()["prefill"]


async def measure(model: ResolvedModel, way: Handoff) -> dict[str, float]:
    """Exposed seconds per ratio, with the bound; and how much slower a prefill is than those right
    before and after it whose KV moves when they have ended, over a link without limit."""
    result: dict[str, float] = {}
    async with serving(model, way) as server:
        shape(None)
        await server.ask()  # warm
        free = [await server.ask() for _ in range(UNSHAPED_REPEATS)]
        base_s = statistics.median(map(prefill_s, free))
        num_bytes = free[0].transfer_bytes
        print(
            f"{way.value}: prefill {base_s:.2f} s, {num_bytes / 2**20:.1f} MiB; unshaped: ", end=""
        )
        print(
            f"exposed {statistics.median(t.exposed_transfer_s or 0.0 for t in free) * 1e3:.0f} ms"
        )
        result["unshaped_prefill_s"] = round(base_s, 3)
        for ratio in RATIOS:
            transfer_s = ratio * base_s
            undisturbed, disturbed = [prefill_s(await server.ask(Handoff.REQUEST_PULL))], []
            for _ in range(REPEATS[way]):
                shape(num_bytes * 8 / transfer_s)
                disturbed.append(await server.ask())
                shape(None)
                undisturbed.append(prefill_s(await server.ask(Handoff.REQUEST_PULL)))
            disturbed.sort(key=lambda one: one.exposed_transfer_s or 0.0)
            timeline = disturbed[len(disturbed) // 2]
            exposed_s = timeline.exposed_transfer_s or 0.0
            median_s = statistics.median(map(prefill_s, disturbed))
            slowed = median_s / statistics.median(undisturbed) - 1.0
            num_layers = server._runtime.kv_format.num_layers
            bound_s = 1.1 * (transfer_s / num_layers + max(0.0, transfer_s - prefill_s(timeline)))
            verdict = ""
            if way is Handoff.LAYER_PUSH:
                verdict = f"bound {bound_s:.3f}: {'met' if exposed_s <= bound_s else 'MISSED'}"
                result[f"bound_s_{ratio:g}"] = round(bound_s, 3)
            print(
                f"  T/T_prefill {ratio:4g}: T {transfer_s:6.3f} s, exposed {exposed_s:6.3f} s "
                f"({exposed_s / transfer_s:4.0%} of T), prefill {slowed:+.1%}  {verdict}",
                flush=True,
            )
            result[f"exposed_s_{ratio:g}"] = round(exposed_s, 3)
            result[f"prefill_slowed_{ratio:g}"] = round(slowed, 3)
    return result


def main() -> None:
    if os.geteuid() or not (shutil.which("ip") and shutil.which("tc")):
        print("This needs root, ip and tc (Debian: iproute2); skipped.")
        print(json.dumps({"benchmark": "links", "skipped": True}))
        sys.exit(0)
    model = resolve_model(None, print)
    results = {}
    with two_namespaces():
        for way in map(Handoff, sys.argv[1:] or WAYS):
            results[way.value] = asyncio.run(measure(model, way))
    print(json.dumps({"benchmark": "links", **results}))


if __name__ == "__main__":
    main()
