"""The block pool: who refers to which block, the prefix cache and quarantine. No tensors.

Each block is in exactly one state, by the strongest claim on it:

  quarantined  a transfer may still write it; belongs to nobody (design 3.5)
  used         sequences refer to it
  held         reserved for a transfer on its way in
  leased       only leases refer to it: a reader elsewhere may still copy it
  cached       nobody refers to it, its key is in the index; evicted least recently used first
  free         the rest

Invariant 1: the counts of the six states add up to the total, always; `check()` asserts it.
"""

from __future__ import annotations

import enum
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field


class OutOfBlocks(Exception):
    """Not enough free and cached blocks: the scheduler's signal to preempt, never an answer."""


class Ref(enum.Enum):
    """The kinds of reference to a block."""

    USED = 0
    HELD = 1
    LEASED = 2


@dataclass(slots=True)
class CacheChanges:
    """What entered the prefix cache (key and block) and which keys left it, in order of each."""

    sealed: list[tuple[bytes, int]] = field(default_factory=list)
    evicted: list[bytes] = field(default_factory=list)


class BlockPool:
    """Bookkeeping of `num_blocks` blocks of `block_size` tokens. Not thread-safe: the engine's."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._refs: list[list[int]] = [[0, 0, 0] for _ in range(num_blocks)]
        self._keys: list[bytes | None] = [None] * num_blocks
        self._index: dict[bytes, int] = {}
        self._free: deque[int] = deque(range(num_blocks))
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._quarantined: dict[int, float] = {}
        self._num_leased = 0
        self._changes = CacheChanges()

    # --- counts

    @property
    def num_available(self) -> int:
        """Blocks that an allocation can have: free ones and cached ones."""
        return len(self._free) + len(self._cached)

    @property
    def num_quarantined(self) -> int:
        return len(self._quarantined)

    def num_leased(self) -> int:
        """Blocks pinned by leases, also those that sequences use at the same time."""
        return self._num_leased

    def counts(self) -> dict[str, int]:
        """Blocks by state; the values add up to `num_blocks`."""
        counts = dict.fromkeys(("free", "cached", "leased", "held", "used", "quarantined"), 0)
        counts["free"] = len(self._free)
        counts["cached"] = len(self._cached)
        counts["quarantined"] = len(self._quarantined)
        for used, held, leased in self._refs:
            if used:
                counts["used"] += 1
            elif held:
                counts["held"] += 1
            elif leased:
                counts["leased"] += 1
        return counts

    def quarantine_age_s(self, now_s: float) -> float:
        """Age of the oldest block in quarantine, 0 if there is none."""
        return now_s - min(self._quarantined.values()) if self._quarantined else 0.0

    # --- references

    def allocate(self, num: int, ref: Ref) -> list[int]:
        """Take `num` private blocks with one reference each; raise OutOfBlocks and take none."""
        if num > self.num_available:
            raise OutOfBlocks(f"{num} blocks wanted, {self.num_available} available")
        blocks = [self._pop() for _ in range(num)]
        for block in blocks:
            self._add(block, ref)
        return blocks

    def retain(self, block: int, ref: Ref) -> None:
        """Add a reference to a block that is cached or has one."""
        if not any(self._refs[block]):
            if block not in self._cached:
                raise AssertionError(f"block {block} is free or in quarantine")
            del self._cached[block]
        self._add(block, ref)

    def release(self, block: int, ref: Ref) -> None:
        """Drop a reference; the last one makes the block cached (if keyed) or free."""
        refs = self._refs[block]
        if refs[ref.value] <= 0:
            raise AssertionError(f"block {block} has no {ref.name} reference")
        refs[ref.value] -= 1
        if ref is Ref.LEASED and refs[ref.value] == 0:
            self._num_leased -= 1
        if any(refs):
            return
        if self._keys[block] is not None:
            self._cached[block] = None
        else:
            self._free.append(block)

    def release_all(self, blocks: Sequence[int], ref: Ref) -> None:
        """Release a sequence's blocks, last first: the cache then evicts tails before heads."""
        for block in reversed(blocks):
            self.release(block, ref)

    def _add(self, block: int, ref: Ref) -> None:
        self._refs[block][ref.value] += 1
        if ref is Ref.LEASED and self._refs[block][ref.value] == 1:
            self._num_leased += 1

    def _pop(self) -> int:
        if self._free:
            return self._free.popleft()
        block, _ = self._cached.popitem(last=False)
        key = self._keys[block]
        assert key is not None
        del self._index[key]
        self._keys[block] = None
        self._changes.evicted.append(key)
        return block

    # --- the prefix cache

    def seal(self, block: int, key: bytes) -> bool:
        """The block is full and final: index it. False if another block has the key already."""
        assert self._keys[block] is None, "a block is sealed once"
        assert self._refs[block][0] == 1, "only its one user seals a block"
        if key in self._index:
            return False
        self._keys[block] = key
        self._index[key] = block
        self._changes.sealed.append((key, block))
        return True

    def holds(self, key: bytes) -> bool:
        """Whether the prefix cache has a block of this key."""
        return key in self._index

    def take_changes(self) -> CacheChanges:
        """Of the prefix cache, since the last call. A block sealed since then may be evicted."""
        taken, self._changes = self._changes, CacheChanges()
        return taken

    def lookup(self, keys: Iterable[bytes]) -> list[int]:
        """Blocks of the longest prefix of `keys` that is here. Takes no reference."""
        blocks = []
        for key in keys:
            block = self._index.get(key)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def num_cached_among(self, blocks: Sequence[int]) -> int:
        """How many of `blocks` are cached: retaining them lowers `num_available` by so many."""
        return sum(1 for block in blocks if block in self._cached)

    def is_writable(self, block: int) -> bool:
        """One user, no lease, not sealed: what is shared is never written (design 3.2)."""
        used, _, leased = self._refs[block]
        return used == 1 and not leased and self._keys[block] is None

    # --- quarantine

    def quarantine(self, blocks: Sequence[int], now_s: float) -> None:
        """Move held blocks, of which a transfer may still write some, out of anybody's reach."""
        for block in blocks:
            assert self._refs[block] == [0, 1, 0], "only a private, held block is quarantined"
            self._refs[block][1] = 0
            self._quarantined[block] = now_s

    def end_quarantine(self, blocks: Sequence[int]) -> None:
        """Nothing can touch the blocks any more: they are free."""
        for block in blocks:
            del self._quarantined[block]
            self._free.append(block)

    def check(self) -> None:
        """Assert every invariant of the pool."""
        counts = self.counts()
        assert sum(counts.values()) == self.num_blocks, f"{counts} != {self.num_blocks}"
        free, cached, quarantined = set(self._free), set(self._cached), set(self._quarantined)
        assert len(free) == len(self._free), "a block is twice in the free list"
        for block, refs in enumerate(self._refs):
            assert min(refs) >= 0, f"block {block} has references {refs}"
            homes = (block in free) + (block in cached) + (block in quarantined) + any(refs)
            assert homes == 1, f"block {block} is in {homes} states"
            key = self._keys[block]
            assert (key is not None) or block not in cached, f"cached block {block} has no key"
            assert key is None or self._index[key] == block, f"the index misses block {block}"
        assert len(self._index) == sum(key is not None for key in self._keys)
        assert self._num_leased == sum(refs[2] > 0 for refs in self._refs)
