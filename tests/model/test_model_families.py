"""Each family that is carried: transformers' greedy tokens, and exact mode's bits."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch

from splitserve.engine.step import Draw, PlanItem, StepPlan
from splitserve.errors import UnsupportedModel
from splitserve.model.exact import invariant_rows
from splitserve.model.forward import Forward
from splitserve.model.loader import LoadedModel, load
from splitserve.model.runner import TorchRunner
from splitserve.sampling import Sampling
from tests.model.families import CARRIED, MIXTURES, REFUSED, build, generated

PROMPT = [int(one) for one in np.random.default_rng(0).integers(3, 300, 40)]
NUM_OUTPUTS = 24
TABLE = [5, 2, 7, 1]
GREEDY = Sampling(seed=0, max_tokens=NUM_OUTPUTS, temperature=0.0)
DTYPES = {"llama": "bfloat16", "gemma2": "bfloat16", "gpt2": "float16"}


def blocks_for(loaded: LoadedModel) -> npt.NDArray[np.uint8]:
    raw = np.empty((16, loaded.kv_format(16).block_bytes), np.uint8)
    raw.view(np.float32)[:] = np.nan
    return raw


def greedy(runner: TorchRunner, first_chunk: int) -> list[int]:
    """The prompt in two chunks, then token by token."""
    output: list[int] = []
    head = PlanItem("a", PROMPT[:first_chunk], 0, TABLE, None)
    runner.execute(StepPlan([head]))
    start, tokens = first_chunk, PROMPT[first_chunk:]
    while len(output) < NUM_OUTPUTS:
        item = PlanItem("a", tokens, start, TABLE, Draw(GREEDY, PROMPT, list(output)))
        token = runner.execute(StepPlan([item])).token_ids[0]
        assert token is not None
        output.append(token)
        start, tokens = start + len(tokens), [token]
    return output


@pytest.mark.parametrize("name", CARRIED)
def test_greedy_tokens_are_transformers(tmp_path: Path, tiny_path: Path, name: str) -> None:
    kind, changes = CARRIED[name]
    module = build(tmp_path, tiny_path, kind, DTYPES.get(name, "float32"), **changes)
    expected = generated(module, PROMPT, NUM_OUTPUTS)
    loaded = load(tmp_path)
    assert len(set(expected)) > 4
    assert greedy(TorchRunner(loaded, blocks_for(loaded), 16), 20) == expected
    if name not in MIXTURES:
        assert greedy(TorchRunner(loaded, blocks_for(loaded), 16, exact=True), 33) == expected


@pytest.mark.parametrize("name", [name for name in CARRIED if name not in MIXTURES])
def test_exact_mode_gives_the_same_bits_however_a_prompt_is_cut(
    tmp_path: Path, tiny_path: Path, name: str
) -> None:
    kind, changes = CARRIED[name]
    build(tmp_path, tiny_path, kind, **changes)
    loaded = load(tmp_path)
    forward = Forward(loaded, blocks_for(loaded), 16, min_rows=invariant_rows(loaded))
    draw = Draw(GREEDY, [], [])

    def last_logits(cuts: list[int]) -> npt.NDArray[np.float32]:
        start = 0
        for end in cuts:
            other = PlanItem("b", PROMPT[start:end][::-1], start, [9, 10, 11], draw)
            item = PlanItem("a", PROMPT[start:end], start, TABLE, draw)
            logits = forward.logits(StepPlan([other, item]))[1]
            start = end
        return logits

    whole = forward.logits(StepPlan([PlanItem("a", PROMPT, 0, TABLE, draw)]))[0]
    assert np.isfinite(whole).all()
    for cuts in ([40], [17, 40], [3, 20, 39, 40], list(range(1, 41))):
        np.testing.assert_array_equal(last_logits(cuts), whole)


@pytest.mark.parametrize("name", [*MIXTURES, "deepseek_v3"])
def test_exact_mode_refuses_mixtures_by_the_name_of_their_layers(
    tmp_path: Path, tiny_path: Path, name: str
) -> None:
    kind, changes = CARRIED[name]
    if name == "deepseek_v3":
        experts = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2}
        changes = {**changes, **experts, "moe_intermediate_size": 32, "first_k_dense_replace": 1}
    build(tmp_path, tiny_path, kind, **changes)
    loaded = load(tmp_path)
    with pytest.raises(UnsupportedModel, match=r"Exact mode can't be had: how \w*Experts.* mult"):
        TorchRunner(loaded, blocks_for(loaded), 16, exact=True)


def test_each_layer_is_registered(tmp_path: Path, tiny_path: Path) -> None:
    kind, changes = CARRIED["gemma2"]
    build(tmp_path, tiny_path, kind, **changes)
    first, second = load(tmp_path).layers
    assert (first.index, first.kind, first.num_kv_heads) == (0, "Gemma2Attention", 2)
    assert (first.window, second.window) == (12, None)
    assert first.softcap == second.softcap == 2.0
    assert first.scale == pytest.approx(20**-0.5)
    assert not first.is_plain


def test_a_window_that_can_hide_nothing_is_none(tmp_path: Path, tiny_path: Path) -> None:
    build(tmp_path, tiny_path, "mistral", sliding_window=256)
    layers = load(tmp_path).layers
    assert [layer.window for layer in layers] == [None, None]
    assert all(layer.is_plain for layer in layers)


@pytest.mark.parametrize("head_dim", [12, 20])
def test_heads_of_any_even_width_are_filled_up(
    tmp_path: Path, tiny_path: Path, head_dim: int
) -> None:
    module = build(tmp_path, tiny_path, "llama", head_dim=head_dim)
    loaded = load(tmp_path)
    assert loaded.kv_format(16).head_dim == -(-head_dim // 8) * 8
    with torch.inference_mode():
        expected = module(torch.tensor([PROMPT])).logits[0, -1].numpy()
    item = PlanItem("a", PROMPT, 0, TABLE, Draw(GREEDY, [], []))
    for torch_attention in (False, True):
        forward = Forward(loaded, blocks_for(loaded), 16, torch_attention=torch_attention)
        logits = forward.logits(StepPlan([item]))[0]
        np.testing.assert_allclose(logits, expected, atol=2e-5 * float(np.abs(expected).max()))


def test_the_page_on_models_lists_what_is_tested() -> None:
    page = (Path(__file__).parents[2] / "docs" / "models.md").read_text()
    _, carried, refused = re.split(r"^## .*\n", page, flags=re.MULTILINE)[:3]
    rows = [line for line in carried.splitlines() if line.startswith("| `")]
    assert {one for line in rows for one in named(line)} == set(CARRIED)
    without_exact = [line for line in rows if line.endswith("| no |")]
    assert {one for line in without_exact for one in named(line)} == set(MIXTURES)
    rows = [line for line in refused.splitlines() if line.startswith("| `")]
    assert {one for line in rows for one in named(line)} == set(REFUSED)


def named(row: str) -> list[str]:
    """Model types in the first column of a row."""
    return re.findall(r"`(\w+)`", row.split("|")[1])
