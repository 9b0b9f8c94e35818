"""Where in the segment blocks lie, who reads them, and who is writing some: bookkeeping only.

Blocks of any size lie side by side, first fit, neighbours that are free joined. In a namespace all
blocks are of one size, and most hosts serve one model; with several, slabs of fixed size would need
to be moved between them, while here a larger block evicts until a gap is wide enough.

A block that is read is not evicted; what is reserved for a writer is in no lookup before its
commit. Two writers of one key get a place each, and the first commit wins: a frozen one keeps
nobody from saving.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

from splitserve.store.base import Policy
from splitserve.store.eviction import BETWEEN_S, Victims, used

ALIGN_BYTES = 64

Name = tuple[bytes, bytes]
"""Digest of the namespace, key."""


class Space:
    """Free intervals of a segment, by offset; neighbours are joined."""

    def __init__(self, num_bytes: int) -> None:
        self._free = [(0, num_bytes)] if num_bytes else []

    def take(self, num_bytes: int) -> int | None:
        """The offset of the first gap that is wide enough."""
        for i, (offset, width) in enumerate(self._free):
            if width >= num_bytes:
                rest = (offset + num_bytes, width - num_bytes)
                self._free[i : i + 1] = [rest] if rest[1] else []
                return offset
        return None

    def give(self, offset: int, num_bytes: int) -> None:
        i = bisect.bisect(self._free, (offset, 0))
        first, last = i, i
        end = offset + num_bytes
        if i and sum(self._free[i - 1]) == offset:
            first, offset = i - 1, self._free[i - 1][0]
        if i < len(self._free) and self._free[i][0] == end:
            last, end = i + 1, sum(self._free[i])
        self._free[first:last] = [(offset, end - offset)]

    def free(self) -> list[tuple[int, int]]:
        return list(self._free)


@dataclass(slots=True)
class _Slot:
    """A block in its place. num_pins: leases that read it; one that is removed meanwhile keeps its
    place until the last of them ends."""

    offset: int
    num_bytes: int
    digest: bytes
    saved_s: float
    score_s: float
    num_pins: int = 0
    is_removed: bool = False


@dataclass(slots=True)
class _Client:
    leases: dict[int, list[tuple[Name, _Slot]]] = field(default_factory=dict)
    reserved: dict[int, list[tuple[Name, int, int]]] = field(default_factory=dict)


class MemoryIndex:
    """Clients are known by numbers of the caller's. Times are of one monotonic clock."""

    def __init__(self, limit_bytes: int, policy: Policy, ttl_s: float) -> None:
        self.limit_bytes = limit_bytes
        self._policy = policy
        self._ttl_s = ttl_s
        self._space = Space(limit_bytes)
        self._slots: dict[Name, _Slot] = {}
        self._clients: dict[int, _Client] = {}
        self._ids = itertools.count(1)
        self._victims: Victims[Name] = Victims(self._score_of)
        self.num_bytes = 0

    @property
    def num_blocks(self) -> int:
        return len(self._slots)

    def has(self, name: Name, num_bytes: int, now_s: float) -> bool:
        return self._get(name, num_bytes, now_s) is not None

    def acquire(
        self, client: int, names: Sequence[Name], num_bytes: int, now_s: float
    ) -> tuple[int, list[int], list[bytes]]:
        """Pin the leading blocks that are there: a lease's id, their offsets and digests."""
        slots = []
        for rank, name in enumerate(names):
            slot = self._get(name, num_bytes, now_s)
            if slot is None:
                break
            slot.num_pins += 1
            slot.score_s = used(self._policy, slot.score_s, now_s - rank * BETWEEN_S)
            slots.append((name, slot))
        lease = next(self._ids)
        self._client(client).leases[lease] = slots
        return lease, [slot.offset for _, slot in slots], [slot.digest for _, slot in slots]

    def release(self, client: int, lease: int, wrong: Sequence[int]) -> None:
        """End a lease; remove those of its blocks, by their number in it, whose bytes are wrong.
        Raise LookupError for what the client does not have."""
        slots = self._client(client).leases.pop(lease)
        for name, slot in slots:
            self._unpin(name, slot)
        for i in wrong:
            name, slot = slots[i]
            if self._slots.get(name) is slot:
                self._remove(name)

    def reserve(
        self, client: int, names: Sequence[Name], num_bytes: int, now_s: float
    ) -> tuple[int, list[int], list[int], int]:
        """Places for those that are not there, as far as others can be evicted for them: the
        reservation's id, indices into names, offsets, and how many were evicted."""
        indices, offsets, places = [], [], []
        num_evicted = 0
        for i, name in enumerate(names):
            if self.has(name, num_bytes, now_s):
                continue
            offset, more = self._make_place(_aligned(num_bytes))
            num_evicted += more
            if offset is None:
                break
            indices.append(i)
            offsets.append(offset)
            places.append((name, offset, num_bytes))
        reservation = next(self._ids)
        self._client(client).reserved[reservation] = places
        return reservation, indices, offsets, num_evicted

    def commit(self, client: int, reservation: int, digests: Sequence[bytes], now_s: float) -> int:
        """The reserved places are filled. Returns how many blocks are newly there. Raise
        LookupError if the client has no such reservation, or not of so many blocks."""
        places = self._client(client).reserved.pop(reservation)
        if len(places) != len(digests):
            self._give_back(places)
            raise LookupError(f"{len(digests)} digests for {len(places)} blocks")
        num_saved = 0
        for rank, ((name, offset, num_bytes), digest) in enumerate(
            zip(places, digests, strict=True)
        ):
            if name in self._slots:
                self._space.give(offset, _aligned(num_bytes))
                continue
            score_s = now_s - rank * BETWEEN_S
            self._slots[name] = _Slot(offset, num_bytes, digest, now_s, score_s)
            self._victims.add(name, score_s)
            self.num_bytes += num_bytes
            num_saved += 1
        self._victims.compact(len(self._slots))
        return num_saved

    def forget(self, client: int) -> None:
        """It is gone: it reads and writes no more."""
        gone = self._clients.pop(client, _Client())
        for slots in gone.leases.values():
            for name, slot in slots:
                self._unpin(name, slot)
        for places in gone.reserved.values():
            self._give_back(places)

    def check(self) -> None:
        """Each byte belongs to one slot, one reservation, or nobody."""
        clients = self._clients.values()
        pinned = [slot for c in clients for slots in c.leases.values() for _, slot in slots]
        removed = {id(slot): slot for slot in pinned if slot.is_removed}
        slots = [*self._slots.values(), *removed.values()]
        places = [(slot.offset, _aligned(slot.num_bytes)) for slot in slots]
        places += [
            (offset, _aligned(num_bytes))
            for client in clients
            for reserved in client.reserved.values()
            for _, offset, num_bytes in reserved
        ]
        at = 0
        for offset, width in sorted(places + self._space.free()):
            assert offset == at, f"a gap or an overlap at {at}"
            at += width
        assert at == self.limit_bytes
        assert sum(slot.num_pins for slot in slots) == len(pinned)
        assert self.num_bytes == sum(slot.num_bytes for slot in self._slots.values())

    def _client(self, client: int) -> _Client:
        return self._clients.setdefault(client, _Client())

    def _get(self, name: Name, num_bytes: int, now_s: float) -> _Slot | None:
        slot = self._slots.get(name)
        if slot is None:
            return None
        if slot.num_bytes != num_bytes or (self._ttl_s and now_s - slot.saved_s >= self._ttl_s):
            self._remove(name)
            return None
        return slot

    def _make_place(self, num_bytes: int) -> tuple[int | None, int]:
        """An offset, and how many blocks were evicted for it."""
        num_evicted = 0
        pinned: list[Name] = []
        offset = self._space.take(num_bytes)
        while offset is None and num_bytes <= self.limit_bytes:
            name = self._victims.pop()
            if name is None:
                break
            if self._slots[name].num_pins:
                pinned.append(name)
                continue
            self._remove(name)
            num_evicted += 1
            offset = self._space.take(num_bytes)
        for name in pinned:
            self._victims.add(name, self._slots[name].score_s)
        return offset, num_evicted

    def _score_of(self, name: Name) -> float | None:
        slot = self._slots.get(name)
        return None if slot is None else slot.score_s

    def _remove(self, name: Name) -> None:
        slot = self._slots.pop(name)
        self.num_bytes -= slot.num_bytes
        slot.is_removed = True
        if not slot.num_pins:
            self._space.give(slot.offset, _aligned(slot.num_bytes))

    def _unpin(self, name: Name, slot: _Slot) -> None:
        slot.num_pins -= 1
        if slot.is_removed and not slot.num_pins:
            self._space.give(slot.offset, _aligned(slot.num_bytes))

    def _give_back(self, places: Sequence[tuple[Name, int, int]]) -> None:
        for _, offset, num_bytes in places:
            self._space.give(offset, _aligned(num_bytes))


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGN_BYTES) * ALIGN_BYTES
