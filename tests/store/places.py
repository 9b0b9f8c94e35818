"""Where each tier keeps its blocks, for tests: a directory, or a real server process."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
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
NAMES = ("memory", "disk", "shared_storage", "redis")
SERVERS = ("memory", "redis")
START_S = 30.0


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
        self._socket = f"splitserve-test-{uuid.uuid4().hex}"
        self._options = ""
        self._tiers: list[Tier] = []
        self._numbers = itertools.count()

    def text(self, **options: object) -> str:
        """As an operator writes it."""
        query = "&".join(f"{option}={value}" for option, value in options.items())
        at = {
            "memory": f"memory:unix:{self._socket}",
            "redis": f"redis:{self.root}/redis.sock",
        }.get(self.name, f"{self.name}:{self.root}/kv")
        return f"{at}?{query}"

    def open(self, namespace: bytes = b"model", block_bytes: int = SIZE, **options: object) -> Tier:
        options.setdefault("limit", 64 << 20)
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
