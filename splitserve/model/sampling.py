"""Drawing a token: a pure function of a row of logits, the parameters and the output index.

Design 3.9. The filters come in the order temperature, min_p, top_k, top_p, each on what the one
before it left, renormalised. Tokens are ranked by (logit descending, id ascending), so a tie at the
edge of top-k or top-p goes to the lower id. The draw is one uniform number, inverted over what is
left in token-id order.

Nothing is sorted in full: top-k ranks the largest logits alone, top-p those near its edge
(`weights.nucleus`). The whole that shares are taken of is summed in id order.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from splitserve.errors import WorkerFault
from splitserve.model.weights import index_at, nucleus
from splitserve.sampling import Sampling

Row = npt.NDArray[np.float32]
Ids = npt.NDArray[np.intp]

_UINT64 = 2**64 - 1


def uniform(seed: int, choice: int, output_index: int) -> float:
    """The uniform number in [0, 1) of one draw: the same on every machine.

    Philox4x64-10 (Salmon et al. 2011) with key (seed, choice), as two 64-bit words, and numpy's
    counter set to (output_index, 0, 0, 0). numpy increments the counter before it generates, so the
    word taken is the first of the block at counter output_index + 1; its upper 53 bits / 2^53.
    """
    key = np.array([seed & _UINT64, choice & _UINT64], dtype=np.uint64)
    counter = np.array([output_index, 0, 0, 0], dtype=np.uint64)
    word = int(np.random.Philox(key=key, counter=counter).random_raw())
    return (word >> 11) * 2.0**-53


def draw(logits: Row, sampling: Sampling, output_index: int) -> int:
    """The token drawn from float32 logits [vocab]. -inf is a token that can't be drawn.

    Raises WorkerFault if a logit is NaN or all are -inf.
    """
    best = int(np.argmax(logits))  # the first NaN if there is one, else the lowest id on ties
    largest = logits[best]
    if np.isnan(largest) or largest == -np.inf:
        what = "a NaN" if np.isnan(largest) else "nothing but -inf"
        raise WorkerFault(f"The model's logits hold {what} at output token {output_index}.")
    if sampling.temperature <= 0:
        return best
    weights = _weights(logits, largest, sampling.temperature)
    ids = _filter(logits, weights, sampling)
    if ids is not None:
        weights = weights[ids]
    chosen = index_at(weights, uniform(sampling.seed, sampling.choice, output_index))
    return chosen if ids is None else int(ids[chosen])


def draw_batch(logits: Row, draws: Sequence[tuple[Sampling, int]]) -> list[int]:
    """`draw` for each row of logits [B, vocab], with its (parameters, output index)."""
    return [
        draw(row, sampling, index) for row, (sampling, index) in zip(logits, draws, strict=True)
    ]


def _weights(logits: Row, largest: np.float32, temperature: float) -> Row:
    """exp((logit - largest) / temperature): unnormalised probabilities, the largest being 1."""
    if np.isinf(largest):
        certain: Row = (logits == largest).astype(np.float32)
        return certain
    with np.errstate(over="ignore", under="ignore"):
        scaled: Row = (logits - largest) / np.float32(max(temperature, 1e-30))
        np.exp(scaled, out=scaled)
    return scaled


def _filter(logits: Row, weights: Row, sampling: Sampling) -> Ids | None:
    """Ids that min_p, top_k and top_p leave, ascending; None for all."""
    kept = None
    if sampling.min_p > 0:
        kept = np.flatnonzero(weights >= np.float32(sampling.min_p))
    size = len(weights) if kept is None else len(kept)
    top_k = sampling.top_k if 0 < sampling.top_k < size else 0
    if not top_k and sampling.top_p >= 1:
        return kept
    if kept is not None:
        logits, weights = logits[kept], weights[kept]
    if top_k:
        ranked = _largest(logits, top_k)[:top_k]
        if sampling.top_p < 1:
            whole = float(weights[np.sort(ranked)].sum(dtype=np.float64))
            ranked = ranked[: _prefix(weights[ranked], sampling.top_p * whole)]
        ranked.sort()
    else:
        wanted = sampling.top_p * float(weights.sum(dtype=np.float64))
        ranked = nucleus(weights, logits, wanted)
    return ranked if kept is None else kept[ranked]


def _largest(logits: Row, count: int) -> Ids:
    """At least the `count` first ids in rank order, ranked: all that tie with the last are in."""
    size = len(logits)
    if count < size:
        threshold = np.partition(logits, size - count)[size - count]
        ids = np.flatnonzero(logits >= threshold)
    else:
        ids = np.arange(size)
    return ids[np.argsort(-logits[ids], kind="stable")]


def _prefix(weights: Row, wanted: float) -> int:
    """How many leading weights it takes to reach `wanted`; at least 1, at most all."""
    reached = int(np.searchsorted(np.cumsum(weights, dtype=np.float64), wanted, side="left"))
    return min(reached + 1, len(weights))
