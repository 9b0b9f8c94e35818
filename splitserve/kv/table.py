"""One sequence's blocks, in order: its block table, its keys, how far it is sealed."""

from __future__ import annotations

from collections.abc import Sequence

from splitserve.kv.keys import GRANULE, extend_keys
from splitserve.kv.pool import BlockPool, Ref


class BlockTable:
    """Position p of the sequence lives in block `blocks[p // block_size]`."""

    def __init__(self, pool: BlockPool, root: bytes) -> None:
        self.blocks: list[int] = []
        self.granule_keys: list[bytes] = []
        self._pool = pool
        self._root = root
        self._num_sealed = 0  # leading blocks that are final

    def num_needed(self, num_tokens: int) -> int:
        """Blocks to add so that positions [0, num_tokens) have a place."""
        return max(0, -(-num_tokens // self._pool.block_size) - len(self.blocks))

    def grow(self, num_tokens: int) -> None:
        """Allocate so that positions [0, num_tokens) have a place; raise OutOfBlocks."""
        self.blocks += self._pool.allocate(self.num_needed(num_tokens), Ref.USED)

    def block_keys(self, token_ids: Sequence[int]) -> list[bytes]:
        """Keys of the full blocks of `token_ids`: a block's key is that of its last granule."""
        extend_keys(self.granule_keys, self._root, token_ids)
        per_block = self._pool.block_size // GRANULE
        num_full = len(token_ids) // self._pool.block_size
        return self.granule_keys[per_block - 1 : num_full * per_block : per_block]

    def find_prefix(self, token_ids: Sequence[int], max_tokens: int) -> list[int]:
        """Blocks of the longest cached prefix of up to `max_tokens` tokens; takes no reference."""
        num_blocks = max_tokens // self._pool.block_size
        return self._pool.lookup(self.block_keys(token_ids)[:num_blocks])

    def adopt(self, blocks: Sequence[int]) -> None:
        """Start with shared, final blocks of the prefix cache."""
        assert not self.blocks
        for block in blocks:
            self._pool.retain(block, Ref.USED)
        self.blocks += blocks
        self._num_sealed = len(self.blocks)

    def append_held(self, blocks: Sequence[int]) -> None:
        """Take over blocks that a transfer filled: held until now, used from now on."""
        for block in blocks:
            self._pool.retain(block, Ref.USED)
            self._pool.release(block, Ref.HELD)
        self.blocks += blocks

    def seal(self, token_ids: Sequence[int], num_computed: int) -> None:
        """Index the blocks that became full now that positions [0, num_computed) are computed."""
        num_full = num_computed // self._pool.block_size
        if num_full <= self._num_sealed:
            return
        keys = self.block_keys(token_ids[: num_full * self._pool.block_size])
        for i in range(self._num_sealed, num_full):
            self._pool.seal(self.blocks[i], keys[i])
        self._num_sealed = num_full

    def assert_writable(self, start: int, stop: int) -> None:
        """Positions [start, stop) lie in private blocks: what is shared is never written."""
        size = self._pool.block_size
        for block in self.blocks[start // size : -(-stop // size)]:
            assert self._pool.is_writable(block), f"block {block} is shared or sealed"

    def free(self) -> None:
        """Drop all blocks; those with a key stay in the cache."""
        self._pool.release_all(self.blocks, Ref.USED)
        self.blocks = []
        self._num_sealed = 0
