"""Where each tier keeps its blocks, for tests: a directory, or a real server process."""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
import uuid
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import xxhash

from splitserve.store import memory_server
from splitserve.store.base import Tier
from splitserve.store.registry import make_tier, parse_tier

SIZE = 48 << 10
NAMES = ("memory", "disk", "shared_storage", "redis", "mooncake")
SERVERS = ("memory", "redis", "mooncake")
START_S = 30.0

NOT_PROMISED = {
    "mooncake": {
        "limit": "its limit is what a process adds to a pool; what is evicted, and when, is the "
        "master's business (tests/store/test_mooncake.py has what holds)",
        "counts": "its client can't count the pool's blocks",
        "at once": "what a dead writer had begun blocks its keys until the master discards it",
    }
}
"""Clauses of the contract that a tier declares not to keep, in the docstring of its module."""


def make_keys(*numbers: int) -> list[bytes]:
    return [xxhash.xxh3_128_digest(b"%d" % number) * 2 for number in numbers]


def make_blocks(*numbers: int, size: int = SIZE) -> list[np.ndarray]:
    return [np.random.default_rng(number).integers(0, 256, size, np.uint8) for number in numbers]


def make_targets(num: int, size: int = SIZE) -> list[np.ndarray]:
    return list(np.zeros((num, size), np.uint8))


def save(tier: Tier, *numbers: int, size: int = SIZE) -> int:
    """Blocks by number: each has one key and one content."""
    blocks = make_blocks(*numbers, size=size)
    return tier.save(make_keys(*numbers), blocks, [xxhash.xxh3_128_digest(b) for b in blocks])


def load(tier: Tier, *numbers: int, size: int = SIZE) -> int:
    """How many leading ones are there; asserts that they are right."""
    targets = make_targets(len(numbers), size)
    num = tier.load(make_keys(*numbers), targets)
    for number, target in zip(numbers[:num], targets[:num], strict=True):
        assert np.array_equal(target, make_blocks(number, size=size)[0]), number
    return num


def present(tier: Tier, numbers: Sequence[int]) -> list[int]:
    missing = tier.missing(make_keys(*numbers))
    return [number for number, gone in zip(numbers, missing, strict=True) if not gone]


