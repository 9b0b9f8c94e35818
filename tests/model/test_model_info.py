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
from splitserve.model.support import layer_names, require_supported, rope_parameters
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
        "import splitserve.model.simulated, splitserve.model.tiny; "
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
        ({"layer_types": ["full_attention", "linear_attention"]}, "layer 1 of type linear_att"),
        ({"layer_types": ["full_attention", "chunked_attention"]}, "chunked_attention"),
        ({"layers_block_type": ["mamba", "attention"]}, "layer 0 of type mamba"),
        ({"mamba_d_state": 16}, "recurrent"),
        ({"num_kv_shared_layers": 1}, "layer 1 share the KV of earlier ones"),
        ({"per_layer_config": {"1": {"head_dim": 32}}}, "layer 1 with KV of another shape"),
        ({"global_head_dim": 32}, "full-attention layers with KV of another shape"),
        ({"model_type": "bloom"}, "ALiBi"),
        ({"alibi": True}, "ALiBi"),
        ({"add_cross_attention": True}, "cross-attention"),
        ({"quantization_config": {"bits": 4}}, "stay quantized"),
        ({"text_config": {}}, "more than one modality"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "rotary type dynamic"),
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


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"num_attention_heads": 0}, "num_attention_heads = 0; it must be an integer of at least"),
        ({"num_hidden_layers": "two"}, 'num_hidden_layers = "two"'),
        ({"num_hidden_layers": 2.5}, "num_hidden_layers = 2.5"),
        ({"vocab_size": True}, "vocab_size = true"),
        ({"num_key_value_heads": -1}, "num_key_value_heads = -1"),
        ({"head_dim": [16]}, "head_dim = "),
        ({"layer_types": 7}, "a value of the wrong kind"),
        ({"rope_scaling": "long", "rope_parameters": None}, "a value of the wrong kind"),
        ({"num_kv_shared_layers": "many"}, "a value of the wrong kind"),
        ({"per_layer_config": [1]}, "a value of the wrong kind"),
        ({"eos_token_id": ["end"]}, "a value of the wrong kind"),
    ],
)
def test_values_of_the_wrong_kind_are_told_in_one_line(
    directory: Path, changes: dict[str, Any], reason: str
) -> None:
    edit(directory / "config.json", **changes)
    for read in (describe, load):
        with pytest.raises(ModelUnavailable, match=reason) as error:
            read(directory)
        assert "\n" not in error.value.message


def test_what_is_refused_is_refused_inside_a_text_config() -> None:
    config = {"model_type": "gemma3n", "text_config": {"num_kv_shared_layers": 4, "n_layer": 6}}
    with pytest.raises(UnsupportedModel, match="more than one modality; layers 2-5 share the KV"):
        require_supported(config)


def test_layers_are_named_in_runs() -> None:
    assert layer_names([3]) == "layer 3"
    assert layer_names([0, 1, 2]) == "layers 0-2"
    assert layer_names(iter([5, 0, 1, 2, 7])) == "layers 0-2, 5, 7"


def test_settings_are_known_under_other_names(directory: Path) -> None:
    before = describe(directory)
    gpt2 = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 8192, "head_dim": None}
    others = {"hidden_size": None, "num_hidden_layers": None, "num_attention_heads": None}
    edit(directory / "config.json", **gpt2, **others, max_position_embeddings=None)
    assert describe(directory) == before
    edit(directory / "config.json", multi_query=True)
    assert describe(directory).num_kv_heads == 1
    edit(directory / "config.json", new_decoder_architecture=True, num_kv_heads=4)
    assert describe(directory).num_kv_heads == 2  # the usual name comes first


@pytest.mark.parametrize(
    ("changes", "widths"),
    [
        ({"head_dim": 12}, (12, 16)),
        ({"head_dim": 16, "v_head_dim": 40}, (16, 40)),
        ({"kv_lora_rank": 8, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8}, (20, 24)),
    ],
)
def test_a_slot_holds_the_wider_of_k_and_v(
    directory: Path, changes: dict[str, Any], widths: tuple[int, int]
) -> None:
    edit(directory / "config.json", **changes)
    info = describe(directory)
    assert (info.head_dim, info.kv_width) == widths
    assert info.kv_format(16).head_dim == widths[1]


def test_rotations_per_kind_of_layer_are_kept_and_judged() -> None:
    kinds = {
        "full_attention": {"rope_type": "default", "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "dynamic", "rope_theta": 1e4},
    }
    assert rope_parameters({"rope_parameters": kinds})["full_attention"]["rope_theta"] == 1e6
    assert rope_parameters({"rope_local_base_freq": 1e4})["rope_local_base_freq"] == 1e4
    with pytest.raises(UnsupportedModel, match="rotary type dynamic"):
        require_supported({"model_type": "x", "rope_parameters": kinds})


def test_the_tiny_tokenizer_round_trips(tiny_path: Path) -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(tiny_path / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == 512
    text = "<|im_start|>user\nHello, wörld — 你好<|im_end|>\n"
    encoded = tokenizer.encode(text)
    assert encoded.ids[0] == 1
    assert tokenizer.decode(encoded.ids, skip_special_tokens=False) == text
    assert len(encoded.ids) < len(text.encode())
