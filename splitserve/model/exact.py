"""How many rows a forward pass needs before its arithmetic stops depending on how many there are.

Our packed layers and our attention need one. Layers that stay torch's own pick their kernel, and
with it the order of their sums, by the shape; above some small number of rows the libraries keep to
one order per row (4, with MKL on AVX2). Design 3.10 pads every pass to that number; here it is
found out, on the weights and the machine at hand, and then tried on whole passes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from splitserve.engine.step import Draw, PlanItem, StepPlan
from splitserve.errors import UnsupportedModel
from splitserve.model.forward import Forward
from splitserve.model.loader import LoadedModel
from splitserve.sampling import Sampling

CANDIDATES = (1, 2, 4, 8, 16, 32)

_BLOCK_SIZE = 16
_LENGTH = 40
_OTHER = 13
_ROWS = (3, 5, 6, 7, 9, 12, 15, 17, 24, 33, 48, 64, 100, 257, 512)
_WIDE_ROWS = (1, 2, 3, 4, 5, 8, 16, 32, 64)  # output layers see few rows, and cost much per row

Floats = npt.NDArray[np.float32]


def invariant_rows(loaded: LoadedModel, num_threads: int = 1) -> int:
    """The smallest candidate from which on results have the same bits; about a second of work.

    Raises UnsupportedModel, since exact mode can't be had, if there is none, or if layers multiply
    in a way of their own: those of experts have as many rows as tokens chose them.
    """
    own = sorted(_with_own_products(loaded.module))
    if own:
        raise UnsupportedModel(
            f"Exact mode can't be had: how {', '.join(own)} multiply may depend on what shares a "
            "step (mixtures of experts do).",
            advice="Serve this model without --exact.",
        )
    generator = torch.Generator().manual_seed(0)
    with torch.inference_mode():
        linears = _distinct_linears(loaded.module)
        smallest = max((_linear_rows(one, generator) for one in linears), default=1)
    for rows in CANDIDATES:
        if rows >= smallest and _passes_agree(loaded, rows, num_threads):
            return rows
    raise UnsupportedModel(
        f"Exact mode can't be had: up to {CANDIDATES[-1]} rows, this model's results on this "
        "machine depend on what shares a step."
    )


def _with_own_products(module: torch.nn.Module) -> set[str]:
    """Classes of modules that hold matrices, and are neither linear layers nor embeddings."""
    known = torch.nn.Linear | torch.nn.Embedding
    return {
        type(one).__name__
        for one in module.modules()
        if not isinstance(one, known)
        and any(weight.ndim > 1 for weight in one.parameters(recurse=False))
    }


def _distinct_linears(module: torch.nn.Module) -> list[torch.nn.Linear]:
    """One of torch's own linear layers of each shape."""
    linears = (one for one in module.modules() if isinstance(one, torch.nn.Linear))
    return list({(one.in_features, one.out_features): one for one in linears}.values())


def _linear_rows(linear: torch.nn.Linear, generator: torch.Generator) -> int:
    """The smallest candidate M such that any M' >= M rows give row 0 (and the last) equal bits."""
    wide = linear.out_features > 8 * linear.in_features
    counts = sorted({*CANDIDATES, *(_WIDE_ROWS if wide else _ROWS)})
    rows = torch.randn(counts[-1], linear.in_features, generator=generator)
    whole = linear(rows)
    differing = 0
    for count in counts[:-1]:
        first = linear(rows[:count].clone())
        last = linear(rows[-count:].clone())
        if not torch.equal(first, whole[:count]) or not torch.equal(last, whole[-count:]):
            differing = count
    return next((one for one in CANDIDATES if one > differing), CANDIDATES[-1] + 1)


def _passes_agree(loaded: LoadedModel, rows: int, num_threads: int) -> bool:
    """Whether a sequence's last logits are the same however it is cut and whatever it shares.

    In one go; its last token, its last three again; cut in two; beside another; a ragged batch.
    """
    rng = np.random.default_rng(0)
    vocab = loaded.vocab_size
    tokens = [int(one) for one in rng.integers(0, vocab, _LENGTH)]
    other = [int(one) for one in rng.integers(0, vocab, _OTHER)]
    per_sequence = -(-_LENGTH // _BLOCK_SIZE)
    blocks = np.zeros((3 * per_sequence, loaded.kv_format(_BLOCK_SIZE).block_bytes), np.uint8)
    forward = Forward(loaded, blocks, _BLOCK_SIZE, min_rows=rows, num_threads=num_threads)

    def last(*plan: PlanItem) -> Floats:
        row: Floats = forward.logits(StepPlan(list(plan)))[0]
        return row

    reference = last(_item("a", tokens, 0, _LENGTH, 0))
    for start in (_LENGTH - 1, _LENGTH - 3):
        if not np.array_equal(last(_item("a", tokens, start, _LENGTH, 0)), reference):
            return False
    last(_item("a", tokens, 0, 16, 1))
    if not np.array_equal(last(_item("a", tokens, 16, _LENGTH, 1)), reference):
        return False
    beside = _item("b", other, 0, _OTHER, 2)
    if not np.array_equal(last(_item("a", tokens, 0, _LENGTH, 1), beside), reference):
        return False
    tail = _item("a", tokens, _LENGTH - 1, _LENGTH, 1)
    return np.array_equal(last(tail, _item("b", other, 5, 8, 2)), reference)


def _item(name: str, tokens: Sequence[int], start: int, end: int, table: int) -> PlanItem:
    per_sequence = -(-_LENGTH // _BLOCK_SIZE)
    block_ids = [table * per_sequence + i for i in reversed(range(per_sequence))]
    draw = Draw(Sampling(seed=0, max_tokens=1), [], [])
    return PlanItem(name, list(tokens[start:end]), start, block_ids, draw)
