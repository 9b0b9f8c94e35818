"""The process in which tier `mooncake` uses Mooncake's client, so that it can be killed.

The client can't be bounded from within: it waits 60 s for a peer that is frozen, and holds Python's
lock up to 90 s while it looks for a master that is gone. So it lives here, with memory of its own
that the tier maps; what it is asked comes over sockets, one for each thread of the tier, and when
one of them ends so do we. Request: (operation, names); answer: a code for each, or why not.

With `holds_bytes` it is asked nothing: it adds a segment to the pool, and stays until its socket
ends.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from typing import Any, NoReturn

import msgspec
import numpy as np

from splitserve.store.record import HEADER_BYTES
from splitserve.transport.segment import Segment

EXISTS, HEADS, GET, PUT, REMOVE = "exists", "heads", "get", "put", "remove"
MAX_MESSAGE_BYTES = 128 << 10
NO_ROOM = -200
RPC_FAILED = -900
_FULL_TRIES = 8
_FULL_WAIT_S = 0.02  # the master evicts behind, 10 ms after it refused something
_RETRY_S = 1.0
_UNMOUNT_S = 5
_SETTINGS = {
    "MC_FORCE_TCP": "1",  # else it takes RDMA where there is some, which is not tried here
    "MC_STORE_CLIENT_SETUP_RETRIES": "1",
    "MC_LOG_LEVEL": "ERROR",
    "GLOG_minloglevel": "3",
}
"""Environment variables that the library reads; what is set already is kept."""


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    """lines: descriptors of the sockets. memory: of a segment that has an area for each line, and
    in it a slot of slot_bytes for each record of a request."""

    host: str
    port: int
    lines: list[int]
    timeout_s: float
    memory: int = -1
    area_bytes: int = 0
    slot_bytes: int = 0
    record_bytes: int = 0
    holds_bytes: int = 0


class MooncakeError(Exception):
    """The master can't be used; says why."""


class _Client:
    def __init__(self, setup: Setup, kind: Any) -> None:
        self._setup = setup
        self._kind = kind
        self._lock = threading.Lock()
        self._store: Any = None

    def store(self) -> Any:
        """Made when it is first needed. Raise MooncakeError."""
        with self._lock:
            if self._store is None:
                self._store = self._connect()
            return self._store

    def reach_master(self) -> str:
        """By a connection of ours, because the library is slow to give up. Returns the address of
        this host that it came from, where the pool's others may reach us."""
        try:
            place = self._setup.host, self._setup.port
            with socket.create_connection(place, self._setup.timeout_s) as connection:
                address: str = connection.getsockname()[0]
                return address
        except OSError as error:
            raise MooncakeError(str(error)) from error

    def close(self) -> None:
        if self._store is not None:
            self._store.close()

    def _connect(self) -> Any:
        host = self.reach_master()
        store = self._kind()
        status = store.setup(
            *(host, "P2PHANDSHAKE", self._setup.holds_bytes, 0, "tcp", ""),
            f"{self._setup.host}:{self._setup.port}",
        )
        if status:
            raise MooncakeError(f"its client can't be set up with this master ({status})")
        return store


class _Line:
    """Answers one socket. area: uint8 [area_bytes]."""

    def __init__(self, fd: int, client: _Client, area: np.ndarray, setup: Setup) -> None:
        self._connection = socket.socket(fileno=fd)
        self._client = client
        self._base = int(area.ctypes.data)
        self._setup = setup
        self._registered: Any = None
        self._area = area

    def serve(self) -> None:
        try:
            while request := self._connection.recv(MAX_MESSAGE_BYTES):
                operation, names = msgspec.msgpack.decode(request)
                answer: list[int] | str
                try:
                    answer = codes = self._answer(operation, names)
                    if RPC_FAILED in codes:  # its connection may be to an earlier master
                        self._client.reach_master()
                        answer = self._answer(operation, names)
                except MooncakeError as error:
                    answer = str(error)
                self._connection.send(msgspec.msgpack.encode(answer))
        finally:
            os._exit(0)

    def _answer(self, operation: str, names: list[str]) -> list[int]:
        store = self._client.store()
        if self._registered is not store:
            if store.register_buffer(self._base, self._area.nbytes):
                raise MooncakeError("its client can't register memory")
            self._registered = store
        if operation == EXISTS:
            return list(store.batch_is_exist(names))
        if operation == REMOVE:
            return list(store.batch_remove(names, force=True))
        places = [self._base + i * self._setup.slot_bytes for i in range(len(names))]
        sizes = [self._setup.record_bytes] * len(names)
        if operation == GET:
            return list(store.batch_get_into(names, places, sizes))
        if operation == HEADS:
            return self._heads(store, names)
        return self._put(store, names, places, sizes)

    def _heads(self, store: Any, names: list[str]) -> list[int]:
        offsets = [[i * self._setup.slot_bytes] for i in range(len(names))]
        every = len(names)
        (codes,) = store.get_into_ranges(
            [self._base], [names], [offsets], [[[0]] * every], [[[HEADER_BYTES]] * every]
        )
        return [code for (code,) in codes]

    def _put(self, store: Any, names: list[str], places: list[int], sizes: list[int]) -> list[int]:
        """What finds no room is tried again: the master has begun to evict."""
        codes = [NO_ROOM] * len(names)
        for attempt in range(_FULL_TRIES):
            left = [i for i, code in enumerate(codes) if code == NO_ROOM]
            if not left:
                break
            if attempt:
                time.sleep(_FULL_WAIT_S)
            again = store.batch_put_from(
                [names[i] for i in left], [places[i] for i in left], [sizes[i] for i in left]
            )
            for i, code in zip(left, again, strict=True):
                codes[i] = code
        return codes


def _hold(client: _Client, fd: int) -> NoReturn:
    """Mount the segment, again and again until there is a master; unmount it at the end."""
    life = socket.socket(fileno=fd)
    life.settimeout(_RETRY_S)
    is_mounted = False
    while True:
        if not is_mounted:
            try:
                client.store()
                is_mounted = True
                life.settimeout(None)
            except MooncakeError:
                pass
        try:
            life.recv(1)
            break
        except TimeoutError:
            pass
    signal.alarm(_UNMOUNT_S)
    client.close()
    os._exit(0)


def main(text: str) -> None:
    setup = msgspec.json.decode(text, type=Setup)
    for name, value in _SETTINGS.items():
        os.environ.setdefault(name, value)
    for name in ("MC_RPC_TIMEOUT_MS", "MC_RPC_CONNECT_TIMEOUT_MS"):
        os.environ.setdefault(name, f"{max(setup.timeout_s * 800, 1):.0f}")
    first = socket.socket(fileno=os.dup(setup.lines[0]))
    try:
        from mooncake.store import MooncakeDistributedStore
    except ImportError as error:
        first.send(str(error).encode())
        return
    first.send(b"ready")
    first.close()
    client = _Client(setup, MooncakeDistributedStore)
    if setup.holds_bytes:
        _hold(client, setup.lines[0])
    num = len(setup.lines)
    memory = Segment.attach(setup.memory, num, setup.area_bytes, writable=True)
    for fd, area in zip(setup.lines, memory.blocks, strict=True):
        threading.Thread(target=_Line(fd, client, area, setup).serve, daemon=True).start()
    threading.Event().wait()


if __name__ == "__main__":
    main(sys.argv[1])
