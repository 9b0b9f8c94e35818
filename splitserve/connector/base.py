"""The connector contract: who calls what, when, how often, and with what effect.

Sides behind one name, as in vLLM's KVConnectorBase_V1. Both live in a worker process. The
scheduler side decides and is called by the engine thread between steps. The worker side moves bytes
on threads of its own; its methods are called by the engine thread, return at once, and report
through `poll`. The lender, which only push needs, has blocks of its own. Jobs and events are in
`connector.jobs`.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from splitserve.connector.jobs import (
    Event,
    FetchJob,
    FindJob,
    HandoffState,
    PushJob,
    SaveJob,
    SealJob,
)
from splitserve.kv.format import KVFormat
from splitserve.kv.lease import Lease
from splitserve.wire import Landing, Offer, Part


class Staging(Protocol):
    """A pool whose blocks live on a device: the segment that peers read is only where they pass.

    The worker side calls both, from its own threads; the copy has happened when they return.
    """

    def to_host(self, block_ids: Sequence[int]) -> None:
        """Once per prefill leg, when its blocks are leased and before they are digested."""

    def to_device(self, block_ids: Sequence[int]) -> None:
        """Once per fetch, when its blocks are proved and before its `FetchDone`."""


class SchedulerSide(abc.ABC):
    """Decides. Called by the engine thread, between steps; must not block."""

    @abc.abstractmethod
    def make_offer(self, lease: Lease, state: HandoffState, digests: list[bytes]) -> Offer:
        """Once per prefill leg, after `SealDone` of its lease."""

    @abc.abstractmethod
    def make_part(self, lease: Lease, first: int, blocks: list[int], digests: list[bytes]) -> Part:
        """Once per `SealDone` of a leg of grain chunk, but for the last, which is the offer's."""

    @abc.abstractmethod
    def check_offer(self, offer: Offer, keys: Sequence[bytes], num_tokens: int) -> None:
        """Once per decode leg, before blocks are reserved for it.

        keys and num_tokens are what the reader computed itself from the request's tokens. Raise
        TransferFailed or FormatMismatch, naming both values, if the offer is of something else.
        """


class WorkerSide(abc.ABC):
    """Moves bytes between the pool and elsewhere, on its own threads.

    A worker whose connector has no store, or no peers, is never given the jobs that need them.
    """

    @abc.abstractmethod
    def start_seal(self, job: SealJob) -> None:
        """Once per prefill leg, or per part of it, when the blocks are leased: begin to digest
        them, after they were brought to the host. Its `SealDone` always comes, in order."""

    @abc.abstractmethod
    def start_fetch(self, job: FetchJob) -> None:
        """Once or more per decode leg that lacks blocks, and once per prompt of which blocks were
        found: begin to copy. The target blocks are the job's until its `FetchDone`, which always
        comes; jobs with one source end in their order."""

    @abc.abstractmethod
    def cancel_fetch(self, request_id: str) -> None:
        """The request is gone: end its jobs soon. Each `FetchDone` still comes."""

    @abc.abstractmethod
    def start_find(self, job: FindJob) -> None:
        """Once per prompt that lacks blocks here: begin to ask. Its `FoundDone` always comes, also
        when the request is gone; who gets a part must fetch it, or end its lease."""

    @abc.abstractmethod
    def answer(self, ask_id: int, part: Part | None) -> bool:
        """Once per `Asked`: what we lend, or nothing. False: who asked has gone away."""

    @abc.abstractmethod
    def start_save(self, job: SaveJob) -> None:
        """When blocks became final: begin to copy them to the store. Its `SaveDone` always
        comes."""

    @abc.abstractmethod
    def start_push(self, job: PushJob) -> None:
        """Per part, or per layer of it, of a prefill leg that was lent a landing: begin to write.
        May be called in the middle of a step. Jobs of a landing run in order. The `PushDone` of a
        job without a layer always comes; after a failure all later ones fail."""

    @abc.abstractmethod
    def end_push(self, landing: Landing) -> None:
        """Once per landing that a prefill leg was lent: nothing more will be written; jobs that
        have not begun are dropped."""

    @abc.abstractmethod
    def meet(self, worker_id: str, epoch: str, address: str) -> None:
        """Another worker is up: connect to it ahead of its first offer. Failing is harmless."""

    @abc.abstractmethod
    def end_lease(self, offer: Part | Offer) -> None:
        """Nothing had to move: tell the source that this reader needs its lease no more."""

    @abc.abstractmethod
    def poll(self) -> list[Event]:
        """Before each step: what ended since the last call, each exactly once."""

    @abc.abstractmethod
    def close(self) -> None:
        """Once, at the end: stop the threads, close sockets and mappings."""


class Lender(abc.ABC):
    """Lends staging for KV that others write. Called by the engine thread; must not block."""

    @abc.abstractmethod
    def lend(self, first: int, num_blocks: int) -> Landing | None:
        """Per decode leg that asks for push, when it has blocks: staging, if it is free."""

    @abc.abstractmethod
    def give_back(self, landing: Landing) -> None:
        """Once per landing lent: nothing more will be read from it."""

    @property
    @abc.abstractmethod
    def num_quarantined(self) -> int:
        """Blocks of landings that were given back and may still be written."""

    @property
    @abc.abstractmethod
    def is_settled(self) -> bool:
        """No landing is lent, none in quarantine."""

    @abc.abstractmethod
    def check(self) -> None:
        """Assert the invariants of what it owns."""


@dataclass(frozen=True, slots=True)
class Connector:
    """The sides of one connector, by its registered name.

    address: where readers of our KV find us; empty if there can be none. has_store: what is
    computed is kept there, and looked up before it is computed again. by_store: handoffs go through
    it too, rather than from pool to pool.
    """

    name: str
    scheduler: SchedulerSide
    worker: WorkerSide
    lender: Lender
    kv_format: KVFormat | None = None
    address: str = ""
    has_store: bool = False
    by_store: bool = False


Wake = Callable[[], None]
"""Called from any thread to end the engine loop's wait: `poll` has something."""
