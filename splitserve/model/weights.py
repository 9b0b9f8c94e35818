"""Passes over a row of unnormalised probabilities: where a nucleus ends, and where a share falls.

A nucleus is found without sorting: by bins of magnitude, and by rank in one bin only.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from splitserve.model.simd import kernel

_SHIFT = 18  # a float32's sign, exponent and 5 bits of its fraction: 32 bins an octave
_NUM_BINS = 1 << (31 - _SHIFT)


@kernel("Tuple((int64, float64))(int32[::1], float32[::1], float64, float64[::1])")
def _crossed_bin(
    bits: npt.NDArray[np.int32],
    weights: npt.NDArray[np.float32],
    wanted: float,
    mass: npt.NDArray[np.float64],
) -> tuple[int, float]:
    """The bin in which the sum, from the largest on, reaches `wanted`; and the sum before it."""
    for i in range(weights.shape[0]):
        mass[bits[i] >> _SHIFT] += weights[i]
    lowest = mass.shape[0] - 1
    above = 0.0
    while lowest > 0 and (mass[lowest] == 0 or above + mass[lowest] < wanted):
        above += mass[lowest]
        lowest -= 1
    return lowest, above


def nucleus(
    weights: npt.NDArray[np.float32], logits: npt.NDArray[np.float32], wanted: float
) -> npt.NDArray[np.intp]:
    """Ids, ascending, of the largest weights that together reach `wanted`; at least one.

    weights: [vocab], none negative or NaN, rising with logits [vocab]. Among equal logits the lower
    id comes first. The sum goes by bins, in each in id order, and in the last one by rank.
    """
    bits = weights.view(np.int32)
    crossed, above = _crossed_bin(bits, weights, wanted, np.zeros(_NUM_BINS))
    kept = bits >= (crossed + 1) << _SHIFT
    inside = np.flatnonzero((bits >= crossed << _SHIFT) & ~kept)
    inside = inside[np.argsort(-logits[inside], kind="stable")]
    sums = above + np.cumsum(weights[inside], dtype=np.float64)
    kept[inside[: int(np.searchsorted(sums, wanted)) + 1]] = True
    ids: npt.NDArray[np.intp] = np.flatnonzero(kept)
    return ids


@kernel("int64(float32[::1], float64)")
def index_at(weights: npt.NDArray[np.float32], share: float) -> int:
    """The index whose interval of the cumulative weight holds share x the whole, share < 1.

    Never one of weight 0. Sums run in id order, in float64.
    """
    whole = 0.0
    for i in range(weights.shape[0]):
        whole += weights[i]
    target = share * whole
    reached = 0.0
    last = 0
    for i in range(weights.shape[0]):
        reached += weights[i]
        if reached > target:
            return i
        if weights[i] > 0:
            last = i
    return last
