"""What changes logits before the sampler sees them: min_tokens, bias and penalties.

Rebuilt from the prompt's and the output's ids for every draw, with no state of its own (design
3.9): so a resumed request goes on exactly where it was.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from splitserve.sampling import Sampling

Row = npt.NDArray[np.float32]


def adjusted(
    logits: Row, sampling: Sampling, prompt_ids: Sequence[int], output_ids: Sequence[int]
) -> Row:
    """The row [vocab] as the parameters want it; the row itself, untouched, if they want nothing.

    Ids outside the vocabulary are ignored.
    """
    masked = sampling.stop_ids and len(output_ids) < sampling.min_tokens
    repeats = sampling.repetition_penalty != 1
    counts_matter = sampling.frequency_penalty != 0 or sampling.presence_penalty != 0
    if not (masked or sampling.logit_bias or repeats or counts_matter):
        return logits
    row = logits.copy()
    if masked:
        row[_known(sampling.stop_ids, len(row))] = -np.inf
    for token_id, bias in sampling.logit_bias:
        if 0 <= token_id < len(row):
            row[token_id] += np.float32(bias)
    if repeats:
        seen = np.unique(_known([*prompt_ids, *output_ids], len(row)))
        penalty = np.float32(sampling.repetition_penalty)
        row[seen] = np.where(row[seen] > 0, row[seen] / penalty, row[seen] * penalty)
    if counts_matter:
        ids, counts = np.unique(_known(output_ids, len(row)), return_counts=True)
        row[ids] -= np.float32(sampling.frequency_penalty) * counts.astype(np.float32)
        row[ids] -= np.float32(sampling.presence_penalty)
    return row


def _known(ids: Sequence[int], vocab_size: int) -> npt.NDArray[np.int64]:
    array = np.asarray(ids, dtype=np.int64)
    return array[(array >= 0) & (array < vocab_size)]
