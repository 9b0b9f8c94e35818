"""What a model is made to prove when it is loaded: that ours is the computation that it asks for.

48 random tokens go through the model's own forward with its own attention, and through ours as 16,
31 and 1 beside another sequence. Meanwhile each layer is registered: the shape of its KV and its
kind of attention, and that its arguments and its mask agree on a window, which 48 tokens would not
show.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from splitserve.engine.step import Draw, PlanItem, StepPlan
from splitserve.errors import UnsupportedModel, WorkerFault
from splitserve.model import attention
from splitserve.model.attention import Layer
from splitserve.model.forward import Forward
from splitserve.model.info import ModelInfo
from splitserve.model.kernels import GRANULE
from splitserve.model.support import layer_names
from splitserve.sampling import Sampling

if TYPE_CHECKING:
    from splitserve.model.loader import LoadedModel

TOLERANCE = 2e-4
"""Of the largest logit. Measured with the default model (30 layers): other orders of summation give
3e-6; a scale off by 0.1 % gives 9e-4, a soft cap of 50 too much 4e-3, a window short by one 5e-2, a
sink of -3 too much 9e-2."""

TOLERANCES = {"float32": TOLERANCE, "bfloat16": 6e-2, "float16": 1e-2}
"""By dtype. Rounding, measured on the CPU with the default model and the tiny ones: up to 2.5e-2 in
bfloat16 and 2.6e-3 in float16. The default model's faults in both: a scale off by 20 % gives 1.1e-1
(by 5 %, in float16, 3.9e-2), a sink of -3 too much 8e-2, a window short by eight 4e-1 (by one, in
float16, 5e-2). Smaller ones only show in float32, but that masks and windows agree is never a
matter of rounding."""

_CUTS = (16, 47, 48)
_OTHER = 5

FOREIGN = (TypeError, AttributeError, ValueError, LookupError, RuntimeError, NotImplementedError)
"""What a model's code may raise when it is called in a way that it does not expect."""

Floats = npt.NDArray[np.float32]


def own_logits(module: torch.nn.Module, info: ModelInfo) -> Floats:
    """Logits [3, vocab] after 16, 47 and 48 tokens, by a model that has its own attention."""
    tokens = torch.tensor([_tokens(info.vocab_size)])
    try:
        with torch.inference_mode():
            logits = module(input_ids=tokens, use_cache=False).logits[0]
    except FOREIGN as error:
        raise _refused(info.model_type, f"their own code fails: {error}") from error
    rows: Floats = logits[[cut - 1 for cut in _CUTS]].float().numpy()
    return rows


def layers_of(loaded: LoadedModel, expected: Floats) -> tuple[Layer, ...]:
    """The model's layers, in order, after each of our ways of attention gave the expected logits.

    Raises UnsupportedModel that names the model type and, where there is one, the layer.
    """
    kind = loaded.info.model_type
    register = _Register(loaded.info.num_layers, loaded.info.max_model_len)
    try:
        _use(loaded.module, attention.NAME_CHECKED)
        logits = _paged_logits(loaded, Forward(loaded, _pool(loaded), GRANULE, observe=register))
        layers = register.layers()
        _use(loaded.module, attention.NAME)
        ways = [logits]
        if not loaded.by_torch:
            mixed = Forward(loaded, _pool(loaded), GRANULE, torch_attention=True)
            ways.append(_paged_logits(loaded, mixed))
    except UnsupportedModel as refusal:
        raise _refused(kind, refusal.message) from refusal
    except WorkerFault as fault:
        raise _refused(kind, register.complaint() or fault.message) from fault
    except FOREIGN as error:
        raise _refused(kind, str(error)) from error
    for rows in ways:
        _require_equal(loaded, rows, expected)
    return layers


def require_own_logits(loaded: LoadedModel, expected: Floats) -> None:
    """Raise UnsupportedModel if the model does not give the expected logits where it is now."""
    try:
        rows = _paged_logits(loaded, Forward(loaded, _pool(loaded), GRANULE))
    except FOREIGN as error:
        raise _refused(loaded.info.model_type, f"on {loaded.device}: {error}") from error
    _require_equal(loaded, rows, expected)


class _Register:
    """Takes note of each layer when it first attends."""

    def __init__(self, num_layers: int, max_model_len: int) -> None:
        self._num_layers = num_layers
        self._max_model_len = max_model_len
        self._layers: dict[int, Layer] = {}

    def __call__(self, layer: Layer, mask_window: int | None) -> None:
        """Raises UnsupportedModel if the layer's mask hides what its arguments don't tell of."""
        if mask_window is not None:
            masked = mask_window if mask_window < self._max_model_len else 0
            if masked != (layer.window or 0):
                raise UnsupportedModel(
                    f"Layer {layer.index} ({layer.kind}) has a mask of {mask_window or 'all'} "
                    f"tokens, but asks for a window of {layer.window or 'all'}."
                )
        self._layers[layer.index] = layer

    def complaint(self) -> str | None:
        """What is wrong with the number of layers that attended, None if nothing is."""
        missing = [i for i in range(self._num_layers) if i not in self._layers]
        if missing and self._layers:
            return f"{layer_names(missing)} never attend: recurrent, or sharing the KV of others."
        if missing:
            return "no layer uses the attention interface."
        return None

    def layers(self) -> tuple[Layer, ...]:
        return tuple(self._layers[i] for i in range(self._num_layers))


def _paged_logits(loaded: LoadedModel, forward: Forward) -> Floats:
    """Logits as `own_logits`, in three steps and beside another sequence."""
    tokens, rows, start = _tokens(loaded.vocab_size), [], 0
    draw = Draw(Sampling(seed=0, max_tokens=1), [], [])
    other = tokens[::-1]
    for i, end in enumerate(_CUTS):
        item = PlanItem("checked", tokens[start:end], start, [3, 0, 2], draw)
        where = i * _OTHER
        beside = PlanItem("beside", other[where : where + _OTHER], where, [1], None)
        rows.append(forward.logits(StepPlan([beside, item]))[0])
        start = end
    return np.stack(rows)


def _require_equal(loaded: LoadedModel, rows: Floats, expected: Floats) -> None:
    tolerance = TOLERANCES[loaded.dtype]
    largest = float(np.abs(expected).max())
    differences = np.abs(rows - expected).max(axis=1) / largest
    if not np.isfinite(largest) or not (differences <= tolerance).all():
        told = ", ".join(
            f"{difference:.1e} after {cut} tokens"
            for difference, cut in zip(differences, _CUTS, strict=True)
        )
        raise _refused(
            loaded.info.model_type,
            f"over the paged pool, logits differ from the model's own by {told} (of the largest), "
            f"where {tolerance:.0e} is allowed.",
        )


def _refused(kind: str, why: str) -> UnsupportedModel:
    return UnsupportedModel(f"Models of type {kind} can't be served: {why}")


def _pool(loaded: LoadedModel) -> npt.NDArray[np.uint8]:
    """Four blocks of bits that are NaN in any dtype: what was not written shows."""
    return np.full((4, loaded.kv_format(GRANULE).block_bytes), 0xFF, np.uint8)


def _tokens(vocab_size: int) -> list[int]:
    return [int(one) for one in np.random.default_rng(0).integers(0, vocab_size, _CUTS[-1])]


def _use(module: Any, name: str) -> None:
    module.set_attn_implementation(name)
