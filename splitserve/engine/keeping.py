"""What one engine keeps for others: it saves what became final to the store, and tells the gateway
what its prefix cache holds.

A block is pinned while the store's thread reads it. So few are pinned at once that the engine never
lacks blocks for it: beyond that, blocks are not kept, and counted.
"""

from __future__ import annotations

import itertools

from splitserve.connector.base import Connector
from splitserve.connector.jobs import SaveDone, SaveJob
from splitserve.kv.pool import BlockPool, Ref
from splitserve.wire import KEY_BYTES

PINNED_FRACTION = 0.25  # of the pool


class Keeping:
    """The engine thread's."""

    def __init__(self, pool: BlockPool, connector: Connector) -> None:
        self.num_unsaved = 0
        self.is_shared = True  # False: what is computed here is of rounded weights, for us alone
        self._pool = pool
        self._connector = connector
        self._numbers = itertools.count()
        self._pinned: dict[str, list[int]] = {}  # by job
        self._num_pinned = 0

    def note_changes(self, *, computed: bool) -> tuple[list[bytes], list[bytes]]:
        """After a step, of blocks that it filled; or after others came from elsewhere: those are
        kept where they came from. Returns the keys that entered the prefix cache, and that left it,
        shortened for the gateway."""
        changes = self._pool.take_changes()
        here = [(key, block) for key, block in changes.sealed if self._pool.holds(key)]
        if computed and not self.is_shared:
            here = []
        if computed and self._connector.has_store and here:
            self._keep(here)
        return [key[:KEY_BYTES] for key, _ in here], [
            key[:KEY_BYTES] for key in changes.evicted if not self._pool.holds(key)
        ]

    def _keep(self, here: list[tuple[bytes, int]]) -> None:
        if self._num_pinned + len(here) > PINNED_FRACTION * self._pool.num_blocks:
            self.num_unsaved += len(here)
            return
        keys, blocks = [key for key, _ in here], [block for _, block in here]
        self.save(f"kept/{next(self._numbers)}", keys, blocks, [])

    def save(self, job_id: str, keys: list[bytes], blocks: list[int], digests: list[bytes]) -> None:
        """Pin the blocks until `on_saved`. digests: of each, or empty."""
        for block in blocks:
            self._pool.retain(block, Ref.LEASED)
        self._pinned[job_id] = blocks
        self._num_pinned += len(blocks)
        self._connector.worker.start_save(SaveJob(job_id, keys, blocks, digests))

    def on_saved(self, event: SaveDone) -> None:
        blocks = self._pinned.pop(event.job_id)
        self._num_pinned -= len(blocks)
        self.num_unsaved += len(blocks) - event.num_saved
        self._pool.release_all(blocks, Ref.LEASED)

    @property
    def is_settled(self) -> bool:
        return not self._pinned
