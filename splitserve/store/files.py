"""A tier of files, one per block: what `disk` and `shared_storage` have in common.

A block is written aside and renamed, so it is there whole or not at all; nothing is synced, because
a digest shows what a power failure left. Reading takes neither locks nor notes: a file that is
evicted meanwhile stays readable through its descriptor. Eviction is by each process for all
(store.catalogue), once before a batch is written and once after: while several write at the same
time, the limit may be exceeded by what the others are writing.
"""

from __future__ import annotations

import abc
import contextlib
import itertools
import os
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from splitserve.errors import ConfigError, StoreError
from splitserve.store.base import Block, Tier, TierConfig, TierStats
from splitserve.store.catalogue import Catalogue
from splitserve.store.eviction import BETWEEN_S, used
from splitserve.store.record import Record, digest_of, namespace_digest

NUM_READERS = 4
ASIDE = "aside"  # the folder of files that are being written
ABANDONED_S = 3600.0


class Encoding(abc.ABC):
    """How a block is written as a file: a head of fixed size, then its bytes."""

    suffix: str
    head_bytes: int

    @abc.abstractmethod
    def pack(self, record: Record) -> bytes:
        """The head, `head_bytes` long."""

    @abc.abstractmethod
    def unpack(self, head: bytearray) -> Record | None:
        """What a head says; None if it is none."""


