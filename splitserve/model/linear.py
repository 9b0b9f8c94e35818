"""torch modules on packed weights: a model's own layers are replaced by these when it is loaded."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch

from splitserve.model import gemm
from splitserve.model.tiles import PANEL

INT8_MAX_ROWS = 8
"""Above, a step is bound by arithmetic, not by reading weights: float32 is as fast, and better."""


Floats = npt.NDArray[np.float32]


class Packing:
    """How the packed layers of one process compute: on one thread in float32, until told otherwise.

    int8: steps of few rows read int8 weights, where `quantize` has made them.
    """

    def __init__(self) -> None:
        self.multiply: Callable[..., None] | None = None
        self.int8 = False
        self.layers: list[PackedLinear] = []

    def quantize(self) -> None:
        """Make int8 weights beside the others; before the fork, so that workers share them."""
        made: dict[int, tuple[npt.NDArray[np.int8], npt.NDArray[np.float32]]] = {}
        for layer in self.layers:
            key = id(layer.panels)
            if key not in made:
                made[key] = gemm.quantize_panels(layer.panels)
            layer.levels, layer.scales = made[key]

    def use_threads(self, num: int) -> None:
        """Call after the fork, never before it."""
        self.multiply = None
        if num > 1:
            from splitserve.model.gemm_parallel import multiply_parallel

            def multiply(*args: object) -> None:
                multiply_parallel(*args, num)  # type: ignore[call-arg,arg-type]

            self.multiply = multiply


class PackedLinear(torch.nn.Module):
    """A float32 torch.nn.Linear for inference; `weight` is gone, its panels are kept instead."""

    def __init__(
        self,
        panels: npt.NDArray[np.float32],
        out_features: int,
        bias: torch.Tensor | None,
        packing: Packing,
    ) -> None:
        super().__init__()
        self.panels = panels
        self.in_features = int(panels.shape[1])
        self.out_features = out_features
        self.bias = bias
        self.levels: npt.NDArray[np.int8] | None = None
        self.scales: npt.NDArray[np.float32] | None = None
        self._packing = packing
        packing.layers.append(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [..., in_features] to [..., out_features]."""
        out = self.product(x.reshape(-1, self.in_features).contiguous().numpy())
        return torch.from_numpy(out).view(*x.shape[:-1], self.out_features)

    def product(self, rows: Floats) -> Floats:
        """rows: contiguous [M, in_features], to [M, out_features]."""
        if self._packing.int8 and self.levels is not None and len(rows) <= INT8_MAX_ROWS:
            assert self.scales is not None
            out = gemm.matmul_int8(rows, self.levels, self.scales, self.out_features)
        else:
            out = gemm.matmul(rows, self.panels, self.out_features, self._packing.multiply)
        if self.bias is not None:
            out += self.bias.numpy()
        return out

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}"


class PackedEmbedding(torch.nn.Module):
    """An embedding that shares the panels of a tied output layer."""

    def __init__(self, panels: npt.NDArray[np.float32]) -> None:
        super().__init__()
        self.panels = panels

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """ids: [...] to [..., hidden]."""
        rows = gemm.unpack_rows(self.panels, ids.reshape(-1).numpy())
        return torch.from_numpy(rows).view(*ids.shape, -1)


def side_by_side(layers: list[PackedLinear], packing: Packing) -> PackedLinear:
    """Layers of one input as one, outputs in a row. Their panels become views of its panels."""
    assert all(one.out_features % PANEL == 0 for one in layers)
    panels = np.concatenate([one.panels for one in layers])
    biases = [torch.zeros(one.out_features) if one.bias is None else one.bias for one in layers]
    has_bias = any(one.bias is not None for one in layers)
    num_out = sum(one.out_features for one in layers)
    joined = PackedLinear(panels, num_out, torch.cat(biases) if has_bias else None, packing)
    first = 0
    for one in layers:
        last = first + len(one.panels)
        one.panels = panels[first:last]
        packing.layers.remove(one)
        first = last
    return joined


def pack_linears(module: torch.nn.Module) -> Packing:
    """Replace every plain float32 Linear of the model, freeing its weights as it goes.

    An embedding tied to an output layer shares its panels. Layers of other types stay.
    """
    packing = Packing()
    packed: dict[int, npt.NDArray[np.float32]] = {}
    embeddings = [
        (parent, name, child)
        for parent in module.modules()
        for name, child in parent.named_children()
        if type(child) is torch.nn.Embedding
    ]
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is not torch.nn.Linear or child.weight.dtype != torch.float32:
                continue
            panels = packed.get(child.weight.data_ptr())
            if panels is None:
                panels = gemm.pack(child.weight.detach().numpy())
                packed[child.weight.data_ptr()] = panels
            bias = None if child.bias is None else child.bias.detach()
            setattr(parent, name, PackedLinear(panels, child.out_features, bias, packing))
    for parent, name, child in embeddings:
        panels = packed.get(child.weight.data_ptr())
        if panels is not None:
            setattr(parent, name, PackedEmbedding(panels))
    return packing
