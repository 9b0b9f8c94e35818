"""What a worker's KV is offered as, and what is said of the offers of others (design 3.3)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from splitserve.clock import Clock
from splitserve.connector.base import SchedulerSide
from splitserve.connector.convert import find_converter
from splitserve.connector.jobs import HandoffState
from splitserve.errors import FormatMismatch, TransferFailed
from splitserve.kv.format import KVFormat
from splitserve.kv.lease import Lease
from splitserve.wire import Offer, Part


@dataclass(frozen=True, slots=True)
class P2PConfig:
    """digests: `full` (every block carries one) or `lease` (the source's word is the proof).

    host: where the side channel listens by tcp; empty: on a Unix socket. token: the cluster's.
    by_store: offers are of blocks in the store.
    """

    worker_id: str
    epoch: str
    identity: bytes
    kv_format: KVFormat
    digests: str = "full"
    host: str = ""
    token: bytes = b""
    by_store: bool = False


class P2PScheduler(SchedulerSide):
    """Makes offers of our leases and judges those of others."""

    def __init__(self, config: P2PConfig, transport: str, address: str, clock: Clock) -> None:
        self._config = config
        self._address = address
        self._transport = transport
        self._clock = clock

    def make_offer(self, lease: Lease, state: HandoffState, digests: list[bytes]) -> Offer:
        return Offer(
            lease_id=lease.lease_id,
            lease_s=lease.deadline_s - self._clock.now(),
            worker_id=self._config.worker_id,
            epoch=self._config.epoch,
            transport=self._transport,
            address=self._address,
            identity=self._config.identity,
            format=self._config.kv_format,
            num_tokens=state.num_tokens,
            num_prompt_tokens=state.num_prompt_tokens,
            output_ids=state.output_ids,
            sampling=state.sampling,
            block_ids=lease.blocks,
            keys=state.keys,
            digests=digests,
            stored=self._config.by_store,
        )

    def make_part(self, lease: Lease, first: int, blocks: list[int], digests: list[bytes]) -> Part:
        config = self._config
        return Part(
            lease_id=lease.lease_id,
            lease_s=lease.deadline_s - self._clock.now(),
            worker_id=config.worker_id,
            epoch=config.epoch,
            address=self._address,
            first=first,
            block_ids=blocks,
            digests=digests,
        )

    def check_offer(self, offer: Offer, keys: Sequence[bytes], num_tokens: int) -> None:
        config = self._config
        if offer.identity != config.identity:
            ours, theirs = short_digest(config.identity), short_digest(offer.identity)
            raise FormatMismatch(f"Model identity {ours} here, {theirs} there.")
        if offer.transport != self._transport and not offer.stored:
            raise FormatMismatch(f"Transport {self._transport} here, {offer.transport} there.")
        who = f"worker {offer.worker_id}"
        if offer.stored:
            config.kv_format.require_equal(offer.format, who)
        else:
            find_converter(offer.format, config.kv_format, who)
        if offer.num_tokens != num_tokens:
            raise TransferFailed(f"The offer covers {offer.num_tokens} tokens, not {num_tokens}.")
        if not _are_keys_equal(offer, keys, config.kv_format.block_size):
            raise TransferFailed("The offer's keys are not those of this request's tokens.")
        if offer.stored:
            if len(offer.block_ids) > len(offer.keys):
                raise TransferFailed("The offer stores more blocks than have keys.")
            return
        num_blocks = -(-num_tokens // offer.format.block_size)
        if len(offer.block_ids) != num_blocks or len(offer.digests) not in (0, num_blocks):
            raise TransferFailed(
                f"The offer has {len(offer.block_ids)} blocks and {len(offer.digests)} digests, "
                f"{num_tokens} tokens need {num_blocks}."
            )


def _are_keys_equal(offer: Offer, keys: Sequence[bytes], block_size: int) -> bool:
    """A block's key is that of its last granule: those at ends of blocks of both sizes."""
    size = max(block_size, offer.format.block_size)
    ours, theirs = size // block_size, size // offer.format.block_size
    return offer.keys[theirs - 1 :: theirs] == list(keys)[ours - 1 :: ours]


def short_digest(digest: bytes) -> str:
    """For a message."""
    return digest.hex()[:12]
