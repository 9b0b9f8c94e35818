"""What an engine asks of its connector, and what comes back: jobs and the events that end them."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from splitserve.sampling import Sampling
from splitserve.wire import Hint, Landing, Offer, Part


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


class Place(enum.Enum):
    """Where a fetch finds its blocks."""

    POOL = enum.auto()  # of the worker that the source names, by block_ids
    ZONE = enum.auto()  # our own landing zone, where that worker wrote them, by block_ids
    STORE = enum.auto()  # by keys


@dataclass(frozen=True, slots=True)
class FetchJob:
    """Copy blocks into our blocks target[i]: block_ids[i] of a pool or a zone, or those of keys[i].

    source is the part or the offer that names them, None for a store; digests are theirs, or empty.
    A handoff has one job or several; is_last: none follows, the source's lease is needed no more.
    is_converted: the source's format is another: block_ids and digests are all of its, first is the
    index of target[0] among the prompt's blocks here.
    """

    request_id: str
    source: Part | Offer | None
    block_ids: list[int]
    digests: list[bytes]
    target: list[int]
    is_last: bool = True
    place: Place = Place.POOL
    keys: list[bytes] = field(default_factory=list)
    is_converted: bool = False
    first: int = 0


@dataclass(frozen=True, slots=True)
class FetchDone:
    """A job is over and nothing touches its target blocks any more.

    proof is "digest" or "lease" if its leading num_blocks may be used, which are all of them unless
    they are a store's; None if none may, and `reason` then says why.
    """

    request_id: str
    proof: str | None
    seconds: float
    num_bytes: int
    num_blocks: int
    num_asked: int
    reason: str = ""


@dataclass(frozen=True, slots=True)
class FindJob:
    """Ask where blocks of these keys are, the leading ones of a prompt that we lack; first is the
    index of keys[0] in it. Hinted workers are asked first, then the store, if with_store."""

    request_id: str
    keys: list[bytes]
    first: int
    hints: list[Hint]
    with_store: bool = True


@dataclass(frozen=True, slots=True)
class FoundDone:
    """Where most leading blocks of a FindJob are: leased to us as `part`, or in the store.

    first: of the job. failed: hints that were wrong, with the number of blocks that those have.
    """

    request_id: str
    first: int
    num_blocks: int
    part: Part | None = None
    failed: list[tuple[Hint, int]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Asked:
    """Another worker looks for blocks of these keys here: the answer is `answer`, soon."""

    ask_id: int
    keys: list[bytes]
    first: int


@dataclass(frozen=True, slots=True)
class SaveJob:
    """Keep these blocks, which the caller has pinned, in the store. digests may be empty."""

    job_id: str
    keys: list[bytes]
    blocks: list[int]
    digests: list[bytes]


@dataclass(frozen=True, slots=True)
class SaveDone:
    """The store touches the blocks of a job no more; it has the leading num_saved of them."""

    job_id: str
    num_saved: int


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


Event = SealDone | FetchDone | PushDone | FoundDone | SaveDone | Asked
