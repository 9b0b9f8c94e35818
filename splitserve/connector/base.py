"""The connector contract: who calls what, when, how often, and with what effect.

Two sides behind one name, as in vLLM's KVConnectorBase_V1. Both live in a worker process. The
scheduler side decides and is called by the engine thread between steps. The worker side moves bytes
on threads of its own; its methods are called by the engine thread, return at once, and report
through `poll`.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from splitserve.kv.lease import Lease
from splitserve.sampling import Sampling
from splitserve.wire import Landing, Offer, Part


@dataclass(frozen=True, slots=True)
class HandoffState:
    """What an offer says of the sequence besides its blocks."""

    num_tokens: int
    num_prompt_tokens: int
    output_ids: list[int]
    sampling: Sampling
    keys: list[bytes]


@dataclass(frozen=True, slots=True)
class SealJob:
    """Digest these blocks, which a lease pins: all of a prompt's, or those of a part of it."""

    lease_id: str
    blocks: list[int]


@dataclass(frozen=True, slots=True)
class SealDone:
    """Digests of a job's blocks are ready: xxh3-128 of each, or none in mode `lease`.

    With a `reason` the blocks can't be offered, and it says why.
    """

    lease_id: str
    digests: list[bytes]
    seconds: float
    reason: str = ""


@dataclass(frozen=True, slots=True)
class FetchJob:
    """Copy block_ids[i] of the source's pool into our block target[i].

    source is the part or the offer that names them; digests are theirs, or empty. A handoff has one
    job or several; is_last: none follows, the source's lease is needed no more. from_zone: the
    block_ids are of our own landing zone, where the source has written them.
    """

    request_id: str
    source: Part | Offer
    block_ids: list[int]
    digests: list[bytes]
    target: list[int]
    is_last: bool = True
    from_zone: bool = False


@dataclass(frozen=True, slots=True)
class FetchDone:
    """A job is over and nothing touches its target blocks any more.

    proof is "digest" or "lease" if the blocks may be used, None if not; `reason` then says why.
    """

    request_id: str
    proof: str | None
    seconds: float
    num_bytes: int
    reason: str = ""


@dataclass(frozen=True, slots=True)
class PushJob:
    """Write our blocks[i] into block zone[i] of a landing: all layers, or one. No blocks: only tell
    when all jobs of this landing that came before have ended. job_id is the caller's."""

    job_id: str
    landing: Landing
    blocks: list[int]
    zone: list[int]
    layer: int | None = None


@dataclass(frozen=True, slots=True)
class PushDone:
    """A job without a layer is over, and with it all before it of the same landing; with a reason,
    some of their bytes may not be there."""

    job_id: str
    reason: str = ""


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


Event = SealDone | FetchDone | PushDone


class WorkerSide(abc.ABC):
    """Moves bytes between the pool and elsewhere, on its own threads."""

    @abc.abstractmethod
    def start_seal(self, job: SealJob) -> None:
        """Once per prefill leg, or per part of it, when the blocks are leased: begin to digest
        them, after they were brought to the host. Its `SealDone` always comes, in order."""

    @abc.abstractmethod
    def start_fetch(self, job: FetchJob) -> None:
        """Once or more per decode leg that lacks blocks: begin to copy. The target blocks are the
        job's until its `FetchDone`, which always comes, in the order of a request's jobs."""

    @abc.abstractmethod
    def cancel_fetch(self, request_id: str) -> None:
        """The request is gone: end its jobs soon. Each `FetchDone` still comes."""

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
    def lend(self, first: int, num_blocks: int) -> Landing | None:
        """Per decode leg that asks for push, when it has blocks: staging, if it is free."""

    @abc.abstractmethod
    def give_back(self, landing: Landing) -> None:
        """Once per landing lent: nothing more will be read from it."""

    @abc.abstractmethod
    def meet(self, worker_id: str, epoch: str, address: str) -> None:
        """Another worker is up: connect to it ahead of its first offer. Failing is harmless."""

    @abc.abstractmethod
    def end_lease(self, offer: Part | Offer) -> None:
        """Nothing had to move: tell the source that this reader needs its lease no more."""

    @abc.abstractmethod
    def poll(self) -> list[Event]:
        """Before each step: what ended since the last call, each exactly once."""

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

    @abc.abstractmethod
    def close(self) -> None:
        """Once, at the end: stop the threads, close sockets and mappings."""


@dataclass(frozen=True, slots=True)
class Connector:
    """Both sides of one connector, by its registered name.

    address: where readers of our KV find us; empty if there can be none.
    """

    name: str
    scheduler: SchedulerSide
    worker: WorkerSide
    address: str = ""


Wake = Callable[[], None]
"""Called from any thread to end the engine loop's wait: `poll` has something."""
