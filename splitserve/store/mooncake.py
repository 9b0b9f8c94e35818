"""Tier `mooncake`: a value per block, header and bytes, in the memory that processes add to a pool.

Mooncake's master knows who holds what; blocks move between the processes by tcp. Its client runs in
a process of its own (store.mooncake_client), which is killed when it does not answer in time, and
fills memory that only the two of us map: a target is written by nobody but us. Each batch is one
question to it.

`limit` is what this process adds to the pool, in one more process; without it we add nothing, and
the pool is what others add: stand-alone clients of Mooncake, which outlive all workers. What a
process added is lost with it.

What the other tiers promise and this one does not:

  - The limit: the pool is as large as all that was added to it. The master evicts what was not used
    for longest, more or less: 5 % when 90 % are full, and nothing that was found or loaded in the
    last 10 s (its default_kv_lease_ttl). What a save finds no room for is dropped.
  - The policy is the master's; `frequency` is refused.
  - What a writer that died had begun to save can't be saved by others for 30 s (its
    put_start_discard_timeout_sec), and a save meanwhile counts as done: the library says so.
  - Which blocks there are is not counted (`num_blocks`), nor what is evicted.
  - The timeout is of an answer. After a client was killed the next call starts another: 0.3 s more.
  - A holder that died is found out by its blocks, at a second each batch, until the master gives
    it up after 10 s (its client_ttl).

Nothing in Mooncake is protected: whoever reaches the ports of master and holders may read and write
all blocks. Only for networks of which every host is trusted.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec
import numpy as np

from splitserve.errors import ConfigError, StoreError
from splitserve.store import mooncake_client as client
from splitserve.store import record
from splitserve.store.base import Block, Policy, Tier, TierConfig, TierStats
from splitserve.store.mooncake_client import Setup
from splitserve.store.record import HEADER_BYTES, Record, digest_of, namespace_digest
from splitserve.transport.segment import Segment

log = logging.getLogger(__name__)

T = TypeVar("T")

AREA_BYTES = 8 << 20
"""Of each line, unless a record is larger: what is moved at once."""
MAX_KEYS = 256
_START_S = 20.0
_STOP_S = 6.0
_ASKING, _LOADING, _SAVING = range(3)
_EXISTS_ALREADY = -705
_GONE = (-702, -703, -704, -707, -710, -712)
"""No such block, or none that is whole; or the master might have given its place to another while
we read."""
_TOO_LARGE = -600


class _Process:
    """One run of the client. What goes wrong is an OSError; ImportError if it can't be had."""

    def __init__(self, setup: Setup, num_lines: int) -> None:
        pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(num_lines)]
        self._lines = [ours for ours, _ in pairs]
        theirs = [fd for _, fd in pairs]
        memory = Segment.create(num_lines, setup.area_bytes, "mooncake") if num_lines > 1 else None
        self.areas = memory.blocks if memory else np.empty((0, 0), np.uint8)
        lines = [line.fileno() for line in theirs]
        descriptors = [*lines, memory.fd] if memory else lines
        setup = msgspec.structs.replace(setup, lines=lines, memory=memory.fd if memory else -1)
        command = [sys.executable, "-m", "splitserve.store.mooncake_client"]
        self._process = subprocess.Popen(
            [*command, msgspec.json.encode(setup).decode()],
            pass_fds=descriptors,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,  # the library logs there whatever it is told
            start_new_session=True,
        )
        for line in theirs:
            line.close()
        if memory:
            memory.close()
        self._await_start()

    def ask(self, line: int, operation: str, names: Sequence[str], timeout_s: float) -> list[int]:
        connection = self._lines[line]
        connection.settimeout(timeout_s)
        connection.send(msgspec.msgpack.encode((operation, names)))
        if not (answer := connection.recv(client.MAX_MESSAGE_BYTES)):
            raise ConnectionResetError("its client ended")
        codes: list[int] | str = msgspec.msgpack.decode(answer, type=list[int] | str)
        if isinstance(codes, str):
            raise _Refused(codes)
        if len(codes) != len(names):
            raise _Refused(f"{len(codes)} answers to {len(names)} questions")
        return codes

    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def kill(self) -> None:
        """Nobody writes to the areas after this."""
        self._process.kill()
        self._process.wait()

    def stop(self) -> None:
        """Let it end by itself."""
        for line in self._lines:
            line.close()
        try:
            self._process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self.kill()

    def _await_start(self) -> None:
        self._lines[0].settimeout(_START_S)
        try:
            said = self._lines[0].recv(client.MAX_MESSAGE_BYTES)
        except OSError:
            self.kill()
            raise
        if said != b"ready":
            self.kill()
            raise ImportError(said.decode() or "its client does not start")


class _Refused(OSError):
    """The client is well, and says that it can't."""


