"""Which worker's prefix cache holds which blocks, as far as workers have told.

Exact for workers that tell of each change, but late by a frame: a block may be gone when it is
asked for. Its size is bounded by theirs: a worker has no more keys here than its pool has blocks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from splitserve.router.slots import Slots


class PrefixIndex:
    """By key of a block (its first bytes, as in `wire.Frame.cached`): a mask of the workers' slots,
    so that one step of a look-up is one `&`, however many workers there are. The event loop's.

    A worker's slot must stay its own until `drop`.
    """

    def __init__(self, slots: Slots | None = None) -> None:
        self._slots = Slots() if slots is None else slots
        self._holders: dict[bytes, int] = {}
        self._keys: dict[str, set[bytes]] = {}  # by worker

    def __len__(self) -> int:
        return len(self._holders)

    def num_keys(self, worker_id: str) -> int:
        return len(self._keys.get(worker_id, ()))

    def add(self, worker_id: str, keys: Iterable[bytes]) -> None:
        bit = 1 << self._slots.give(worker_id)
        known, holders = self._keys.setdefault(worker_id, set()), self._holders
        for key in keys:
            known.add(key)
            holders[key] = holders.get(key, 0) | bit

    def remove(self, worker_id: str, keys: Iterable[bytes]) -> None:
        known = self._keys.get(worker_id, set())
        for key in keys:
            if key in known:
                known.discard(key)
                self._forget(worker_id, key)

    def drop(self, worker_id: str) -> None:
        """The worker is gone, and its cache with it."""
        for key in self._keys.pop(worker_id, ()):
            self._forget(worker_id, key)

    def leading(self, keys: Sequence[bytes]) -> dict[str, int]:
        """For each worker that has the first block of a prompt, how many leading ones it has."""
        return {self._slots.name(slot): num for slot, num in self.leading_slots(keys)}

    def leading_slots(self, keys: Sequence[bytes]) -> list[tuple[int, int]]:
        """The same by slot: (slot, number of leading blocks)."""
        found: list[tuple[int, int]] = []
        holders, alive, num = self._holders, -1, 0
        for key in keys:
            still = alive & holders.get(key, 0)
            if still != alive:
                if num:
                    found += ((slot, num) for slot in _bits(alive & ~still))
                alive = still
                if not alive:
                    return found
            num += 1
        if num:
            found += ((slot, num) for slot in _bits(alive))
        return found

    def _forget(self, worker_id: str, key: bytes) -> None:
        slot = self._slots.get(worker_id)
        assert slot is not None
        left = self._holders[key] & ~(1 << slot)
        if left:
            self._holders[key] = left
        else:
            del self._holders[key]

    def check(self) -> None:
        """Assert that both ways round agree."""
        for key, mask in self._holders.items():
            assert mask > 0, key
            assert all(key in self._keys[self._slots.name(slot)] for slot in _bits(mask))
        num_bits = sum(mask.bit_count() for mask in self._holders.values())
        assert sum(map(len, self._keys.values())) == num_bits


def _bits(mask: int) -> Iterator[int]:
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low
