"""The messages between gateway and native workers: what they carry and their version (design §6).

One ZeroMQ message has two parts: the wire version (ASCII decimal, compared before anything is
decoded) and a msgpack list of one tagged message. Nothing is ever unpickled.

History:
  1  first version.
  2  handoffs while prefill goes on: Submit.grain and push, Part, Deliver, Complete, Landing, Land.
  3  KV from anywhere: Submit.hints, Offer.stored, Part.keys and stored, Loaded, HintFailed, and
     what Frame tells of the prefix cache.
  4  what predictions need: Frame.step_context, View.context_tokens.
"""

from __future__ import annotations

import enum

import msgspec

from splitserve.errors import FormatMismatch
from splitserve.kv.format import KVFormat, ModelIdentity
from splitserve.sampling import Logprobs, Sampling

WIRE_VERSION = 4
_VERSIONS_ACCEPTED = (3, 4)


class Leg(enum.StrEnum):
    """Which part of a request a worker does."""

    WHOLE = "whole"  # prefill and decode here
    PREFILL = "prefill"  # prefill, draw one token, offer the KV
    DECODE = "decode"  # fetch the offered KV, continue


class Role(enum.StrEnum):
    """What a worker is for. A value that routing reads, not a class."""

    PREFILL = "prefill"
    DECODE = "decode"
    MIXED = "mixed"


class Grain(enum.StrEnum):
    """How much of a prompt's KV moves at a time (design §4)."""

    REQUEST = "request"  # all of it, when prefill has ended
    CHUNK = "chunk"  # the blocks that each step filled, while prefill goes on
    LAYER = "layer"  # of these, each layer as soon as it is computed, in the middle of the step


class Offer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """KV that a prefill worker holds for a reader: immutable and sufficient by itself (design 3.3).

    Covers positions [0, num_tokens): blocks block_ids[i] of the source's pool, in order. keys[i]
    names block i; the last block has no key when it is not full, and travels by value.
    """

    lease_id: str
    lease_s: float  # time left when offered, by the source's monotonic clock
    worker_id: str
    epoch: str
    transport: str
    address: str
    identity: bytes  # ModelIdentity.digest() of the source
    format: KVFormat
    num_tokens: int
    num_prompt_tokens: int  # the prompt/output boundary among num_tokens
    output_ids: list[int]  # all output so far, the token drawn after prefill included
    sampling: Sampling
    block_ids: list[int]
    keys: list[bytes]
    digests: list[bytes]  # xxh3-128 of each block's bytes, or empty: then only a confirm proves
    # The store has the leading full blocks by their keys, as many as there are block_ids; who reads
    # them needs no lease, and computes the others and the tail itself.
    stored: bool = False


class Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Some of the blocks of an offer to come: final, leased, and readable now (design 3.3).

    Parts of a handoff have the same lease, follow each other without a gap, and are a prefix of
    what its Offer says in the end.
    """

    lease_id: str
    lease_s: float
    worker_id: str
    epoch: str
    address: str
    first: int  # index of block_ids[0] among the sequence's blocks
    block_ids: list[int]
    digests: list[bytes]
    pushed: bool = False  # they are in the reader's landing, as far as that goes
    stored: bool = False  # they are in the store, by their keys
    keys: list[bytes] = []  # of each block, if it is stored


class Hint(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Another worker that is believed to have the leading blocks of a prompt (design §4).

    The two predictions are for blocks that the addressed worker lacks, in seconds.
    """

    worker_id: str
    epoch: str
    address: str
    num_blocks: int
    fetch_s: float
    recompute_s: float


