"""What each tier of the KV store makes of this host: a prefix of 1,000 tokens kept and restored.

Blocks of the default model in float32, from memory of ours to the tier and back, proved by their
digests. Beside them the ceilings, taken turn by turn with them: one memcpy of as many bytes, one
plain read of one file of that size from the page cache, and one plain Unix socket (sendall there,
recv_into here). `cold` is after the files were written back and dropped from the page cache; what
lies under this machine's disk may still have them. Saves are of new keys each time, into a tier
that is full, so they evict. Each figure is the best of REPEATS turns; each ratio is within this
run. A tier whose server is not installed is left out by name. The last column is how much faster
than computing the prefix anew, at RECOMPUTE tokens/s.

    python benchmarks/store.py [DIRECTORY]
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import xxhash

from splitserve.kv.format import KVFormat
from splitserve.store import memory_server
from splitserve.store.base import Tier
from splitserve.store.registry import make_tier, parse_tier

FORMAT = KVFormat("float32", block_size=16, num_layers=30, num_kv_heads=3, head_dim=64)
NUM_TOKENS = 1000
NUM_BLOCKS = -(-NUM_TOKENS // FORMAT.block_size)
NUM_BYTES = NUM_BLOCKS * FORMAT.block_bytes
LIMIT = "256M"  # five prefixes
REPEATS = 15
RECOMPUTE = 250  # tokens per second and core: docs, facts measured
FLOORS = {"disk load": 30, "disk load cold": 8}  # times faster than computing

Work = Callable[[], None]


class Bench:
    """A tier, a prefix that stays in it, and new ones to save."""

    def __init__(self, tier: Tier, source: np.ndarray, target: np.ndarray) -> None:
        self.tier = tier
        self.blocks = list(source)
        self.targets = list(target)
        self.digests = [xxhash.xxh3_128_digest(block) for block in source]
        self.num_saved = 0
        self.keys = self.save()

    def save(self) -> list[bytes]:
        self.num_saved += 1
        names = [b"%d/%d" % (self.num_saved, i) for i in range(NUM_BLOCKS)]
        keys = [xxhash.xxh3_128_digest(name) * 2 for name in names]
        assert self.tier.save(keys, self.blocks, self.digests) == NUM_BLOCKS
        return keys

    def load(self) -> None:
        """A use, so that what is saved evicts others."""
        assert self.tier.load(self.keys, self.targets) == NUM_BLOCKS

    def drop_pages(self) -> None:
        for key in self.keys:
            fd = os.open(self.tier._path(key), os.O_RDONLY)  # type: ignore[attr-defined]
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


@contextlib.contextmanager
def memory() -> Iterator[str]:
    name = f"splitserve-bench-{os.getpid()}"
    command = memory_server.command(parse_tier(f"memory:?limit={LIMIT}"), name)
    server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert server.stdout is not None
    server.stdout.readline()
    yield f"memory:unix:{name}"
    server.terminate()
    server.wait(30)


@contextlib.contextmanager
def redis_at(root: Path) -> Iterator[str]:
    path = root / "redis.sock"
    command = ["redis-server", "--port", "0", "--unixsocket", str(path), "--save", ""]
    server = subprocess.Popen([*command, "--dir", str(root)], stdout=subprocess.DEVNULL)
    with socket.socket(socket.AF_UNIX) as probe:
        while probe.connect_ex(str(path)):
            time.sleep(0.01)
    yield f"redis:{path}"
    server.terminate()
    server.wait(30)


@contextlib.contextmanager
def mooncake(root: Path, binaries: Path) -> Iterator[str]:
    """A master, and a stand-alone client that holds the blocks."""
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(3)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        ports = [probe.getsockname()[1] for probe in probes]
    address = f"127.0.0.1:{ports[0]}"
    commands = [
        ["mooncake_master", f"-rpc_port={ports[0]}", f"-metrics_port={ports[1]}"],
        ["mooncake_client", "-host=127.0.0.1", f"-port={ports[2]}", "-global_segment_size=256MB"],
    ]
    commands[1] += [f"-master_server_address={address}", "-metadata_server=P2PHANDSHAKE"]
    servers = []
    with (root / "mooncake.log").open("wb") as log:
        for name, *arguments in commands:
            servers.append(
                subprocess.Popen(
                    [binaries / name, *arguments], stdout=log, stderr=subprocess.STDOUT
                )
            )
            time.sleep(2.0)
    yield f"mooncake://{address}"
    for server in servers:
        server.kill()
        server.wait(30)


def from_socket(stack: contextlib.ExitStack, source: np.ndarray, target: np.ndarray) -> Work:
    """Another process sends the same bytes as often as it is asked."""
    ours, theirs = socket.socketpair()
    if (pid := os.fork()) == 0:
        ours.close()
        while theirs.recv(1):
            theirs.sendall(source.reshape(-1).data)
        os._exit(0)
    theirs.close()
    stack.callback(lambda: (ours.close(), os.waitpid(pid, 0)))

    def work() -> None:
        ours.send(b"x")
        view = target.reshape(-1).data
        while view:
            view = view[ours.recv_into(view, flags=socket.MSG_WAITALL) :]

    return work


def from_file(root: Path, source: np.ndarray, target: np.ndarray) -> Work:
    path = root / "plain"
    path.write_bytes(source.tobytes())

    def work() -> None:
        with open(path, "rb", buffering=0) as file:
            assert file.readinto(target.reshape(-1).data) == NUM_BYTES

    return work


def measure(works: dict[str, Work], before: dict[str, Work]) -> dict[str, float]:
    """Seconds of each one's fastest turn. before: what is done ahead of a turn, untimed."""
    best = dict.fromkeys(works, float("inf"))
    for _ in range(REPEATS):
        for name, work in works.items():
            before.get(name, lambda: None)()
            start = time.perf_counter()
            work()
            best[name] = min(best[name], time.perf_counter() - start)
    return best