class FileTier(Tier):
    """settled_s: see Catalogue."""

    def __init__(
        self, name: str, place: str, config: TierConfig, encoding: Encoding, settled_s: float
    ) -> None:
        self.name = name
        self._root = Path(place)
        self._config = config
        self._encoding = encoding
        self._namespace = namespace_digest(config.namespace)
        self._folder = self._root / self._namespace.hex()
        self._file_bytes = encoding.head_bytes + config.block_bytes
        self._stats = TierStats()
        self._counting = threading.Lock()
        self._names = (f"{os.getpid()}-{uuid.uuid4().hex[:8]}-{i}" for i in itertools.count())
        _require_directory(self._root)
        self._readers = ThreadPoolExecutor(NUM_READERS, thread_name_prefix=f"kv-{name}")
        self._catalogue = Catalogue(self._root, encoding.suffix, encoding.head_bytes, settled_s)
        self._writing = threading.Lock()  # of the catalogue too
        self._opener = threading.Thread(target=self._look_around, name=f"kv-{name}", daemon=True)
        self._opener.start()

    def find(self, keys: Sequence[bytes]) -> int:
        with self._reaching():
            for i, key in enumerate(keys):
                if not self._is_there(key):
                    return i
        return len(keys)

    def missing(self, keys: Sequence[bytes]) -> list[bool]:
        with self._reaching():
            return [not self._is_there(key) for key in keys]

    def load(self, keys: Sequence[bytes], targets: Sequence[Block]) -> int:
        batch = _Batch(keys, targets)
        readers = min(NUM_READERS, len(keys))
        with self._reaching():
            # All have ended before an error is raised: nothing may touch the targets after that.
            others = [self._readers.submit(self._read_some, batch) for _ in range(readers - 1)]
            errors = [self._read_some(batch), *(other.result() for other in others)]
            for error in filter(None, errors):
                raise error
        with self._counting:
            self._stats.hits += batch.end
            self._stats.misses += batch.end < len(keys)
        return batch.end

    def save(self, keys: Sequence[bytes], blocks: Sequence[Block], digests: Sequence[bytes]) -> int:
        limit, size = self._config.limit_bytes, self._config.block_bytes
        with self._writing, self._reaching():
            gone = dict(zip(keys, self.missing(keys), strict=True))
            wanted = {key: i for i, key in enumerate(keys) if gone[key]}
            chosen = list(wanted.items())[: limit // size if limit else None]
            if not chosen:
                return 0
            self._keep_within(limit - len(chosen) * size)
            now_s = time.time()
            for rank, (key, i) in enumerate(chosen):
                self._write(key, blocks[i], digests[i], now_s - rank * BETWEEN_S)
            self._keep_within(limit)
        return len(chosen)

    def stats(self) -> TierStats:
        with self._counting:
            counts = self._stats
            return TierStats(
                self._catalogue.num_blocks,
                self._catalogue.num_bytes,
                counts.hits,
                counts.misses,
                counts.saved,
                counts.evicted,
                counts.corrupt,
            )

    def close(self) -> None:
        self._opener.join()
        self._readers.shutdown(wait=True)

    @abc.abstractmethod
    def _is_abandoned(self, name: str, age_s: float) -> bool:
        """Whether nobody writes this file any more. name: what `_names` makes."""

    # --- reading

    def _path(self, key: bytes) -> str:
        digits = key.hex()
        return f"{self._folder}/{digits[:2]}/{digits}{self._encoding.suffix}"

    def _is_there(self, key: bytes) -> bool:
        path = self._path(key)
        try:
            if os.stat(path).st_size != self._file_bytes:
                return False
            if not self._config.ttl_s:
                return True
            with open(path, "rb", buffering=0) as file:
                head = bytearray(file.read(self._encoding.head_bytes))
        except FileNotFoundError:
            return False
        record = self._encoding.unpack(head)
        return record is not None and not record.is_expired(self._config.ttl_s, time.time())

    def _read_some(self, batch: _Batch) -> OSError | None:
        head = bytearray(self._encoding.head_bytes)
        try:
            for i in batch.indices():
                used_s = batch.started_s - i * BETWEEN_S
                if not self._read(batch.keys[i], head, batch.targets[i], used_s):
                    batch.stop_at(i)
        except OSError as error:
            batch.stop_at(0)
            return error
        return None

    def _read(self, key: bytes, head: bytearray, target: Block, now_s: float) -> bool:
        path = self._path(key)
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        try:
            status = os.fstat(fd)
            whole = status.st_size == self._file_bytes and _read_whole(fd, head, target)
            record = self._encoding.unpack(head) if whole else None
            if not (
                record is not None
                and record.is_of(key, self._namespace, self._config.block_bytes)
                and record.digest == digest_of(target)
            ):
                self._remove(path, is_corrupt=True)
                return False
            if record.is_expired(self._config.ttl_s, now_s):
                self._remove(path, is_corrupt=False)
                return False
            score_s = used(self._config.policy, status.st_mtime, now_s)
            with contextlib.suppress(OSError):  # another's file, or a read-only mount
                os.utime(fd, ns=(int(score_s * 1e9),) * 2)
            return True
        finally:
            os.close(fd)

    def _remove(self, path: str, *, is_corrupt: bool) -> None:
        with self._counting:
            self._stats.corrupt += is_corrupt
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)

    # --- writing

    def _keep_within(self, limit_bytes: int) -> None:
        if self._config.limit_bytes:
            self._catalogue.refresh()
            num_evicted = self._catalogue.evict(limit_bytes)
            with self._counting:
                self._stats.evicted += num_evicted

    def _write(self, key: bytes, block: Block, digest: bytes, score_s: float) -> None:
        size = self._config.block_bytes
        head = self._encoding.pack(Record(key, self._namespace, size, digest, time.time()))
        aside = self._root / ASIDE / next(self._names)
        path = self._path(key)
        try:
            fd = _create(aside)
            try:
                _write_whole(fd, head, block)
                os.utime(fd, ns=(int(score_s * 1e9),) * 2)
            finally:
                os.close(fd)  # where a network file system says that it is full
            _rename(aside, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(aside)
            raise
        self._catalogue.add(os.path.relpath(path, self._root), size, score_s)
        with self._counting:
            self._stats.saved += 1

    # --- opening

    def _look_around(self) -> None:
        with self._writing, contextlib.suppress(OSError):
            self._catalogue.refresh()
            self._clear_aside()

    def _clear_aside(self) -> None:
        now_s = time.time()
        with os.scandir(self._root / ASIDE) as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):
                    if self._is_abandoned(entry.name, now_s - entry.stat().st_mtime):
                        os.unlink(entry.path)

    @contextlib.contextmanager
    def _reaching(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise StoreError(f"Tier {self.name} can't use {self._root}: {error}.") from error


class _Batch:
    """Keys that several threads load: each takes the next; `end` is before the first that fails."""

    def __init__(self, keys: Sequence[bytes], targets: Sequence[Block]) -> None:
        self.keys = keys
        self.targets = targets
        self.started_s = time.time()
        self.end = len(keys)
        self._next = itertools.count()
        self._lock = threading.Lock()

    def indices(self) -> Iterator[int]:
        for i in self._next:
            if i >= self.end:
                return
            yield i

    def stop_at(self, i: int) -> None:
        with self._lock:
            self.end = min(self.end, i)


def _require_directory(root: Path) -> None:
    """Raise ConfigError if a file is in the way. Whatever else is wrong may pass: a StoreError."""
    for path in (root, *root.parents):
        if path.exists() and not path.is_dir():
            raise ConfigError(f"{path} is a file: blocks need a directory.")


def _read_whole(fd: int, head: bytearray, target: Block) -> bool:
    """Head and block, from the start of the file; False if it ends before."""
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_WILLNEED)
    num = os.preadv(fd, [head, target.data], 0)
    while num < len(head) + len(target):
        if num < len(head):
            return False
        more = os.preadv(fd, [target[num - len(head) :].data], num)
        if not more:
            return False
        num += more
    return True


def _create(path: Path) -> int:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    try:
        return os.open(path, flags, 0o600)
    except FileNotFoundError:
        path.parent.mkdir(parents=True, exist_ok=True)
        return os.open(path, flags, 0o600)


def _write_whole(fd: int, head: bytes, block: Block) -> None:
    num = os.writev(fd, [head, block.data])
    while num < len(head) + len(block):
        rest = block[max(num - len(head), 0) :]
        num += os.writev(fd, [head[num:], rest.data])


def _rename(aside: Path, path: str) -> None:
    try:
        os.replace(aside, path)
    except FileNotFoundError:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        os.replace(aside, path)
