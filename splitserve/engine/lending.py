"""What prefill legs have lent: their blocks, under a lease, to the reader that decodes.

A leg of grain request lends all its blocks when its token is drawn; one of grain chunk lends those
that each step filled, by one lease that grows.
"""

from __future__ import annotations

from dataclasses import dataclass

from splitserve.engine.sequence import Sequence
from splitserve.kv.lease import Lease, LeaseTable
from splitserve.kv.pool import BlockPool, Ref
from splitserve.wire import Grain


@dataclass(frozen=True, slots=True)
class Filled:
    """Blocks that a step of a prefill leg of grain chunk has filled, leased to its reader."""

    sequence: Sequence
    lease: Lease
    blocks: list[int]


class Lending:
    """Pins blocks for leases and unpins them. The engine thread's."""

    def __init__(self, pool: BlockPool, leases: LeaseTable) -> None:
        self._pool = pool
        self._leases = leases
        self._filled: list[Filled] = []

    def lend_filled(self, sequence: Sequence, now_s: float) -> None:
        """Lease the blocks that are full by now and were not before."""
        num_leased = len(sequence.lease.blocks) if sequence.lease else 0
        num_full = sequence.num_computed // self._pool.block_size
        blocks = sequence.table.blocks[num_leased:num_full]
        if not blocks:
            return
        lease = self._extend(sequence, blocks, now_s)
        if lease is not None:
            self._filled.append(Filled(sequence, lease, blocks))

    def lend_rest(self, sequence: Sequence, now_s: float) -> Lease:
        """Lease all of a leg's blocks that are not leased yet; its own use of them ends."""
        num_leased = len(sequence.lease.blocks) if sequence.lease else 0
        lease = self._extend(sequence, sequence.table.blocks[num_leased:], now_s)
        if lease is None:
            lease = self._extend(sequence, sequence.table.blocks, now_s)
            assert lease is not None, "a new lease can be had"
        sequence.table.free()
        return lease

    def lend_cached(self, request_id: str, blocks: list[int], now_s: float, term_s: float) -> Lease:
        """Lease blocks of the prefix cache to another worker that asked for them."""
        for block in blocks:
            self._pool.retain(block, Ref.LEASED)
        return self._leases.grant(request_id, list(blocks), now_s, now_s + term_s)

    def take_back(self, sequence: Sequence) -> None:
        """End a leg's lease, if it has one: nobody may read by it any more."""
        if sequence.lease is not None:
            self._leases.release(sequence.lease.lease_id)
            sequence.lease = None

    def take_filled(self) -> list[Filled]:
        """What `lend_filled` leased since the last call."""
        taken, self._filled = self._filled, []
        return taken

    def collect(self, now_s: float) -> list[Lease]:
        """Unpin the blocks of the leases that ended; returns those leases, each once."""
        ended = self._leases.collect(now_s)
        for lease in ended:
            self._pool.release_all(lease.blocks, Ref.LEASED)
        return ended

    def _extend(self, sequence: Sequence, blocks: list[int], now_s: float) -> Lease | None:
        """Lease more of a sequence's blocks. None if its lease has ended before: the sequence is
        then handed over whole, when it is done."""
        for block in blocks:
            self._pool.retain(block, Ref.LEASED)
        if sequence.lease is None:
            sequence.lease = self._leases.grant(
                sequence.request_id, list(blocks), now_s, sequence.deadline_s
            )
        elif not self._leases.extend(sequence.lease.lease_id, blocks, now_s):
            self._pool.release_all(blocks, Ref.LEASED)
            self.take_back(sequence)
            sequence.grain = Grain.REQUEST
        return sequence.lease
