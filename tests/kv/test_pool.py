"""Blocks: after any sequence of operations every block is in exactly one state (invariant 1)."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    rule,
)

from splitserve.kv.keys import root_key
from splitserve.kv.lease import LeaseTable
from splitserve.kv.pool import BlockPool, OutOfBlocks, Ref
from splitserve.kv.table import BlockTable

NUM_BLOCKS = 24
SIZE = 16
ROOT = root_key(b"test")


def lease_table(table: BlockTable) -> list[int]:
    """Turn a table's use into a lease's, as `engine.lending` does."""
    blocks = table.blocks
    for block in blocks:
        table._pool.retain(block, Ref.LEASED)
    table.free()
    return blocks


class PoolMachine(RuleBasedStateMachine):
    """Sequences, prefix hits, holds, quarantine and leases in any order, against a model."""

    tables = Bundle("tables")
    holds = Bundle("holds")
    quarantines = Bundle("quarantines")
    leases = Bundle("leases")

    @initialize()
    def start(self) -> None:
        self.pool = BlockPool(NUM_BLOCKS, SIZE)
        self.live: list[tuple[BlockTable, list[int]]] = []
        self.holding: list[list[int]] = []
        self.quarantined: list[list[int]] = []
        self.leased: list[list[int]] = []

    @rule(target=tables, seed=st.integers(0, 2), length=st.integers(1, 120))
    def new_sequence(self, seed: int, length: int) -> object:
        """Sequences of equal seed share their tokens: prefixes are hit."""
        tokens = [seed] * length
        table = BlockTable(self.pool, ROOT)
        hits = table.find_prefix(tokens, length - 1)
        assert len(hits) * SIZE < length
        missing = table.num_needed(length) - len(hits)
        if missing > self.pool.num_available - self.pool.num_cached_among(hits):
            return multiple()
        table.adopt(hits)
        table.grow(length)
        table.assert_writable(len(hits) * SIZE, length)
        table.seal(tokens, length)
        entry = (table, tokens)
        self.live.append(entry)
        return entry

    @rule(entry=tables, more=st.integers(1, 40))
    def grow(self, entry: tuple[BlockTable, list[int]], more: int) -> None:
        table, tokens = entry
        if not any(entry is x for x in self.live):
            return
        before = self.pool.counts()
        try:
            table.grow(len(tokens) + more)
        except OutOfBlocks:
            assert self.pool.counts() == before, "a refused allocation changed something"
            return
        table.assert_writable(len(tokens), len(tokens) + more)
        tokens += [tokens[0]] * more
        table.seal(tokens, len(tokens))

    @rule(entry=consumes(tables))
    def free(self, entry: tuple[BlockTable, list[int]]) -> None:
        self.live.remove(entry)
        entry[0].free()

    @rule(target=leases, entry=consumes(tables))
    def lease(self, entry: tuple[BlockTable, list[int]]) -> list[int]:
        self.live.remove(entry)
        blocks = lease_table(entry[0])
        self.leased.append(blocks)
        return blocks

    @rule(blocks=consumes(leases))
    def end_lease(self, blocks: list[int]) -> None:
        self.leased.remove(blocks)
        self.pool.release_all(blocks, Ref.LEASED)

    @rule(target=holds, num=st.integers(1, 8))
    def hold(self, num: int) -> object:
        if num > self.pool.num_available:
            return multiple()
        blocks = self.pool.allocate(num, Ref.HELD)
        self.holding.append(blocks)
        return blocks

    @rule(blocks=consumes(holds))
    def drop_hold(self, blocks: list[int]) -> None:
        self.holding.remove(blocks)
        self.pool.release_all(blocks, Ref.HELD)

    @rule(target=quarantines, blocks=consumes(holds))
    def quarantine(self, blocks: list[int]) -> list[int]:
        self.holding.remove(blocks)
        self.pool.quarantine(blocks, now_s=1.0)
        self.quarantined.append(blocks)
        return blocks

    @rule(blocks=consumes(quarantines))
    def end_quarantine(self, blocks: list[int]) -> None:
        self.quarantined.remove(blocks)
        self.pool.end_quarantine(blocks)

    @invariant()
    def every_block_is_somewhere(self) -> None:
        self.pool.check()
        counts = self.pool.counts()
        assert counts["held"] == sum(map(len, self.holding))
        assert counts["quarantined"] == sum(map(len, self.quarantined))
        assert counts["used"] == len({b for table, _ in self.live for b in table.blocks})
        assert self.pool.num_leased() == len({b for blocks in self.leased for b in blocks})
        private = [b for group in (self.holding, self.quarantined) for x in group for b in x]
        shared = {b for table, _ in self.live for b in table.blocks}
        assert not shared & set(private), "a block in transfer is also somebody's"
        assert len(private) == len(set(private))


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def test_the_prefix_of_a_finished_sequence_is_found_again() -> None:
    pool = BlockPool(8, SIZE)
    table = BlockTable(pool, ROOT)
    tokens = list(range(40))
    table.grow(40)
    table.seal(tokens, 40)
    blocks = list(table.blocks)
    table.free()
    again = BlockTable(pool, ROOT)
    assert again.find_prefix([*tokens, 7], 40) == blocks[:2]
    assert again.find_prefix(tokens[:32], 31) == blocks[:1]
    other = BlockTable(pool, root_key(b"test", "another tenant"))
    assert other.find_prefix(tokens, 40) == []


def test_eviction_takes_the_least_recently_used_tail_first() -> None:
    pool = BlockPool(4, SIZE)
    old, new = BlockTable(pool, ROOT), BlockTable(pool, ROOT)
    for table, token in ((old, 1), (new, 2)):
        table.grow(32)
        table.seal([token] * 32, 32)
    old.free()
    new.free()
    pool.allocate(1, Ref.USED)
    assert len(old.find_prefix([1] * 32, 32)) == 1, "the old sequence's tail went"
    assert len(new.find_prefix([2] * 32, 32)) == 2


def test_shared_blocks_are_not_writable() -> None:
    pool = BlockPool(4, SIZE)
    table = BlockTable(pool, ROOT)
    table.grow(20)
    table.assert_writable(0, 20)
    table.seal([5] * 20, 16)
    with pytest.raises(AssertionError, match="shared or sealed"):
        table.assert_writable(0, 20)
    table.assert_writable(16, 20)
    pool.retain(table.blocks[1], Ref.LEASED)
    with pytest.raises(AssertionError, match="shared or sealed"):
        table.assert_writable(16, 20)


def test_misuse_is_noticed() -> None:
    pool = BlockPool(4, SIZE)
    (block,) = pool.allocate(1, Ref.USED)
    with pytest.raises(AssertionError):
        pool.release(block, Ref.LEASED)
    pool.release(block, Ref.USED)
    with pytest.raises(AssertionError):
        pool.release(block, Ref.USED)
    with pytest.raises(AssertionError):
        pool.retain(block, Ref.USED)


def test_leases_of_shared_blocks_pin_each_once() -> None:
    pool = BlockPool(8, SIZE)
    leases = LeaseTable("e", 10.0)
    tables = []
    for _ in range(2):
        table = BlockTable(pool, ROOT)
        table.adopt(table.find_prefix([3] * 40, 39))
        table.grow(40)
        table.seal([3] * 40, 40)
        tables.append(table)
    granted = [
        leases.grant(f"r{i}", lease_table(table), 0.0, 100.0) for i, table in enumerate(tables)
    ]
    assert pool.num_leased() == 4, "two shared blocks and two tails"
    leases.release(granted[0].lease_id)
    for lease in leases.collect(1.0):
        pool.release_all(lease.blocks, Ref.LEASED)
    assert pool.num_leased() == 3
    pool.check()
