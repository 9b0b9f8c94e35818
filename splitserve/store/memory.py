"""Tier `memory`: the segment of this host's memory server, mapped; we copy blocks ourselves.

Looking up, loading and saving have a connection each, used for one batch at a time: ask, copy,
tell. So a look-up waits for no copy, a connection is never dropped while its blocks are being
copied, and the server may take an end of the connection for the end of the copying.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np

from splitserve.errors import ConfigError, StoreError, TransferFailed
from splitserve.store import memory_wire as wire
from splitserve.store.base import Block, Tier, TierConfig, TierStats
from splitserve.store.record import digest_of, namespace_digest
from splitserve.transport.segment import Segment

T = TypeVar("T")
M = TypeVar("M", bound=wire.FromServer)


class _Memory:
    """The segment of one start of the server, as all connections see it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._epoch = ""
        self._segment: Segment | None = None

    def map(self, epoch: str, fd: int, num_bytes: int) -> Block:
        """uint8 [num_bytes]; takes over the descriptor."""
        with self._lock:
            if self._segment is not None and epoch == self._epoch:
                os.close(fd)
            else:
                self.close()
                self._segment, self._epoch = Segment.attach(fd, 1, num_bytes, writable=True), epoch
            flat: Block = self._segment.blocks[0]
            return flat

    def close(self) -> None:
        if self._segment is not None:
            self._segment.close()
            self._segment = None


class _Session:
    """One connection to the server. Whatever goes wrong is an OSError."""

    def __init__(self, name: str, timeout_s: float, memory: _Memory) -> None:
        self._timeout_s = timeout_s
        self._connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            self._connection.settimeout(timeout_s)
            self._connection.connect("\0" + name)
            if not wire.is_own_user(self._connection):
                raise ConnectionError("its server runs as another user")
            self.tell(wire.Hello(wire.VERSION))
            welcome, descriptors = wire.receive(self._connection, timeout_s)
            if not isinstance(welcome, wire.Welcome) or len(descriptors) != 1:
                for fd in descriptors:
                    os.close(fd)
                raise ConnectionError("its server sent no welcome")
            self.memory = memory.map(welcome.epoch, descriptors[0], welcome.num_bytes)
        except TransferFailed as error:
            self.close()
            raise ConnectionError(error.message) from error
        except BaseException:
            self.close()
            raise

    def ask(self, message: wire.FromClient, kind: type[M]) -> M:
        self.tell(message)
        answer, _ = wire.receive(self._connection, self._timeout_s)
        if not isinstance(answer, kind):
            raise ConnectionError(f"its server answered {type(answer).__name__}")
        return answer

    def tell(self, message: wire.FromClient) -> None:
        self._connection.settimeout(self._timeout_s)
        self._connection.sendall(wire.pack(message))

    def place(self, offset: int, num_bytes: int) -> Block:
        if not 0 <= offset <= len(self.memory) - num_bytes:
            raise ConnectionError("its server gave a place outside its segment")
        return self.memory[offset : offset + num_bytes]

    def close(self) -> None:
        self._connection.close()


class _Line:
    """A session that is opened when it is needed, used by one thread at a time."""

    def __init__(self, name: str, timeout_s: float, memory: _Memory) -> None:
        self._name = name
        self._timeout_s = timeout_s
        self._memory = memory
        self._lock = threading.Lock()
        self._session: _Session | None = None

    def run(self, work: Callable[[_Session], T]) -> T:
        """Raise StoreError. Work on a connection that turns out to be an old server's is begun
        anew on another."""
        with self._lock:
            if self._session is not None:
                try:
                    return self._run(work)
                except ConnectionError:
                    pass
                except OSError as error:
                    raise self._unreachable(error) from error
            try:
                return self._run(work)
            except OSError as error:
                raise self._unreachable(error) from error

    def close(self) -> None:
        with self._lock:
            if self._session is not None:
                self._session.close()
                self._session = None

    def _run(self, work: Callable[[_Session], T]) -> T:
        if self._session is None:
            self._session = _Session(self._name, self._timeout_s, self._memory)
        try:
            return work(self._session)
        except BaseException:  # whatever was under way is undone by the server
            self._session.close()
            self._session = None
            raise

    def _unreachable(self, error: OSError) -> StoreError:
        return StoreError(f"Tier memory can't be reached at unix:{self._name}: {error}.")