class MooncakeTier(Tier):
    """place: `//host:port`, of the master."""

    name = "mooncake"

    def __init__(self, place: str, config: TierConfig) -> None:
        host, colon, port = place.removeprefix("//").rpartition(":")
        if not (place.startswith("//") and host and colon and port.isdecimal()):
            raise ConfigError(f"Tier mooncake is at //host:port of its master, not at {place!r}.")
        if config.policy is not Policy.LRU:
            raise ConfigError(
                f"Tier mooncake can't have policy={config.policy}: what is evicted is decided by "
                "Mooncake's master, by the time of the last use.",
                advice="Leave policy out.",
            )
        if importlib.util.find_spec("mooncake") is None:
            raise ImportError("No module named 'mooncake'")
        self._config = config
        self._address = f"{host}:{port}"
        self._namespace = namespace_digest(config.namespace)
        self._record_bytes = HEADER_BYTES + config.block_bytes
        self._slot_bytes = -(-self._record_bytes // 64) * 64
        self._at_once = min(max(AREA_BYTES // self._slot_bytes, 1), MAX_KEYS)
        self._setup = Setup(
            host=host,
            port=int(port),
            lines=[],
            timeout_s=config.timeout_s,
            area_bytes=self._slot_bytes * self._at_once,
            slot_bytes=self._slot_bytes,
            record_bytes=self._record_bytes,
        )
        self._using = [threading.Lock() for _ in range(3)]  # of each line
        self._starting = threading.Lock()
        self._process: _Process | None = None
        self._holder: _Process | None = None
        self._is_closed = False
        self._counting = threading.Lock()
        self._stats = TierStats()
        self._warned_full = False
        with contextlib.suppress(StoreError):  # it may come back
            self._run(_ASKING, lambda process: self._are_there(process, _ASKING, [b"any"]))
        with contextlib.suppress(StoreError):
            self._hold()

    def find(self, keys: Sequence[bytes]) -> int:
        there = self._run(_ASKING, lambda process: self._are_there(process, _ASKING, keys))
        return (*there, False).index(False)

    def missing(self, keys: Sequence[bytes]) -> list[bool]:
        there = self._run(_SAVING, lambda process: self._are_there(process, _SAVING, keys))
        return [not is_there for is_there in there]

    def load(self, keys: Sequence[bytes], targets: Sequence[Block]) -> int:
        num = self._run(_LOADING, lambda process: self._load(process, keys, targets))
        with self._counting:
            self._stats.hits += num
            self._stats.misses += num < len(keys)
        return num

    def save(self, keys: Sequence[bytes], blocks: Sequence[Block], digests: Sequence[bytes]) -> int:
        self._hold()
        first = {key: i for i, key in reversed(list(enumerate(keys)))}
        chosen = sorted(first.values())
        return self._run(
            _SAVING, lambda process: self._save(process, chosen, keys, blocks, digests)
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
        with self._starting:
            self._is_closed = True
            process, self._process = self._process, None
            holder, self._holder = self._holder, None
        if process is not None:
            process.kill()
        if holder is not None:
            holder.stop()

    # --- the client's process

    def _run(self, line: int, work: Callable[[_Process], T]) -> T:
        """Raise StoreError. A client that ended meanwhile, for whatever reason, is replaced, and
        the work begun anew: all that is asked here can be asked twice."""
        with self._using[line]:
            try:
                return self._run_once(work)
            except ConnectionError:
                pass
            except OSError as error:
                raise self._unreachable(error) from error
            try:
                return self._run_once(work)
            except OSError as error:
                raise self._unreachable(error) from error

    def _run_once(self, work: Callable[[_Process], T]) -> T:
        process = self._current()
        try:
            return work(process)
        except _Refused:
            raise
        except OSError as error:
            self._drop(process)
            if isinstance(error, TimeoutError):
                raise _Refused("no answer in time") from error
            raise

    def _current(self) -> _Process:
        with self._starting:
            if self._is_closed:
                raise _Refused("it is closed")
            if self._process is None:
                try:
                    self._process = _Process(self._setup, len(self._using))
                except (OSError, ConfigError) as error:  # no memory, or no time
                    raise _Refused(f"its client does not start, {error}") from error
            return self._process

    def _drop(self, process: _Process) -> None:
        with self._starting:
            if self._process is process:
                self._process = None
        process.kill()

    def _hold(self) -> None:
        """Add our part to the pool; once more if its process died."""
        if not self._config.limit_bytes:
            return
        with self._starting:
            if self._is_closed or (self._holder is not None and not self._holder.has_ended()):
                return
            setup = msgspec.structs.replace(self._setup, holds_bytes=self._config.limit_bytes)
            try:
                self._holder = _Process(setup, 1)
            except OSError as error:
                raise self._unreachable(error) from error

    def _unreachable(self, why: object) -> StoreError:
        return StoreError(f"Tier mooncake can't use {self._address}: {why}.")

    # --- what is asked

    def _name(self, key: bytes) -> str:
        return f"splitserve/kv/{self._namespace.hex()}/{self._config.block_bytes}/{key.hex()}"

    def _ask(self, process: _Process, line: int, operation: str, names: Sequence[str]) -> list[int]:
        return process.ask(line, operation, names, self._config.timeout_s)

    def _slots(self, process: _Process, line: int, num: int) -> list[Block]:
        return list(process.areas[line].reshape(-1, self._slot_bytes)[:num])

    def _are_there(self, process: _Process, line: int, keys: Sequence[bytes]) -> list[bool]:
        there: list[bool] = []
        at_once = self._at_once if self._config.ttl_s else MAX_KEYS
        for start in range(0, len(keys), at_once):
            names = [self._name(key) for key in keys[start : start + at_once]]
            if self._config.ttl_s:
                there += self._are_young(process, line, names)
                continue
            codes = self._ask(process, line, client.EXISTS, names)
            if any(code not in (0, 1) for code in codes):
                raise _Refused(f"look-ups end with {sorted(set(codes) - {0, 1})}")
            there += [code == 1 for code in codes]
        return there

    def _are_young(self, process: _Process, line: int, names: list[str]) -> list[bool]:
        """Mooncake keeps no time: the headers are read, and what is too old is removed."""
        codes = self._ask(process, line, client.HEADS, names)
        if trouble := [code for code in codes if code < 0 and code not in _GONE]:
            raise _Refused(f"look-ups end with {trouble[0]}")
        now_s = time.time()
        old = []
        for name, code, slot in zip(
            names, codes, self._slots(process, line, len(names)), strict=True
        ):
            found = record.unpack(slot[:HEADER_BYTES].data) if code >= 0 else None
            if found is not None and found.is_expired(self._config.ttl_s, now_s):
                old.append(name)
        if old:
            self._ask(process, line, client.REMOVE, old)
        return [code >= 0 and name not in old for name, code in zip(names, codes, strict=True)]

    # --- loading

    def _load(self, process: _Process, keys: Sequence[bytes], targets: Sequence[Block]) -> int:
        for start in range(0, len(keys), self._at_once):
            end = min(start + self._at_once, len(keys))
            unique = list(dict.fromkeys(keys[start:end]))
            names = [self._name(key) for key in unique]
            codes = self._ask(process, _LOADING, client.GET, names)
            slots = self._slots(process, _LOADING, len(names))
            got = dict(zip(unique, zip(codes, slots, strict=True), strict=True))
            for i in range(start, end):
                code, slot = got[keys[i]]
                if not self._is_good(process, keys[i], code, slot, targets[i], is_first=i == 0):
                    return i
        return len(keys)

    def _is_good(
        self,
        process: _Process,
        key: bytes,
        code: int,
        slot: Block,
        target: Block,
        *,
        is_first: bool,
    ) -> bool:
        """Fill the target with a record that is whole, right and not too old; remove what is not.
        Raise OSError for what can't be read, unless others were before."""
        if code in _GONE:
            return False
        if code < 0 and code != _TOO_LARGE:
            if is_first:
                raise _Refused(f"a load ends with {code}, as if a holder of blocks were gone")
            return False
        found = record.unpack(slot[:HEADER_BYTES].data) if code == self._record_bytes else None
        is_right = found is not None and found.is_of(key, self._namespace, self._config.block_bytes)
        is_old = found is not None and found.is_expired(self._config.ttl_s, time.time())
        if found is not None and is_right and not is_old:
            np.copyto(target, slot[HEADER_BYTES : self._record_bytes])
            is_right = digest_of(target) == found.digest
        if is_right and not is_old:
            return True
        self._ask(process, _LOADING, client.REMOVE, [self._name(key)])
        with self._counting:
            self._stats.corrupt += not is_right
        return False

    # --- saving

    def _save(
        self,
        process: _Process,
        chosen: list[int],
        keys: Sequence[bytes],
        blocks: Sequence[Block],
        digests: Sequence[bytes],
    ) -> int:
        """The library doesn't say whether a key was there already, so that is asked before."""
        there = self._are_there(process, _SAVING, [keys[i] for i in chosen])
        new = [i for i, is_there in zip(chosen, there, strict=True) if not is_there]
        codes: list[int] = []
        for start in range(0, len(new), self._at_once):
            batch = new[start : start + self._at_once]
            now_s = time.time()
            for slot, i in zip(self._slots(process, _SAVING, len(batch)), batch, strict=True):
                size = self._config.block_bytes
                head = record.pack(Record(keys[i], self._namespace, size, digests[i], now_s))
                slot[:HEADER_BYTES] = np.frombuffer(head, np.uint8)
                slot[HEADER_BYTES : self._record_bytes] = blocks[i]
            codes += self._ask(process, _SAVING, client.PUT, [self._name(keys[i]) for i in batch])
            if client.NO_ROOM in codes:
                self._warn_full()
                break
        num = codes.count(0)
        trouble = [code for code in codes if code not in (0, client.NO_ROOM, _EXISTS_ALREADY)]
        if trouble and not num:
            raise _Refused(f"a save ends with {trouble[0]}, as if a holder of blocks were gone")
        with self._counting:
            self._stats.saved += num
        return num

    def _warn_full(self) -> None:
        if not self._warned_full:
            self._warned_full = True
            log.warning(
                "the pool of mooncake's master %s has no room for some blocks: nobody adds to it "
                "(a stand-alone client, or limit=), or all in it is in use",
                self._address,
            )
