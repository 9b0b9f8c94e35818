"""A model whose files lack weights, or hold others or broken ones: refused, the tensors named."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file, save_file
from torch import Tensor

from splitserve.errors import ModelUnavailable, UnsupportedModel
from splitserve.model.loader import load
from tests.model.families import CARRIED, build

Weights = dict[str, Tensor]


def rewrite(path: Path, change: Callable[[Weights], Weights | None]) -> None:
    """Change the weights in place, or give new ones."""
    file = path / "model.safetensors"
    weights = load_file(file)
    weights = change(weights) or weights
    save_file({k: x.clone() for k, x in weights.items()}, file, metadata={"format": "pt"})


def edit(path: Path, **changes: object) -> None:
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@pytest.fixture
def directory(tiny_path: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_path, tmp_path / "copy"))


@pytest.mark.parametrize(
    "name", ["model.layers.1.mlp.up_proj.weight", "model.norm.weight", "lm_head.weight"]
)
def test_a_missing_weight(directory: Path, name: str, caplog: pytest.LogCaptureFixture) -> None:
    def drop(weights: Weights) -> None:
        del weights[name]

    rewrite(directory, drop)
    with caplog.at_level(logging.WARNING), pytest.raises(ModelUnavailable, match=f"lack {name}"):
        load(directory)
    assert "LOAD REPORT" not in caplog.text


def test_many_missing_weights_are_counted(directory: Path) -> None:
    edit(directory, num_hidden_layers=3)
    with pytest.raises(ModelUnavailable, match=r"lack model\.layers\.2\.\S+, .* and 6 more\.$"):
        load(directory)


def test_a_deeper_model_than_config_json_tells(directory: Path) -> None:
    edit(directory, num_hidden_layers=1)
    with pytest.raises(
        ModelUnavailable, match=r"a model that has no model\.layers\.1\.input_layer"
    ):
        load(directory)


def test_biases_that_config_json_does_not_know(directory: Path) -> None:
    name = "model.layers.0.self_attn.q_proj.bias"
    rewrite(directory, lambda weights: weights | {name: weights["model.norm.weight"]})
    with pytest.raises(ModelUnavailable, match=f"has no {name}"):
        load(directory)


def test_another_shape(directory: Path) -> None:
    edit(directory, intermediate_size=64)
    with pytest.raises(ModelUnavailable, match=r"down_proj\.weight \[64, 128\], not \[64, 64\], "):
        load(directory)


@pytest.mark.parametrize("part", ["gate_proj", "down_proj"])
def test_a_missing_expert(tmp_path: Path, tiny_path: Path, part: str) -> None:
    kind, changes = CARRIED["qwen3_moe"]
    build(tmp_path, tiny_path, kind, **changes)

    def drop(weights: Weights) -> None:
        del weights[f"model.layers.1.mlp.experts.2.{part}.weight"]

    rewrite(tmp_path, drop)
    with pytest.raises(ModelUnavailable, match=r"model\.layers\.1\.mlp\.experts\..*proj") as error:
        load(tmp_path)
    assert "\n" not in error.value.message


def test_gpt2_as_on_the_hub(tmp_path: Path, tiny_path: Path) -> None:
    """Its files have no prefix and no lm_head, and hold the causal masks."""
    kind, changes = CARRIED["gpt2"]
    build(tmp_path, tiny_path, kind, **changes)

    def as_on_the_hub(weights: Weights) -> Weights:
        renamed = {k.removeprefix("transformer."): x for k, x in weights.items()}
        assert "lm_head.weight" not in renamed
        mask = renamed["ln_f.weight"]
        masks = {f"h.{i}.attn.{name}": mask for i in (0, 1) for name in ("bias", "masked_bias")}
        return renamed | masks

    rewrite(tmp_path, as_on_the_hub)
    assert load(tmp_path).info.model_type == "gpt2"


def test_rotary_frequencies_of_old_checkpoints_are_left_aside(directory: Path) -> None:
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    rewrite(directory, lambda weights: weights | {name: weights["model.norm.weight"][:8]})
    load(directory)


def test_the_tower_of_a_model_that_sees_is_refused(tmp_path: Path, tiny_path: Path) -> None:
    """The file is of gemma3, config.json of its text part alone: one of them is wrong."""
    kind, changes = CARRIED["gemma3_text"]
    build(tmp_path, tiny_path, kind, **changes)
    name = "vision_tower.vision_model.post_layernorm.weight"
    rewrite(tmp_path, lambda weights: weights | {name: weights["model.norm.weight"]})
    with pytest.raises(ModelUnavailable, match=f"has no {name}"):
        load(tmp_path)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_that_are_no_numbers(directory: Path, value: float, dtype: str) -> None:
    """Even where the self-check does not look: its tokens are 48 of 512."""

    def spoil(weights: Weights) -> None:
        weights["model.embed_tokens.weight"][511, 0] = value

    rewrite(directory, spoil)
    with pytest.raises(ModelUnavailable, match=r"NaN or inf: model\.embed_tokens\.weight"):
        load(directory, dtype)


def test_a_sum_that_overflows_is_no_infinite_weight(directory: Path) -> None:
    def widen(weights: Weights) -> None:
        weights["model.embed_tokens.weight"][511, :4] = 3e38

    rewrite(directory, widen)
    load(directory)


@pytest.mark.parametrize("kind", ["llama9", "", "vit"])
def test_a_type_that_is_not_known_or_writes_no_text(directory: Path, kind: str) -> None:
    edit(directory, model_type=kind)
    with pytest.raises(UnsupportedModel, match=f"Models of type '?{kind}'? can't be") as error:
        load(directory)
    assert "\n" not in error.value.message
