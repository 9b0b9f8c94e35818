"""The host's memory tier: one segment, one index, one process that owns both.

    python -m splitserve.store.memory_server --name NAME --limit 1G

It listens at the abstract Unix socket NAME, answers processes of its own user only, hands each the
segment's descriptor, and never touches a block's bytes: clients copy them, and prove them by the
digests that the index keeps. A client is its connection: when that closes, the client reads and
writes no more, so its leases end and its places are free. One that is frozen keeps what it has.
It prints a line when it is ready, and ends on SIGTERM or SIGINT.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import selectors
import signal
import socket
import sys
import uuid
from collections.abc import Iterator

from splitserve.clock import Clock, MonotonicClock
from splitserve.errors import ConfigError
from splitserve.sizes import parse_size
from splitserve.store import memory_wire as wire
from splitserve.store.base import Policy
from splitserve.store.memory_index import ALIGN_BYTES, MemoryIndex
from splitserve.store.memory_wire import Acquire, Commit, Hello, Missing, Release, Reserve
from splitserve.store.registry import TierSpec
from splitserve.transport.segment import Segment

MAX_CLIENTS = 1024
MAX_UNSENT_BYTES = 8 << 20
_RECEIVE_BYTES = 256 << 10


def command(spec: TierSpec, name: str) -> list[str]:
    """The command line that serves a tier `memory:?...` at unix:NAME. Who starts it should close
    its standard input only when it is to end."""
    return [
        *(sys.executable, "-m", "splitserve.store.memory_server", "--watch-stdin"),
        *("--name", name, "--limit", str(spec.limit_bytes)),
        *("--policy", spec.policy.value, "--ttl", str(spec.ttl_s)),
    ]


class _Client:
    def __init__(self, number: int, connection: socket.socket) -> None:
        self.number = number
        self.connection = connection
        self.is_welcome = False
        self.received = bytearray()
        self.unsent = bytearray()


class MemoryServer:
    """`run` serves until `stop`, which any thread or signal handler may call."""

    def __init__(
        self, name: str, limit_bytes: int, policy: Policy, ttl_s: float, clock: Clock
    ) -> None:
        limit_bytes -= limit_bytes % ALIGN_BYTES
        self._index = MemoryIndex(limit_bytes, policy, ttl_s)
        self._clock = clock
        self._epoch = uuid.uuid4().hex
        self._numbers = itertools.count()
        self._selector = selectors.DefaultSelector()
        self._stopped, self._stopper = socket.socketpair()
        self._listener = _listen(name)
        self._segment = _allocate(limit_bytes)

    def run(self, *, watch_stdin: bool = False) -> None:
        """watch_stdin: end also when standard input does."""
        with self._selector, self._listener, self._stopped:
            self._selector.register(self._stopped, selectors.EVENT_READ, None)
            self._selector.register(self._listener, selectors.EVENT_READ, self._listener)
            if watch_stdin:
                self._selector.register(sys.stdin.fileno(), selectors.EVENT_READ, None)
            while True:
                for key, mask in self._selector.select():
                    if isinstance(key.data, _Client):
                        self._serve(key.data, mask)
                    elif key.data is self._listener:
                        self._accept()
                    elif key.fileobj is self._stopped or not os.read(key.fd, 4096):
                        return

    def stop(self) -> None:
        with contextlib.suppress(OSError):
            self._stopper.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            connection, _ = self._listener.accept()
            if not wire.is_own_user(connection) or len(self._selector.get_map()) > MAX_CLIENTS:
                connection.close()
                return
            connection.setblocking(False)
            client = _Client(next(self._numbers), connection)
            self._selector.register(connection, selectors.EVENT_READ, client)

    def _serve(self, client: _Client, mask: int) -> None:
        try:
            if mask & selectors.EVENT_READ:
                self._hear(client)
            self._flush(client)
        except (OSError, wire.BadFrame, LookupError):
            self._selector.unregister(client.connection)
            client.connection.close()
            self._index.forget(client.number)

    def _hear(self, client: _Client) -> None:
        try:
            data = client.connection.recv(_RECEIVE_BYTES)
        except BlockingIOError:
            return
        if not data:
            raise ConnectionResetError
        client.received += data
        while (message := wire.take_message(client.received)) is not None:
            if isinstance(message, Hello):
                self._welcome(client, message)
            elif not client.is_welcome:
                raise wire.BadFrame("no hello")
            else:
                for answer in self._answers(client.number, message):
                    client.unsent += wire.pack(answer)

    def _welcome(self, client: _Client, hello: Hello) -> None:
        if hello.version != wire.VERSION or client.is_welcome or client.unsent:
            raise wire.BadFrame(f"version {hello.version}")
        client.is_welcome = True
        size = self._index.limit_bytes
        frame = wire.pack(wire.Welcome(wire.VERSION, self._epoch, size))
        # It is small and the first: a socket that does not take it in one piece is no client's.
        if socket.send_fds(client.connection, [frame], [self._segment.fd]) != len(frame):
            raise wire.BadFrame("a full socket")

    def _answers(self, client: int, message: wire.FromClient) -> Iterator[wire.FromServer]:
        index, now_s = self._index, self._clock.now()
        match message:
            case Missing(namespace, keys, size):
                missing = [not index.has((namespace, key), size, now_s) for key in keys]
                yield wire.Presence(missing, self._counts())
            case Acquire(namespace, keys, size):
                lease = index.acquire(client, [(namespace, key) for key in keys], size, now_s)
                yield wire.Acquired(*lease, self._counts())
            case Release(lease_id, wrong):
                index.release(client, lease_id, wrong)
            case Reserve(namespace, keys, size) if size > 0:
                names = [(namespace, key) for key in dict.fromkeys(keys)]
                if len(names) != len(keys):
                    raise wire.BadFrame("a key twice")
                yield wire.Reserved(*index.reserve(client, names, size, now_s))
            case Commit(reservation, digests):
                yield wire.Committed(
                    index.commit(client, reservation, digests, now_s), self._counts()
                )
            case _:
                raise wire.BadFrame("an empty block")

    def _counts(self) -> wire.Counts:
        return wire.Counts(self._index.num_blocks, self._index.num_bytes)

    def _flush(self, client: _Client) -> None:
        """Send what the socket takes, and the rest when it takes more."""
        while client.unsent:
            try:
                num = client.connection.send(client.unsent)
            except BlockingIOError:
                break
            del client.unsent[:num]
        if len(client.unsent) > MAX_UNSENT_BYTES:
            raise wire.BadFrame("a client that does not read")
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if client.unsent else 0)
        if self._selector.get_key(client.connection).events != events:
            self._selector.modify(client.connection, events, client)


def _listen(name: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        listener.bind("\0" + name)
    except OSError as error:
        listener.close()
        raise ConfigError(f"The memory tier can't listen at unix:{name}: {error}.") from error
    listener.setblocking(False)
    listener.listen(64)
    return listener


def _allocate(num_bytes: int) -> Segment:
    try:
        return Segment.create(1, num_bytes, "splitserve-store")
    except ConfigError as error:
        raise ConfigError(
            f"The memory tier needs {num_bytes / 2**20:.0f} MiB. {error.message}",
            advice="Lower its limit.",
        ) from error


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m splitserve.store.memory_server")
    parser.add_argument("--name", required=True, help="of the abstract Unix socket")
    parser.add_argument("--limit", required=True, help="size of the segment: 512M, 2G")
    parser.add_argument("--policy", default="lru", choices=list(Policy))
    parser.add_argument("--ttl", default=0.0, type=float, help="in seconds; 0: never")
    parser.add_argument("--watch-stdin", action="store_true", help="end when stdin does")
    options = parser.parse_args()
    try:
        limit = parse_size(options.limit)
        policy = Policy(options.policy)
        server = MemoryServer(options.name, limit, policy, options.ttl, MonotonicClock())
    except ConfigError as error:
        sys.exit(f"{error.message} {error.advice}".strip())
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: server.stop())
    sys.stdout.write(f"listening at unix:{options.name}\n")
    sys.stdout.flush()
    server.run(watch_stdin=options.watch_stdin)


if __name__ == "__main__":
    main()
