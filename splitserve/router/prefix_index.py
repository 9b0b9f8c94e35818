"""Which worker's prefix cache holds which blocks, as far as workers have told.

Exact for workers that tell of each change, but late by a frame: a block may be gone when it is
asked for. Its size is bounded by theirs: a worker has no more keys here than its pool has blocks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence


class PrefixIndex:
    """By key of a block (its first bytes, as in `wire.Frame.cached`). The event loop's."""

    def __init__(self) -> None:
        self._holders: dict[bytes, set[str]] = {}
        self._keys: dict[str, set[bytes]] = {}  # by worker

    def __len__(self) -> int:
        return len(self._holders)

    def num_keys(self, worker_id: str) -> int:
        return len(self._keys.get(worker_id, ()))

    def add(self, worker_id: str, keys: Iterable[bytes]) -> None:
        known = self._keys.setdefault(worker_id, set())
        for key in keys:
            known.add(key)
            self._holders.setdefault(key, set()).add(worker_id)

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
        lengths: dict[str, int] = {}
        alive: set[str] = set()
        for i, key in enumerate(keys):
            holders = self._holders.get(key, set())
            alive = set(holders) if i == 0 else alive & holders
            if not alive:
                break
            for worker_id in alive:
                lengths[worker_id] = i + 1
        return lengths

    def _forget(self, worker_id: str, key: bytes) -> None:
        holders = self._holders[key]
        holders.discard(worker_id)
        if not holders:
            del self._holders[key]

    def check(self) -> None:
        """Assert that both ways round agree."""
        for key, holders in self._holders.items():
            assert holders, key
            assert all(key in self._keys[worker_id] for worker_id in holders)
        assert sum(map(len, self._keys.values())) == sum(map(len, self._holders.values()))
