"""Log-probabilities of a row of raw logits."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from splitserve.sampling import Logprobs


def logprobs(logits: npt.NDArray[np.float32], token_id: int, num_top: int) -> Logprobs:
    """Of the token drawn and of the `num_top` likeliest, by (logit descending, id ascending).

    logits: float32 [vocab], neither adjusted nor tempered; sums in float64.
    """
    largest = float(logits.max())
    norm = largest + float(np.log(np.exp(logits.astype(np.float64) - largest).sum()))
    ids: list[int] = []
    if num_top:
        count = min(num_top, len(logits))
        threshold = np.partition(logits, len(logits) - count)[len(logits) - count]
        candidates = np.flatnonzero(logits >= threshold)
        ranked = candidates[np.argsort(-logits[candidates], kind="stable")]
        ids = [int(one) for one in ranked[:count]]
    return Logprobs(float(logits[token_id]) - norm, ids, [float(logits[i]) - norm for i in ids])