class MemoryTier(Tier):
    """place: `unix:NAME`, where the host's server listens. Limit, policy and time to live are the
    server's."""

    name = "memory"

    def __init__(self, place: str, config: TierConfig) -> None:
        kind, _, name = place.partition(":")
        if kind != "unix" or not name:
            raise ConfigError(
                f"Tier memory needs the address of its server, unix:NAME, not {place!r}.",
                advice="python -m splitserve.store.memory_server serves one.",
            )
        self._size = config.block_bytes
        self._namespace = namespace_digest(config.namespace)
        self._memory = _Memory()
        self._asking = _Line(name, config.timeout_s, self._memory)
        self._loading = _Line(name, config.timeout_s, self._memory)
        self._saving = _Line(name, config.timeout_s, self._memory)
        self._counting = threading.Lock()
        self._stats = TierStats()

    def find(self, keys: Sequence[bytes]) -> int:
        missing = self._asking.run(lambda session: self._missing(session, keys))
        return (*missing, True).index(True)

    def missing(self, keys: Sequence[bytes]) -> list[bool]:
        return self._saving.run(lambda session: self._missing(session, keys))

    def load(self, keys: Sequence[bytes], targets: Sequence[Block]) -> int:
        num = self._loading.run(lambda session: self._load(session, keys, targets))
        with self._counting:
            self._stats.hits += num
            self._stats.misses += num < len(keys)
        return num

    def save(self, keys: Sequence[bytes], blocks: Sequence[Block], digests: Sequence[bytes]) -> int:
        unique = {key: i for i, key in reversed(list(enumerate(keys)))}
        order = sorted(unique.values())
        return self._saving.run(
            lambda session: self._save(
                session,
                [keys[i] for i in order],
                [blocks[i] for i in order],
                [digests[i] for i in order],
            )
        )

    def stats(self) -> TierStats:
        with self._counting:
            return TierStats(
                self._stats.num_blocks,
                self._stats.num_bytes,
                self._stats.hits,
                self._stats.misses,
                self._stats.saved,
                self._stats.evicted,
                self._stats.corrupt,
            )

    def close(self) -> None:
        self._asking.close()
        self._loading.close()
        self._saving.close()
        self._memory.close()

    def _missing(self, session: _Session, keys: Sequence[bytes]) -> list[bool]:
        question = wire.Missing(self._namespace, list(keys), self._size)
        presence = session.ask(question, wire.Presence)
        if len(presence.missing) != len(keys):
            raise ConnectionError("its server answered for other keys")
        self._note(presence.counts)
        return presence.missing

    def _load(self, session: _Session, keys: Sequence[bytes], targets: Sequence[Block]) -> int:
        question = wire.Acquire(self._namespace, list(keys), self._size)
        acquired = session.ask(question, wire.Acquired)
        wrong = []
        num = 0
        for offset, digest in zip(acquired.offsets, acquired.digests, strict=True):
            np.copyto(targets[num], session.place(offset, self._size))
            if digest_of(targets[num]) != digest:
                wrong.append(num)
                break
            num += 1
        session.tell(wire.Release(acquired.lease, wrong))
        self._note(acquired.counts)
        with self._counting:
            self._stats.corrupt += len(wrong)
        return num

    def _save(
        self,
        session: _Session,
        keys: list[bytes],
        blocks: list[Block],
        digests: list[bytes],
    ) -> int:
        reserved = session.ask(wire.Reserve(self._namespace, keys, self._size), wire.Reserved)
        for i, offset in zip(reserved.indices, reserved.offsets, strict=True):
            np.copyto(session.place(offset, self._size), blocks[i])
        proofs = [digests[i] for i in reserved.indices]
        committed = session.ask(wire.Commit(reserved.reservation, proofs), wire.Committed)
        self._note(committed.counts)
        with self._counting:
            self._stats.saved += committed.num_saved
            self._stats.evicted += reserved.num_evicted
        return committed.num_saved

    def _note(self, counts: wire.Counts) -> None:
        with self._counting:
            self._stats.num_blocks, self._stats.num_bytes = counts.num_blocks, counts.num_bytes