def report(best: dict[str, float]) -> None:
    print(f"{NUM_TOKENS} tokens, {NUM_BYTES / 2**20:.1f} MiB in {NUM_BLOCKS} blocks; digests are")
    print(f"{best['digests'] / best['disk load']:.0%} of a load from disk's page cache")
    print(f"{'':26s}    ms    GB/s  of memcpy  of read  of socket  x recompute")
    result = {}
    for name, seconds in best.items():
        rate = NUM_BYTES / seconds / 1e9
        faster = NUM_TOKENS / RECOMPUTE / seconds
        print(f"{name:26s} {seconds * 1e3:7.2f} {rate:5.2f}", end="")
        for ceiling, width in (("memcpy", 9), ("read", 8), ("socket", 9)):
            print(f"{best[ceiling] / seconds:{width}.2f}", end="")
        floor = FLOORS.get(name)
        note = f"  floor {floor}{': MISSED' if faster < floor else ''}" if floor else ""
        print(f"{faster:13.0f}{note}" if "load" in name else "")
        result[name.replace(" ", "_") + "_gb_per_s"] = round(rate, 2)
    cores = os.cpu_count()
    print(json.dumps({"benchmark": "store", "cores": cores, "num_bytes": NUM_BYTES, **result}))


def main(directory: str | None) -> None:
    source = np.random.default_rng(0).integers(0, 256, (NUM_BLOCKS, FORMAT.block_bytes), np.uint8)
    target = np.zeros_like(source)
    works: dict[str, Work] = {"memcpy": lambda: np.copyto(target, source)}
    before: dict[str, Work] = {}
    with contextlib.ExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=directory)))
        works["socket"] = from_socket(stack, source, target)
        works["read"] = from_file(root, source, target)
        works["digests"] = lambda: [xxhash.xxh3_128_digest(b) for b in source] and None
        places = {
            "memory": stack.enter_context(memory()),
            "disk": f"disk:{root}/disk",
            "shared_storage": f"shared_storage:{root}/shared",
        }
        if shutil.which("redis-server"):
            places["redis"] = stack.enter_context(redis_at(root))
        else:
            print("redis: left out, redis-server is not installed")
        if (found := importlib.util.find_spec("mooncake")) and found.origin:
            binaries = Path(found.origin).parent
            places["mooncake"] = stack.enter_context(mooncake(root, binaries))
        else:
            print("mooncake: left out, its wheel is not installed")
        for name, place in places.items():
            limit = "" if name == "mooncake" else f"?limit={LIMIT}"  # the pool is another's
            spec = parse_tier(place + limit)
            tier = make_tier(spec, b"benchmark", FORMAT.block_bytes)
            stack.callback(tier.close)
            bench = Bench(tier, source, target)
            target[:] = 0
            bench.load()
            assert np.array_equal(source, target), f"{name} gave other bytes"
            works[f"{name} load"] = bench.load
            if name in ("disk", "shared_storage"):
                works[f"{name} load cold"] = bench.load
                before[f"{name} load cold"] = bench.drop_pages
            works[f"{name} save"] = lambda bench=bench: bench.save() and None
        report(measure(works, before))
    assert threading.active_count() == 1, "a tier left a thread"


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else None)
