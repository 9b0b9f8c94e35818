"""Tier `redis`: a value per block, header and bytes, in a server that needs no settings for it.

Each batch is one round trip. With a limit others are evicted when a batch is saved, in one
transaction with it (store.redis_scripts); without one the server's own `maxmemory` applies. Not
for a redis cluster: the index is on one server.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import redis

from splitserve.errors import ConfigError, StoreError
from splitserve.store import record
from splitserve.store import redis_scripts as scripts
from splitserve.store.base import Block, Tier, TierConfig, TierStats
from splitserve.store.eviction import BETWEEN_S
from splitserve.store.record import Record, digest_of, namespace_digest
from splitserve.store.redis_wire import Argument, Reader, RedisRefused, Reply, limit_waiting, pack

T = TypeVar("T")


class _Session:
    """One connection. What goes wrong is an OSError, a redis.RedisError or RedisRefused."""

    def __init__(self, pool: redis.ConnectionPool, timeout_s: float) -> None:
        self._connection = pool.connection_class(**pool.connection_kwargs)
        self._connection.connect()
        self._socket: socket.socket = self._connection._sock
        limit_waiting(self._socket, timeout_s)
        self.reader = Reader(self._socket)

    def send(self, *commands: Sequence[Argument]) -> None:
        for buffer in pack(commands):
            self._socket.sendall(buffer)

    def replies(self, num: int) -> list[Reply]:
        """Of so many commands; all are read before an error among them is raised."""
        replies = [self.reader.reply() for _ in range(num)]
        for reply in replies:
            if isinstance(reply, RedisRefused):
                raise reply
        return replies

    def close(self) -> None:
        self._connection.disconnect()


class _Line:
    """A session that is opened when it is needed, used by one thread at a time."""

    def __init__(self, pool: redis.ConnectionPool, address: str, timeout_s: float) -> None:
        self._pool = pool
        self._address = address
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._session: _Session | None = None

    def run(self, work: Callable[[_Session], T]) -> T:
        """Raise StoreError. Work on a connection that the server closed meanwhile is begun anew on
        another: all that is asked here can be asked twice."""
        with self._lock:
            if self._session is not None:
                try:
                    return self._run(work)
                except ConnectionError:
                    pass
                except _TROUBLE as error:
                    raise self._unreachable(error) from error
            try:
                return self._run(work)
            except _TROUBLE as error:
                raise self._unreachable(error) from error

    def close(self) -> None:
        with self._lock:
            if self._session is not None:
                self._session.close()
                self._session = None

    def _run(self, work: Callable[[_Session], T]) -> T:
        if self._session is None:
            self._session = _Session(self._pool, self._timeout_s)
        try:
            return work(self._session)
        except BaseException:  # a reply may be half read
            self._session.close()
            self._session = None
            raise

    def _unreachable(self, error: Exception) -> StoreError:
        return StoreError(f"Tier redis can't use {self._address}: {error}.")


_TROUBLE = (OSError, redis.RedisError, RedisRefused)


class RedisTier(Tier):
    """place: `//[user:password@]host[:port][/database]`, or the path of a Unix socket."""

    name = "redis"

    def __init__(self, place: str, config: TierConfig) -> None:
        self._config = config
        self._namespace = namespace_digest(config.namespace)
        pool = _make_pool(place, config.timeout_s)
        address = place.rpartition("@")[2].lstrip("/") if place.startswith("//") else place
        self._asking = _Line(pool, address, config.timeout_s)
        self._loading = _Line(pool, address, config.timeout_s)
        self._saving = _Line(pool, address, config.timeout_s)
        self._head = memoryview(bytearray(record.HEADER_BYTES))  # of the thread that loads
        self._counting = threading.Lock()
        self._stats = TierStats()

    def find(self, keys: Sequence[bytes]) -> int:
        there = self._asking.run(lambda session: self._are_there(session, keys))
        return (*there, False).index(False)

    def missing(self, keys: Sequence[bytes]) -> list[bool]:
        there = self._saving.run(lambda session: self._are_there(session, keys))
        return [not is_there for is_there in there]

    def load(self, keys: Sequence[bytes], targets: Sequence[Block]) -> int:
        num = self._loading.run(lambda session: self._load(session, keys, targets))
        with self._counting:
            self._stats.hits += num
            self._stats.misses += num < len(keys)
        return num

    def save(self, keys: Sequence[bytes], blocks: Sequence[Block], digests: Sequence[bytes]) -> int:
        limit, size = self._config.limit_bytes, self._config.block_bytes
        first = {key: i for i, key in reversed(list(enumerate(keys)))}
        chosen = sorted(first.values())[: limit // size if limit else None]
        if not chosen:
            return 0
        return self._saving.run(lambda session: self._save(session, chosen, keys, blocks, digests))

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

    def _name(self, key: bytes) -> bytes:
        return b"splitserve:kv:%s:%s" % (self._namespace.hex().encode(), key.hex().encode())

    def _member(self, key: bytes) -> bytes:
        return b"%d:%s" % (self._config.block_bytes, self._name(key))

    def _are_there(self, session: _Session, keys: Sequence[bytes]) -> list[bool]:
        session.send(*((b"EXISTS", self._name(key)) for key in keys))
        return [reply == 1 for reply in session.replies(len(keys))]

    # --- loading

    def _load(self, session: _Session, keys: Sequence[bytes], targets: Sequence[Block]) -> int:
        if not keys:
            return 0
        commands: list[list[Argument]] = [[b"MGET", *map(self._name, keys)]]
        if self._config.limit_bytes:
            commands.append(self._touch(keys))
        session.send(*commands)
        if session.reader.array_length() != len(keys):
            raise ConnectionError("an answer for other keys")
        num = len(keys)
        is_wrong = False
        for i, (key, target) in enumerate(zip(keys, targets, strict=True)):
            found = session.reader.value_into(self._head, target.data)
            if i < num and not (found and self._is_proved(key, target)):
                num, is_wrong = i, found is not None
        session.replies(len(commands) - 1)
        if num < len(keys):
            self._forget(session, keys[num], is_wrong=is_wrong)
        return num

    def _is_proved(self, key: bytes, target: Block) -> bool:
        found = record.unpack(self._head)
        return (
            found is not None
            and found.is_of(key, self._namespace, self._config.block_bytes)
            and found.digest == digest_of(target)
        )

    def _touch(self, keys: Sequence[bytes]) -> list[Argument]:
        now_s = time.time()
        arguments: list[Argument] = [self._config.policy.value.encode()]
        for i, key in enumerate(keys):
            arguments += [self._member(key), b"%.6f" % (now_s - i * BETWEEN_S)]
        return _evaluate(scripts.TOUCH, *arguments)

    def _forget(self, session: _Session, key: bytes, *, is_wrong: bool) -> None:
        """Remove what is wrong; what is not there may also be of another type than a string."""
        session.send(_evaluate(scripts.FORGET, self._member(key), b"any" if is_wrong else b""))
        (was_wrong,) = session.replies(1)
        with self._counting:
            self._stats.corrupt += was_wrong == 1

    # --- saving

    def _save(
        self,
        session: _Session,
        chosen: list[int],
        keys: Sequence[bytes],
        blocks: Sequence[Block],
        digests: Sequence[bytes],
    ) -> int:
        now_s = time.time()
        sets = [self._set(keys[i], blocks[i], digests[i], now_s) for i in chosen]
        commands: list[list[Argument]] = [[b"MULTI"], *sets, [b"EXEC"]]
        if self._config.limit_bytes:
            commands.insert(-1, self._keep([keys[i] for i in chosen], now_s))
        session.send(*commands)
        done = session.replies(len(commands))[-1]
        if not isinstance(done, list):
            raise ConnectionError("an unreadable answer to EXEC")
        for reply in done:
            if isinstance(reply, RedisRefused):
                raise reply
        num_saved = done[: len(sets)].count(b"OK")
        with self._counting:
            self._stats.saved += num_saved
            if self._config.limit_bytes:
                self._count(done[-1])
        return num_saved

    def _set(self, key: bytes, block: Block, digest: bytes, now_s: float) -> list[Argument]:
        size = self._config.block_bytes
        head = record.pack(Record(key, self._namespace, size, digest, now_s))
        command: list[Argument] = [b"SET", self._name(key), (head, block.data), b"NX"]
        if self._config.ttl_s:
            command += [b"PX", b"%d" % max(self._config.ttl_s * 1e3, 1)]
        return command

    def _keep(self, keys: list[bytes], now_s: float) -> list[Argument]:
        arguments: list[Argument] = [b"%d" % self._config.limit_bytes, b"%.6f" % now_s]
        for rank, key in enumerate(keys):
            arguments += [self._member(key), b"%.6f" % (now_s - rank * BETWEEN_S)]
        return _evaluate(scripts.KEEP, *arguments)

    def _count(self, counts: Reply) -> None:
        if not (isinstance(counts, list) and [type(number) for number in counts] == [int] * 3):
            raise ConnectionError("an unreadable answer to a script")
        num_evicted, self._stats.num_blocks, self._stats.num_bytes = cast(list[int], counts)
        self._stats.evicted += num_evicted


def _evaluate(script: str, *arguments: Argument) -> list[Argument]:
    num_keys = b"%d" % len(scripts.INDEX)
    return [b"EVAL", script.encode(), num_keys, *scripts.INDEX, *arguments]


def _make_pool(place: str, timeout_s: float) -> redis.ConnectionPool:
    """What knows how to connect; we hold the connections ourselves."""
    url = f"redis:{place}" if place.startswith("//") else f"unix://{place}"
    options: dict[str, Any] = {
        "socket_timeout": timeout_s,
        "socket_connect_timeout": timeout_s,
        "protocol": 2,
        "retry": None,
    }
    if not place.startswith("/"):
        raise ConfigError(f"Tier redis is at //host:port/database, not at {place!r}.")
    try:
        return redis.ConnectionPool.from_url(url, **options)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"Tier redis can't be at {place!r}: {error}.") from error
