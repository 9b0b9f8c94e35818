"""How much KV moves at a time: asked per request, answered with both predictions (design §4).

Moving a prompt's KV while it is still computed hides the transfer behind the prefill, but costs a
message and a digest run per step, and blocks of the decode worker during the prefill. Small prompts
go in one (Splitwise, section 4.2).
"""

from __future__ import annotations

from dataclasses import dataclass

from splitserve.config import Handoff
from splitserve.wire import Grain

PART_OVERHEAD_S = 0.5e-3  # per part: digests, three messages, one more job
GAIN_S = 2e-3  # less than this is not worth holding blocks of the decode worker during prefill


@dataclass(frozen=True, slots=True)
class KVShape:
    """What a handoff's size depends on. chunk_tokens: a step's budget."""

    bytes_per_token: float
    num_layers: int
    chunk_tokens: int


@dataclass(frozen=True, slots=True)
class GrainDecision:
    """push: the prefill worker writes, rather than being read. exposed_s: predicted time from the
    end of prefill to the end of the transfer, by grain."""

    grain: Grain
    push: bool
    reason: str
    exposed_s: dict[Grain, float]


def decide_grain(
    handoff: Handoff,
    num_tokens: int,
    shape: KVShape,
    bytes_per_s: float,
    prefill_tokens_per_s: float,
) -> GrainDecision:
    """With auto, chunk if the transfer of all but the last chunk is predicted to hide enough.

    Request: T = bytes / bandwidth, all of it exposed. Chunk: the last chunk's own transfer, or what
    prefill was too short to hide, and an overhead per part. Layer: T / layers, or what prefill was
    too short to hide. auto does not take the last two's push: it costs staging memory.
    """
    chunk_tokens, bytes_per_token = shape.chunk_tokens, shape.bytes_per_token
    num_parts = max(1, -(-num_tokens // chunk_tokens))
    last = num_tokens - (num_parts - 1) * chunk_tokens
    transfer_s = num_tokens * bytes_per_token / bytes_per_s
    last_s = last * bytes_per_token / bytes_per_s
    # Chunks but the last move while all but the first are computed.
    hiding_s = (num_tokens - min(num_tokens, chunk_tokens)) / prefill_tokens_per_s
    exposed_s = {
        Grain.REQUEST: transfer_s + PART_OVERHEAD_S,
        Grain.CHUNK: max(last_s, transfer_s - hiding_s) + num_parts * PART_OVERHEAD_S,
        Grain.LAYER: transfer_s / shape.num_layers
        + max(0.0, transfer_s - num_tokens / prefill_tokens_per_s)
        + num_parts * PART_OVERHEAD_S,
    }
    gain_s = exposed_s[Grain.REQUEST] - exposed_s[Grain.CHUNK]
    if handoff is Handoff.AUTO:
        grain = Grain.CHUNK if gain_s > GAIN_S else Grain.REQUEST
        why = "auto"
    else:
        grain = Grain(handoff.partition("-")[0])
        why = handoff.value
    predicted = ", ".join(f"{x.value} {s * 1e3:.1f} ms" for x, s in exposed_s.items())
    reason = f"handoff {grain.value} ({why}): exposed {predicted}"
    return GrainDecision(grain, handoff.is_push, reason, exposed_s)