class Landing(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Staging blocks that a decode worker lends for one handoff, to be written by its source."""

    landing_id: str
    worker_id: str
    epoch: str
    address: str
    first: int  # index of the block that block_ids[0] is for; those before it are not wanted
    block_ids: list[int]  # of the zone


# --- gateway to worker ----------------------------------------------------------------------------


class Submit(msgspec.Struct, frozen=True, tag="submit"):
    """Start a leg. output_ids are tokens the client already has: a resumed request brings them."""

    request_id: str
    leg: Leg
    prompt_ids: list[int]
    output_ids: list[int]
    sampling: Sampling
    salt: str = ""  # tenant's salt: roots the keys, so that tenants share no cache
    offer: Offer | None = None
    deadline_s: float = 600.0  # time left for the whole request
    # chunk, layer: a prefill leg tells its parts; a decode leg without an offer gets them later
    grain: Grain = Grain.REQUEST
    push: bool = False  # a decode leg lends a landing, if it has one free
    hints: list[Hint] = []  # the best first, at most three


class Deliver(msgspec.Struct, frozen=True, tag="deliver"):
    """A part for a decode leg of grain chunk."""

    request_id: str
    part: Part


class Land(msgspec.Struct, frozen=True, tag="land"):
    """Where a prefill leg is to write its blocks from now on; what it told before will be read."""

    request_id: str
    landing: Landing


class Complete(msgspec.Struct, frozen=True, tag="complete"):
    """The offer for a decode leg of grain chunk: what no part has brought, and the outcome."""

    request_id: str
    offer: Offer


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    """Forget a request at the next step boundary. Unknown ids are ignored: it may have ended."""

    request_id: str


class Release(msgspec.Struct, frozen=True, tag="release"):
    """End a lease: no reader will come."""

    lease_id: str


class Renew(msgspec.Struct, frozen=True, tag="renew"):
    """Keep a lease for another term, bounded by its request's deadline."""

    lease_id: str


class Meet(msgspec.Struct, frozen=True, tag="meet"):
    """A worker whose KV you may be offered: shake hands now, so that no request waits for it."""

    worker_id: str
    epoch: str
    address: str


class Resend(msgspec.Struct, frozen=True, tag="resend"):
    """Repeat the frames numbered from `first` on."""

    first: int


class Check(msgspec.Struct, frozen=True, tag="check"):
    """Assert every invariant now; the answer is `Checked`, or the worker dies of a failed one."""


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """Exit now; the gateway has drained what it wanted drained."""


# --- worker to gateway ----------------------------------------------------------------------------


class TierView(msgspec.Struct, frozen=True):
    """One tier of the store, as one worker sees it; blocks counted since that started."""

    name: str
    num_bytes: int  # that are there, whoever saved them
    hits: int
    misses: int
    saved: int
    evicted: int
    corrupt: int
    errors: int  # calls that failed
    is_broken: bool


class View(msgspec.Struct, frozen=True):
    """What a worker tells of itself with each frame."""

    waiting: int = 0
    running: int = 0
    fetching: int = 0
    free_blocks: int = 0  # free and cached: what an allocation can have
    leased_blocks: int = 0
    quarantined_blocks: int = 0
    landing_blocks_quarantined: int = 0  # given back, and their writer has not ended
    quarantine_age_s: float = 0.0  # of the pool's oldest
    blocks_unsaved: int = 0  # that the store did not take, since the worker started
    total_blocks: int = 0
    waiting_tokens: int = 0  # prompt tokens not yet computed, queued or partly done
    context_tokens: int = 0  # that the legs in the batch which decode attend to
    preemptions: int = 0
    admits_prefill: bool = True


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """A worker is ready: sent once per connection, and again when asked."""

    worker_id: str
    epoch: str
    role: Role
    pid: int
    identity: ModelIdentity
    format: KVFormat
    num_blocks: int
    max_model_len: int
    vocab_size: int
    exact_rows: int | None  # rows that exact mode pads to; None: not in exact mode
    max_batched_tokens: int
    address: str  # of its side channel, for readers of its KV


class Token(msgspec.Struct, frozen=True, array_like=True):
    """Output token number `index` of a request."""

    request_id: str
    index: int
    token_id: int
    logprobs: Logprobs | None = None


class Started(msgspec.Struct, frozen=True, tag="started"):
    """A leg left the queue: a prefill began to compute, or a decode leg joined the batch."""

    request_id: str
    queued_s: float
    cached_tokens: int


class PrefillEnded(msgspec.Struct, frozen=True, tag="prefill_ended"):
    """The token after prefill was drawn; queue and transfer not included."""

    request_id: str
    prefill_s: float
    computed_tokens: int


class Offered(msgspec.Struct, frozen=True, tag="offered"):
    """The KV of a prefill leg can be fetched."""

    request_id: str
    offer: Offer
    seal_s: float  # time the digests took


class PartReady(msgspec.Struct, frozen=True, tag="part_ready"):
    """A prefill leg of grain chunk has filled blocks that can be fetched."""

    request_id: str
    part: Part


class Landed(msgspec.Struct, frozen=True, tag="landed"):
    """A decode leg has blocks, and lends a landing to the source of its KV."""

    request_id: str
    landing: Landing


class FetchStarted(msgspec.Struct, frozen=True, tag="fetch_started"):
    """The decode worker has blocks and begins to copy."""

    request_id: str
    queued_s: float


class FetchEnded(msgspec.Struct, frozen=True, tag="fetch_ended"):
    """The transfer ended, with a proof."""

    request_id: str
    transfer_s: float  # spent copying and proving; between parts it stands still
    num_bytes: int
    reused_tokens: int  # granules that the receiver had already, in tokens
    # "digest", "lease", "local" (nothing had to move); and by which converter, if by one
    proof: str
    missing_tokens: int = 0  # that did not come, and are computed again: a store's tail, for one


class Loaded(msgspec.Struct, frozen=True, tag="loaded"):
    """A leg got KV of its prompt from elsewhere instead of computing it, or tried to."""

    request_id: str
    source: str  # a worker's id, or `store`
    num_tokens: int
    num_bytes: int
    seconds: float
    reason: str = ""  # why nothing came


class HintFailed(msgspec.Struct, frozen=True, tag="hint_failed"):
    """A hint was of no use. num_blocks: how many of the leading blocks the worker has; none if it
    can't be asked, as many as hinted if it did not answer in time."""

    request_id: str
    worker_id: str
    epoch: str
    num_hinted: int
    num_blocks: int


class FetchFailed(msgspec.Struct, frozen=True, tag="fetch_failed"):
    """The KV could not be had, or came without a proof; nothing of it was used."""

    request_id: str
    reason: str


class Preempted(msgspec.Struct, frozen=True, tag="preempted"):
    """The request lost its blocks and waits to be computed again."""

    request_id: str


class End(msgspec.Struct, frozen=True, tag="end"):
    """The worker's part is over: `stop`, `length`, or `error` with code and message."""

    request_id: str
    reason: str
    code: str = ""
    message: str = ""


class Checked(msgspec.Struct, frozen=True, tag="checked"):
    """The invariants hold. idle: nothing queued, running, leased or in quarantine."""

    idle: bool
    request_id: str = ""


Notice = (
    Started
    | PrefillEnded
    | Offered
    | PartReady
    | Landed
    | FetchStarted
    | FetchEnded
    | FetchFailed
    | Loaded
    | HintFailed
    | Preempted
    | End
    | Checked
)


class Frame(msgspec.Struct, frozen=True, tag="frame"):
    """One engine step, or a sign of life of the engine loop. Numbered per (epoch, gateway).

    Notices are in causal order; a request's tokens of this frame come before its End.
    """

    number: int
    tokens: list[Token]
    notices: list[Notice]
    view: View
    step_s: float = 0.0
    step_tokens: int = 0
    step_context: int = 0  # summed over the step's tokens: positions that each attends to
    tiers: list[TierView] = []  # now and then
    cached: list[bytes] = []  # keys that entered the prefix cache, by their first KEY_BYTES
    evicted: list[bytes] = []  # keys that left it


KEY_BYTES = 16  # of a key are enough to hint by: a wrong hint costs a round trip, no wrong answer

ToWorker = (
    Submit | Deliver | Land | Complete | Abort | Release | Renew | Meet | Resend | Check | Stop
)
ToGateway = Hello | Frame

_encoder = msgspec.msgpack.Encoder()
_to_worker = msgspec.msgpack.Decoder(ToWorker)
_to_gateway = msgspec.msgpack.Decoder(ToGateway)
_version_part = str(WIRE_VERSION).encode()


def encode(message: ToWorker | ToGateway) -> list[bytes]:
    """The parts of one ZeroMQ message."""
    return [_version_part, _encoder.encode(message)]


def decode_to_worker(parts: list[bytes]) -> ToWorker:
    return _to_worker.decode(_payload(parts))


def decode_to_gateway(parts: list[bytes]) -> ToGateway:
    return _to_gateway.decode(_payload(parts))


def _payload(parts: list[bytes]) -> bytes:
    if len(parts) != 2:
        raise FormatMismatch(f"A wire message has 2 parts, this one {len(parts)}.")
    try:
        version = int(parts[0])
    except ValueError:
        raise FormatMismatch(f"Wire version {parts[0][:20]!r} is not a number.") from None
    if version not in _VERSIONS_ACCEPTED:
        raise FormatMismatch(f"Wire version {WIRE_VERSION} here, {version} there.")
    return parts[1]
