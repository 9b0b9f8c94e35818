"""The packed product: right, and the same bits whatever shares it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from splitserve.model import gemm
from splitserve.model.linear import PackedEmbedding, PackedLinear, Packing, pack_linears

SHAPES = st.tuples(st.integers(1, 70), st.integers(1, 90))


def random(shape: tuple[int, ...], seed: int = 0) -> gemm.Floats:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@given(SHAPES, st.integers(1, 40))
@settings(max_examples=60, deadline=None)
def test_it_is_the_product(shape: tuple[int, int], num_rows: int) -> None:
    weight, x = random(shape), random((num_rows, shape[1]), 1)
    packed = gemm.pack(weight)
    assert np.array_equal(gemm.unpack_rows(packed, np.arange(shape[0])), weight)
    exact = x.astype(np.float64) @ weight.T.astype(np.float64)
    out = gemm.matmul(x, packed, shape[0])
    assert out.shape == exact.shape
    assert np.allclose(out, exact, atol=1e-4 * shape[1] ** 0.5)


@given(SHAPES, st.integers(1, 40), st.data())
@settings(max_examples=60, deadline=None)
def test_a_row_has_the_same_bits_in_any_company(
    shape: tuple[int, int], num_rows: int, data: st.DataObject
) -> None:
    packed, x = gemm.pack(random(shape)), random((num_rows, shape[1]), 1)
    whole = gemm.matmul(x, packed, shape[0])
    first = data.draw(st.integers(0, num_rows - 1))
    last = data.draw(st.integers(first + 1, num_rows))
    assert np.array_equal(gemm.matmul(x[first:last].copy(), packed, shape[0]), whole[first:last])


def test_each_output_is_one_chain_of_fused_multiply_adds() -> None:
    """The order of summation is a promise: it is what makes answers reproducible."""
    weight, x = random((20, 50)), random((1, 50), 1)
    chain = np.zeros(20, np.float32)
    for k in range(50):
        product = x[0, k].astype(np.float64) * weight[:, k].astype(np.float64)
        chain = (chain.astype(np.float64) + product).astype(np.float32)
    assert np.array_equal(gemm.matmul(x, gemm.pack(weight), 20)[0], chain)


def test_threads_change_no_bit() -> None:
    packed, x = gemm.pack(random((1003, 512))), random((17, 512), 1)
    packing = Packing()
    packing.use_threads(2)
    assert packing.multiply is not None
    assert np.array_equal(
        gemm.matmul(x, packed, 1003, packing.multiply), gemm.matmul(x, packed, 1003)
    )


def test_nan_and_infinity_stay_in_their_row() -> None:
    packed, x = gemm.pack(random((33, 8))), random((7, 8), 1)
    clean = gemm.matmul(x, packed, 33)
    x[3, 2] = np.nan
    dirty = gemm.matmul(x, packed, 33)
    assert np.isnan(dirty[3]).all()
    others = [0, 1, 2, 4, 5, 6]
    assert np.array_equal(dirty[others], clean[others])


class Tied(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(40, 24)
        self.middle = torch.nn.Sequential(torch.nn.Linear(24, 24), torch.nn.GELU())
        self.head = torch.nn.Linear(24, 40, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.middle(self.embed(ids)))
        return out


@pytest.mark.parametrize("shape", [(1, 5), (2, 3)])
def test_a_model_gives_the_same_with_packed_layers(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    model = Tied()
    ids = torch.randint(0, 40, shape)
    with torch.inference_mode():
        before = model(ids)
        pack_linears(model)
        after = model(ids)
    assert torch.allclose(before, after, atol=1e-5)
    assert isinstance(model.head, PackedLinear)
    assert isinstance(model.embed, PackedEmbedding)
    assert model.head.panels is model.embed.panels, "tied weights are kept once"
    assert not list(model.parameters()) or all(p.numel() < 100 for p in model.parameters())


@given(SHAPES, st.integers(1, 20))
@settings(max_examples=60, deadline=None)
def test_int8_weights_are_the_nearest_levels(shape: tuple[int, int], num_rows: int) -> None:
    weight, x = random(shape), random((num_rows, shape[1]), 1)
    levels, scales = gemm.quantize_panels(gemm.pack(weight))
    restored = gemm.unpack_rows(levels, np.arange(shape[0])) * scales[: shape[0], None]
    step = np.abs(weight).max(axis=1, keepdims=True) / 127
    assert (np.abs(restored - weight) <= step * 0.5001).all()
    out = gemm.matmul_int8(x, levels, scales, shape[0])
    assert np.allclose(out, x @ restored.T, atol=1e-3 * shape[1] ** 0.5)
    for row in range(num_rows):
        assert np.array_equal(
            gemm.matmul_int8(x[row : row + 1], levels, scales, shape[0])[0], out[row]
        )


def test_int8_is_for_few_rows_of_those_that_ask() -> None:
    torch.manual_seed(0)
    model = Tied()
    packing = pack_linears(model)
    few, many = torch.randint(0, 40, (1, 3)), torch.randint(0, 40, (1, 30))
    with torch.inference_mode():
        plain = model(few), model(many)
        packing.quantize()
        assert torch.equal(model(few), plain[0]), "made, but not asked for"
        packing.int8 = True
        assert not torch.equal(model(few), plain[0])
        assert torch.allclose(model(few), plain[0], atol=0.1)
        assert torch.equal(model(many), plain[1])