class Place:
    """Opens tiers of one kind in one place. Options of the first `open` are the server's."""

    def __init__(self, name: str, root: Path) -> None:
        self.name = name
        self.root = root
        self.process: subprocess.Popen[bytes] | None = None
        self.pool: Mooncake | None = None
        self._socket = f"splitserve-test-{uuid.uuid4().hex}"
        self._options = ""
        self._tiers: list[Tier] = []
        self._numbers = itertools.count()

    def promises(self, clause: str) -> bool:
        return clause not in NOT_PROMISED.get(self.name, {})

    def needs(self, clause: str) -> None:
        if not self.promises(clause):
            pytest.skip(f"{self.name} does not promise it: {NOT_PROMISED[self.name][clause]}")

    def text(self, **options: object) -> str:
        """As an operator writes it."""
        if self.pool is not None:
            options.pop("limit", None)  # the pool's memory is a stand-alone client's
        query = "&".join(f"{option}={value}" for option, value in options.items())
        at = {
            "memory": f"memory:unix:{self._socket}",
            "redis": f"redis:{self.root}/redis.sock",
            "mooncake": self.pool.place if self.pool else "",
        }.get(self.name, f"{self.name}:{self.root}/kv")
        return f"{at}?{query}"

    def open(self, namespace: bytes = b"model", block_bytes: int = SIZE, **options: object) -> Tier:
        options.setdefault("limit", 64 << 20)
        if self.name == "mooncake" and self.pool is None:
            self.pool = Mooncake(self.root)
        text = self.text(**options)
        if self.name in SERVERS and self.process is None:
            self._options = text
            self.start()
        tier = make_tier(parse_tier(text), namespace, block_bytes)
        self._tiers.append(tier)
        return tier

    def start(self) -> None:
        """Its server, empty."""
        if self.name == "memory":
            command = memory_server.command(parse_tier(self._options), self._socket)
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
            )
            assert self.process.stdout is not None
            assert b"listening" in self.process.stdout.readline()
            return
        if self.pool is not None:
            self.process = self.pool.start_master()
            self.pool.start_holder()
            self.pool.await_holders(1)
            return
        if shutil.which("redis-server") is None:
            pytest.skip("redis-server is not installed: the redis tier is not tested")
        path = self.root / "redis.sock"
        path.unlink(missing_ok=True)
        command = ["redis-server", "--port", "0", "--unixsocket", str(path), "--save", ""]
        command += ["--appendonly", "no", "--dir", str(self.root), "--logfile", "redis.log"]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + START_S
        while not _listens(path):
            assert time.monotonic() < deadline
            assert self.process.poll() is None
            time.sleep(0.01)

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def file_of(self, tier: Tier, number: int) -> Path:
        return Path(tier._path(make_keys(number)[0]))  # type: ignore[attr-defined]

    def flip(self, tier: Tier, number: int) -> None:
        """One bit of a kept block."""
        if self.name == "memory":
            memory = tier._memory._segment.blocks[0]  # type: ignore[attr-defined]
            at = memory.tobytes().find(make_blocks(number)[0].tobytes())
            assert at >= 0
            memory[at + 100] ^= 1
        elif self.name == "redis":
            name = tier._name(make_keys(number)[0])  # type: ignore[attr-defined]
            client = self.redis_client()
            value = bytearray(client.get(name))
            value[-100] ^= 1
            client.set(name, bytes(value), keepttl=True)
        elif self.name == "mooncake":
            process, names = tier._process, [tier._name(make_keys(number)[0])]  # type: ignore[attr-defined]
            process.ask(2, "get", names, START_S)
            process.areas[2][SIZE // 2] ^= 1
            process.ask(2, "remove", names, START_S)
            process.ask(2, "put", names, START_S)
        else:
            path = self.file_of(tier, number)
            data = bytearray(path.read_bytes())
            data[-100] ^= 1
            path.write_bytes(data)

    def redis_client(self):  # type: ignore[no-untyped-def]
        import redis

        return redis.Redis(unix_socket_path=str(self.root / "redis.sock"))

    def close(self) -> None:
        for tier in self._tiers:
            tier.close()
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                self.process.send_signal(signal.SIGCONT)
            self.kill()
            for pipe in (self.process.stdin, self.process.stdout):
                if pipe is not None:
                    pipe.close()
        if self.pool is not None:
            self.pool.close()


class Mooncake:
    """A master of Mooncake, and stand-alone clients that add memory to its pool."""

    def __init__(self, root: Path) -> None:
        found = importlib.util.find_spec("mooncake")
        if found is None or not found.submodule_search_locations:
            pytest.skip("mooncake's wheel is not installed: the mooncake tier is not tested")
        self._binaries = Path(found.submodule_search_locations[0])
        self._log = root / "mooncake.log"
        self.port, self._metrics_port = free_ports(2)
        self.place = f"mooncake://127.0.0.1:{self.port}"
        self.holders: list[subprocess.Popen[bytes]] = []
        self._master: subprocess.Popen[bytes] | None = None

    def start_master(self, *flags: str) -> subprocess.Popen[bytes]:
        """It discards what dead writers began after a second, not 30."""
        self._master = self._spawn(
            "mooncake_master",
            f"-rpc_port={self.port}",
            f"-metrics_port={self._metrics_port}",
            "-rpc_address=127.0.0.1",
            "-metrics_host=127.0.0.1",
            "-put_start_discard_timeout_sec=1",
            *flags,
        )
        deadline = time.monotonic() + START_S
        while not _accepts(self.port) or not _accepts(self._metrics_port):
            assert time.monotonic() < deadline
            assert self._master.poll() is None, self._log.read_text()
            time.sleep(0.01)
        return self._master

    def start_holder(self, size: str = "64MB") -> None:
        """Unless there is one, which finds the master by itself."""
        if any(holder.poll() is None for holder in self.holders):
            return
        (port,) = free_ports(1)
        holder = self._spawn(
            "mooncake_client",
            "-host=127.0.0.1",
            f"-port={port}",
            f"-master_server_address=127.0.0.1:{self.port}",
            "-metadata_server=P2PHANDSHAKE",
            f"-global_segment_size={size}",
        )
        self.holders.append(holder)

    def await_holders(self, num: int) -> None:
        """Until so many segments are in the pool."""
        url = f"http://127.0.0.1:{self._metrics_port}/get_all_segments"
        deadline = time.monotonic() + START_S
        while True:
            with contextlib.suppress(OSError):
                said = urllib.request.urlopen(url, timeout=START_S).read().decode()
                if len(said.split()) == num:
                    return
            assert time.monotonic() < deadline, self._log.read_text()
            time.sleep(0.05)

    def close(self) -> None:
        for process in (*self.holders, *((self._master,) if self._master else ())):
            process.kill()
            process.wait()

    def _spawn(self, name: str, *arguments: str) -> subprocess.Popen[bytes]:
        with self._log.open("ab") as log:
            command = [str(self._binaries / name), *arguments]
            return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)


def free_ports(num: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(num)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def _accepts(port: int) -> bool:
    with socket.socket() as connection:
        return connection.connect_ex(("127.0.0.1", port)) == 0


def _listens(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        return connection.connect_ex(str(path)) == 0


CHILD = """
import os, signal, sys
import numpy as np
from splitserve.store.registry import make_tier, parse_tier
from tests.store.places import SIZE, load, make_keys, present, save
text, work = sys.argv[1:]
tier = make_tier(parse_tier(text), b"model", SIZE)
def die(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)
exec(work)
tier.close()
"""


def child(text: str, work: str) -> subprocess.Popen[bytes]:
    """Another process that has opened the tier, and does the work. It can `die` anywhere."""
    environment = dict(os.environ, PYTHONPATH=os.getcwd())
    return subprocess.Popen([sys.executable, "-c", CHILD, text, work], env=environment)
