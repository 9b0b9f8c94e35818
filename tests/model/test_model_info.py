"""What a directory says of itself, and that the loader finds the same."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file, save_file

from splitserve.errors import ModelUnavailable, UnsupportedModel
from splitserve.model.info import GenerationDefaults, describe
from splitserve.model.loader import LoadedModel, load
from splitserve.model.support import active_window, rope_parameters
from splitserve.model.tiny import make_tiny


@pytest.fixture
def directory(tiny_path: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_path, tmp_path / "copy"))


def edit(path: Path, **changes: Any) -> None:
    content = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({k: v for k, v in content.items() if v is not None}))


def test_the_tiny_model(tiny_path: Path) -> None:
    info = describe(tiny_path)
    assert info.identity.architecture == "LlamaForCausalLM"
    assert (info.num_layers, info.num_kv_heads, info.head_dim) == (2, 2, 16)
    assert (info.vocab_size, info.max_model_len, info.eos_ids) == (512, 8192, (0, 2))
    assert info.defaults == GenerationDefaults(temperature=0.8)
    assert info.weights_bytes == (tiny_path / "model.safetensors").stat().st_size
    assert info.kv_format(16).block_bytes == 2 * 2 * 2 * 16 * 16 * 4


def test_the_loader_agrees(tiny: LoadedModel, tiny_path: Path) -> None:
    info, module = describe(tiny_path), tiny.module
    config: Any = module.config
    assert tiny.info == info
    assert tiny.kv_format(32) == info.kv_format(32)
    assert info.num_layers == config.num_hidden_layers == len(list(module.model.layers))  # type: ignore
    assert info.num_heads == config.num_attention_heads
    assert info.num_kv_heads == config.num_key_value_heads
    assert info.head_dim == config.head_dim
    assert info.vocab_size == config.vocab_size
    assert info.max_model_len == config.max_position_embeddings
    assert json.loads(info.identity.rope) == rope_parameters(config.to_dict())
    generation: Any = module.generation_config
    assert set(info.eos_ids) == {*generation.eos_token_id, config.eos_token_id}
    assert info.defaults.temperature == generation.temperature


def test_it_imports_neither_torch_nor_transformers(tiny_path: Path) -> None:
    script = (
        "import sys, pathlib; from splitserve.model.info import describe; "
        "import splitserve.model.simulated, splitserve.model.sampling, splitserve.model.tiny; "
        f"describe(pathlib.Path({str(tiny_path)!r})); "
        "sys.exit(any(m in sys.modules for m in ('torch', 'transformers', 'numba')))"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


def test_identity_follows_weights_tokenizer_and_rope(directory: Path, tmp_path: Path) -> None:
    before = describe(directory).identity
    again = make_tiny(tmp_path / "again")
    assert describe(again).identity == before
    assert describe(make_tiny(tmp_path / "other", seed=1)).identity.weights != before.weights
    weights = load_file(directory / "model.safetensors")
    weights["model.layers.1.self_attn.v_proj.weight"] += 0.001
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    tokenizer = directory / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text() + "\n")
    edit(directory / "config.json", rope_parameters={"rope_type": "default", "rope_theta": 5.0})
    after = describe(directory).identity
    assert after.weights != before.weights  # a fine-tune has equal headers and sizes
    assert after.tokenizer != before.tokenizer
    assert after.rope != before.rope


def test_old_and_new_rope_settings_are_one() -> None:
    new = {"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "rope_theta": 1e4}}
    old = {"rope_scaling": {"type": "yarn", "factor": 2.0}, "rope_theta": 1e4}
    assert rope_parameters(new) == rope_parameters(old)
    assert rope_parameters({"rope_theta": 1e4}) == {"rope_type": "default", "rope_theta": 1e4}


def test_eos_ids_of_both_files(directory: Path) -> None:
    edit(directory / "generation_config.json", eos_token_id=7)
    edit(directory / "config.json", eos_token_id=[9, 3])
    assert describe(directory).eos_ids == (3, 7, 9)
    (directory / "generation_config.json").unlink()
    info = describe(directory)
    assert (info.eos_ids, info.defaults) == ((3, 9), GenerationDefaults())


def test_do_sample_false_is_greedy(directory: Path) -> None:
    edit(directory / "generation_config.json", do_sample=False, temperature=None)
    assert describe(directory).defaults.temperature == 0


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_missing_file_is_named(directory: Path, name: str) -> None:
    (directory / name).unlink()
    with pytest.raises(ModelUnavailable, match=name.removeprefix("model.")):
        describe(directory)


def test_broken_files(directory: Path) -> None:
    weights = directory / "model.safetensors"
    whole = weights.read_bytes()
    for content in (b"", whole[:4], b"\xff" * 8 + whole[8:]):
        weights.write_bytes(content)
        with pytest.raises(ModelUnavailable, match="not a whole safetensors file"):
            describe(directory)
    weights.write_bytes(whole[:-1000])
    with pytest.raises(ModelUnavailable):
        load(directory)
    (directory / "config.json").write_text("[")
    with pytest.raises(ModelUnavailable, match="can't be read"):
        describe(directory)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"is_encoder_decoder": True}, "encoder-decoder"),
        ({"model_type": "mistral", "sliding_window": 4096}, "sliding window of 4096"),
        ({"attn_logit_softcapping": 50.0}, "softcapping"),
        ({"model_type": "gpt_oss"}, "sinks"),
        ({"kv_lora_rank": 512}, "latent attention"),
        ({"v_head_dim": 32}, "V heads of width 32"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "layers of type linear_att"),
        ({"layer_types": ["full_attention", "chunked_attention"]}, "chunked_attention"),
        ({"mamba_d_state": 16}, "recurrent"),
        ({"text_config": {}}, "more than one modality"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "rotary type dynamic"),
        ({"head_dim": 12}, "width 12"),
        ({"hidden_size": None}, "lacks hidden_size"),
    ],
)
def test_what_can_not_be_carried_is_refused(
    directory: Path, changes: dict[str, Any], reason: str
) -> None:
    edit(directory / "config.json", **changes)
    for read in (describe, load):
        with pytest.raises(UnsupportedModel, match=reason):
            read(directory)


def test_an_inactive_window_is_no_reason() -> None:
    limits = {"max_position_embeddings": 4096}
    assert active_window({**limits, "sliding_window": 4096}) is None
    assert active_window({**limits, "sliding_window": 64, "use_sliding_window": False}) is None
    assert (
        active_window({**limits, "sliding_window": 64, "layer_types": ["full_attention"]}) is None
    )
    assert active_window({**limits, "sliding_window": 64}) == 64


def test_other_dtypes_are_refused(tiny_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match="bfloat16"):
        load(tiny_path, dtype="bfloat16")


def test_the_tiny_tokenizer_round_trips(tiny_path: Path) -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(tiny_path / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == 512
    text = "<|im_start|>user\nHello, wörld — 你好<|im_end|>\n"
    encoded = tokenizer.encode(text)
    assert encoded.ids[0] == 1
    assert tokenizer.decode(encoded.ids, skip_special_tokens=False) == text
    assert len(encoded.ids) < len(text.encode())
