"""One leg of a request inside the engine."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from splitserve.connector.jobs import FetchDone
from splitserve.kv.lease import Lease
from splitserve.kv.table import BlockTable
from splitserve.sampling import Sampling
from splitserve.wire import Grain, Landing, Leg, Offer, Part


class Status(enum.Enum):
    WAITING = enum.auto()  # in the queue, holds no blocks
    FETCHING = enum.auto()  # its KV is on the way into held blocks
    RUNNING = enum.auto()  # has blocks, part of every step
    DONE = enum.auto()  # left the engine


@dataclass(slots=True)
class Incoming:
    """KV on its way into a leg: what was asked for, what is still to come."""

    num_hits: int  # leading blocks that were here already
    num_blocks: int  # that are to be here in the end; the leg computes those beyond itself
    num_asked: int  # leading blocks that are here or that a job brings
    num_there: int  # leading blocks that are here: all that was asked, unless a store lacked one
    is_short: bool = False  # it did: what came after is of no use
    num_jobs: int = 0  # that have not ended
    num_bytes: int = 0
    seconds: float = 0.0
    proof: str = "local"

    def note(self, event: FetchDone) -> None:
        """One of the jobs succeeded, as far as its source could."""
        self.num_bytes += event.num_bytes
        self.seconds += event.seconds
        self.proof = event.proof or self.proof
        if not self.is_short:
            self.num_there += event.num_blocks
            self.is_short = event.num_blocks < event.num_asked


@dataclass(frozen=True, slots=True)
class Found:
    """Leading blocks of a leg's prompt that need not be computed: blocks [first, first + num) are
    in the store by their keys, or leased to us by another worker as `part`."""

    first: int
    num_blocks: int
    source: str  # for a person: a worker's id, or the store
    part: Part | None = None

    @property
    def stop(self) -> int:
        return self.first + self.num_blocks


@dataclass(slots=True, eq=False)
class Sequence:
    """Tokens, blocks and progress of one leg. `tokens` = prompt_ids + output_ids, always."""

    request_id: str
    leg: Leg
    prompt_ids: list[int]
    output_ids: list[int]
    sampling: Sampling
    table: BlockTable
    number: int  # order of arrival: lower is older
    arrived_s: float
    deadline_s: float
    offer: Offer | None = None
    found: Found | None = None  # to be loaded before the leg computes
    grain: Grain = Grain.REQUEST
    tokens: list[int] = field(default_factory=list)
    num_computed: int = 0  # KV of positions [0, num_computed) is in the blocks
    status: Status = Status.WAITING
    cached_tokens: int | None = None  # set at the first admission, never again (design §6)
    started_s: float | None = None
    held: list[int] = field(default_factory=list)  # target blocks of a fetch
    incoming: Incoming | None = None  # while FETCHING
    parts: list[Part] = field(default_factory=list)  # delivered, no job yet
    lease: Lease | None = None  # on the leading blocks of a prefill leg that hands over by parts
    wants_push: bool = False
    landing: Landing | None = None  # lent to a prefill leg, or by a decode leg
    layered: set[int] = field(default_factory=set)  # blocks (by index) that were pushed by layers
    num_drawn: int = 0  # tokens drawn by this leg

    def __post_init__(self) -> None:
        self.tokens = self.prompt_ids + self.output_ids

    @property
    def is_fetch(self) -> bool:
        """A decode leg that gets KV from elsewhere, now or while that is computed."""
        return self.offer is not None or (
            self.leg is Leg.DECODE and self.grain is not Grain.REQUEST
        )

    @property
    def num_handed_over(self) -> int:
        """Positions whose KV a handoff covers: all but the token drawn after prefill."""
        return len(self.tokens) if self.offer is None else self.offer.num_tokens

    @property
    def num_remaining(self) -> int:
        """Positions to compute before the next token can be drawn; 1 while decoding."""
        return len(self.tokens) - self.num_computed

    @property
    def is_decoding(self) -> bool:
        return self.num_computed == len(self.tokens) - 1

    @property
    def num_output_left(self) -> int:
        return self.sampling.max_tokens - len(self.output_ids)

    def append(self, token_id: int) -> None:
        self.output_ids.append(token_id)
        self.tokens.append(token_id)
        self.num_drawn += 1

    def end_reason(self) -> str | None:
        """Why the answer ends with the token drawn last, or None."""
        if self.output_ids and self.output_ids[-1] in self.sampling.stop_ids:
            return "stop"
        if len(self.output_ids) >= self.sampling.max_tokens:
            return "length"
        return None
