"""Each architecture that is converted: the logits of the model that the GGUF file was made from,
and the tokens of the tokenizer that it names."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
from gguf import RopeScalingType
from tokenizers import Regex, models, normalizers, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

from splitserve.errors import ModelUnavailable
from splitserve.model import from_gguf
from splitserve.model.gguf_families import FAMILIES
from splitserve.model.gguf_tokenizer import _PRE_TOKENIZERS
from splitserve.model.loader import load
from splitserve.text.tokenizer import Tokenizer
from tests.model.families import COMMON
from tests.support import gguf_files

IDS = torch.tensor([[int(one) for one in np.random.default_rng(0).integers(6, 300, 40)]])
NUM_TOKENS = {"llama": 360, "gemma": 360}
_SLIDING = {"sliding_window": 12, "num_hidden_layers": 7}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
_SCALED = {
    "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}

CONVERTED: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama, Q and K with biases": ("llama", {"attention_bias": True}),
    "llama, Llama 3's rotation": ("llama", {"rope_parameters": _LLAMA3, "head_dim": 64}),
    "llama, from Mistral": ("mistral", {"sliding_window": None}),
    "qwen2": ("qwen2", {"head_dim": None}),
    "qwen2, tied, with YaRN": ("qwen2", {"tie_word_embeddings": True, "rope_parameters": _YARN}),
    "qwen3": ("qwen3", {"head_dim": 24}),
    "gemma": ("gemma", {"head_dim": 24}),
    "gemma2": ("gemma2", {**_SLIDING, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 2.0}),
    "gemma2, 27B": ("gemma2", {**_SLIDING, "num_hidden_layers": 46, "query_pre_attn_scalar": 8}),
    "gemma3": ("gemma3_text", {**_SLIDING, "query_pre_attn_scalar": 16}),
    "gemma3, scaled": (
        "gemma3_text",
        {**_SLIDING, "query_pre_attn_scalar": 16, "rope_parameters": _SCALED},
    ),
    "phi3": ("phi3", {"sliding_window": 12, "head_dim": None}),
    "phi3, part rotated": (
        "phi3",
        {
            "head_dim": None,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e4,
                "partial_rotary_factor": 0.75,
            },
        },
    ),
}


def silent(line: str) -> None:
    pass


def random_module(kind: str, **changes: Any) -> Any:
    """Small, with norms and biases that are not trivial."""
    torch.manual_seed(0)
    settings = {**COMMON, "vocab_size": 360, **changes}
    if kind.startswith("gemma"):
        settings["tie_word_embeddings"] = True
    if settings["head_dim"] is None:
        del settings["head_dim"]
    if kind == "gemma2" and settings["num_hidden_layers"] == 46:
        settings |= {"num_attention_heads": 8, "num_key_value_heads": 2}
    config = AutoConfig.for_model(kind, **settings)
    module = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    for weights in module.parameters():
        weights.data.normal_(0, 0.2)
    return module


def add_tokenizer_for(kind: str) -> Any:
    return lambda writer: gguf_files.add_sentencepiece(
        writer, "gemma" if kind.startswith("gemma") else "llama"
    )


@torch.inference_mode()
def logits(module: Any) -> Any:
    return module(IDS).logits.numpy()


@pytest.mark.parametrize("name", CONVERTED)
def test_the_logits_are_the_original_models(tmp_path: Path, name: str) -> None:
    kind, changes = CONVERTED[name]
    module = random_module(kind, **changes)
    gguf_files.write_gguf(tmp_path / "m.gguf", module, add_tokenizer_for(kind))
    out = tmp_path / "out"
    out.mkdir()
    from_gguf.convert(tmp_path / "m.gguf", out, silent)
    converted = AutoModelForCausalLM.from_pretrained(
        out, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    expected, got = logits(module), logits(converted)
    # exactly, but for norms that had 1 added and the factor of a rotation
    tolerance = 1e-4 if kind.startswith("gemma") else 1e-6
    assert np.abs(expected).max() > 0.1
    np.testing.assert_allclose(got, expected, atol=tolerance * float(np.abs(expected).max()))


def test_all_architectures_are_tested() -> None:
    assert {name.split(",")[0] for name in CONVERTED} == set(FAMILIES)


def test_a_converted_model_can_be_loaded(tmp_path: Path) -> None:
    module = random_module("gemma3_text", **CONVERTED["gemma3, scaled"][1])
    gguf_files.write_gguf(tmp_path / "m.gguf", module, add_tokenizer_for("gemma3"))
    from_gguf.convert(tmp_path / "m.gguf", tmp_path, silent)
    windows = [layer.window for layer in load(tmp_path).layers]
    assert windows == [12, 12, 12, 12, 12, None, 12]


# what sentencepiece itself makes of these texts, with the models that PIECES are from
SENTENCEPIECE = {
    "llama": {
        "hello world": [305, 316],
        "the  quick fox": [302, 319, 319, 351, 335, 329, 271, 280, 340],
        " 345 dogs": [319, 319, 342, 343, 344, 319, 328, 321, 341, 322],
        "café ☃ x": [279, 331, 353, 319, 229, 155, 134, 319, 340],
        "serves\n\tnumbers 12!": [308, 13, 12, 325, 292, 272, 319, 355, 356, 358],
        "prefill decode models": [317, 319, 262, 327, 268, 288, 322],
    },
    "gemma": {
        "hello world": [300, 319, 309],
        "the  quick fox": [330, 266, 319, 319, 317, 318, 282, 340],
        " 345 dogs": [319, 342, 343, 344, 319, 328, 321, 341, 322],
        "café ☃ x": [280, 331, 353, 319, 232, 158, 137, 319, 340],
        "serves\n\tnumbers 12!": [322, 302, 16, 15, 325, 295, 319, 355, 356, 358],
        "prefill decode models": [311, 319, 265, 327, 270, 319, 289, 322],
    },
}


@pytest.mark.parametrize("architecture", ["llama", "gemma2", "phi3"])
def test_sentencepiece_vocabularies(tmp_path: Path, architecture: str) -> None:
    kind = "gemma" if architecture.startswith("gemma") else "llama"
    tokenizer = converted_tokenizer(
        tmp_path, architecture, lambda writer: gguf_files.add_sentencepiece(writer, kind)
    )
    bos = gguf_files.SPECIAL[kind].index("<s>")
    for text, ids in SENTENCEPIECE[kind].items():
        assert tokenizer.encode(text) == [bos, *ids]
        assert tokenizer.decode(ids) == text
    if kind == "gemma":
        assert tokenizer.encode("<start_of_turn>hello", add_special_tokens=False) == [4, 300]
        generation = json.loads((tmp_path / "generation_config.json").read_text())
        assert generation["eos_token_id"] == [1, 5]


def test_phi3s_chat_tokens_swallow_the_space_after_them(tmp_path: Path) -> None:
    special = ["<unk>", "<s>", "</s>", "<|user|>"]
    tokenizer = converted_tokenizer(
        tmp_path, "phi3", lambda writer: gguf_files.add_sentencepiece(writer, "llama", special)
    )
    ids = tokenizer.encode("<s><|user|>\nhello", add_special_tokens=False)
    assert ids == [1, 3, 306]


def converted_tokenizer(tmp_path: Path, architecture: str, add_tokenizer: Any) -> Tokenizer:
    changes = {"vocab_size": 500, "num_hidden_layers": 1}
    changes |= {"sliding_window": 12} if architecture == "gemma2" else {}
    changes |= {"head_dim": None} if architecture == "phi3" else {}
    module = random_module(architecture, **changes)
    gguf_files.write_gguf(tmp_path / "m.gguf", module, add_tokenizer)
    from_gguf.convert(tmp_path / "m.gguf", tmp_path, silent)
    return Tokenizer.load(tmp_path)


TEXT = (
    "The user's model SERVES 12345 tokens; don't  stop.\n\n  It'S naïve — cafe\u0301 été ИЗ 日本語 "
    "x=3.14/y  \n\tcamelCaseWord  "
)


def trained(pre: str) -> tokenizers.Tokenizer:
    """A tokenizer of the shape that `pre` stands for, with transformers' split, trained on TEXT."""
    raw = tokenizers.Tokenizer(models.BPE(ignore_merges=pre in ("llama-bpe", "tekken")))
    steps: list[Any] = [pre_tokenizers.ByteLevel(add_prefix_space=False)]
    if pre == "smollm":
        steps.insert(0, pre_tokenizers.Digits(individual_digits=True))
    elif pre != "gpt-2":
        split = pre_tokenizers.Split(Regex(GGUF_PRE_TOKENIZER_SPLITS[pre]), "isolated")
        steps = [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    raw.pre_tokenizer = pre_tokenizers.Sequence(steps)
    if pre == "qwen2":
        raw.normalizer = normalizers.NFC()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    raw.train_from_iterator([TEXT] * 2, trainer)
    return raw


@pytest.mark.parametrize("pre", _PRE_TOKENIZERS)
def test_byte_level_tokenizers(tmp_path: Path, pre: str) -> None:
    raw = trained(pre)
    content = json.loads(raw.to_str())["model"]
    vocab = sorted(content["vocab"], key=content["vocab"].__getitem__)
    merges = [" ".join(merge) for merge in content["merges"]]
    tokenizer = converted_tokenizer(
        tmp_path,
        "qwen2",
        lambda writer: gguf_files.add_byte_level(writer, pre, vocab, merges, unused=3),
    )
    shift = len(gguf_files.BYTE_LEVEL_TOKENS)
    bos = [1] if pre in ("llama-bpe", "tekken") else []
    for text in (TEXT, TEXT[::-1], "SERVES12 é"):
        assert tokenizer.encode(text) == bos + [i + shift for i in raw.encode(text).ids]
    assert tokenizer.decode(tokenizer.encode(TEXT)) == (
        raw.normalizer.normalize_str(TEXT) if raw.normalizer else TEXT
    )
    assert tokenizer.encode("<|im_start|><think>", add_special_tokens=False) == [1, 3]
    assert tokenizer.special_ids() == {0, 1, 2}
    assert tokenizer.token_id(f"[PAD{len(vocab) + shift}]") is None
    assert json.loads((tmp_path / "generation_config.json").read_text())["eos_token_id"] == [2, 0]


def refused(path: Path, match: str) -> ModelUnavailable:
    with pytest.raises(ModelUnavailable, match=re.escape(match)) as caught:
        from_gguf.convert(path, path.parent, silent)
    return caught.value


@pytest.mark.parametrize(
    ("add", "match"),
    [
        (
            lambda w: w.add_attention_scale(0.3),
            "settings of no known meaning here: llama.attention",
        ),
        (lambda w: w.add_causal_attention(False), "llama.attention.causal = False"),
        (lambda w: w.add_uint16("split.count", 3), "one of 3 parts"),
        (lambda w: w.add_rope_scaling_type(RopeScalingType.LONGROPE), "its rotation by longrope"),
        (lambda w: w.add_tensor("blk.0.odd.weight", np.ones(4, "f4")), "use: blk.0.odd.weight"),
        (lambda w: w.add_tensor("rope_freqs.weight", np.arange(8, dtype="f4") + 1), "rope_freqs"),
    ],
)
def test_what_may_change_the_answers_is_refused(tmp_path: Path, add: Any, match: str) -> None:
    def add_all(writer: Any) -> None:
        gguf_files.add_sentencepiece(writer, "llama")
        add(writer)

    module = random_module("llama", num_hidden_layers=1)
    gguf_files.write_gguf(tmp_path / "m.gguf", module, add_all)
    refused(tmp_path / "m.gguf", match)


def test_architectures_and_tokenizers_are_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    writer = gguf_files.gguf.GGUFWriter(path, "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    error = refused(path, "architecture mamba; only llama, qwen2")
    assert "safetensors" in error.advice
    module = random_module("qwen2", num_hidden_layers=1)
    gguf_files.write_gguf(path, module, lambda w: gguf_files.add_byte_level(w, "falcon", [], []))
    assert "safetensors" in refused(path, "(gpt2, falcon) can't be converted").advice


def test_layers_that_are_missing_or_cut_off(tmp_path: Path) -> None:
    module = random_module("llama", num_hidden_layers=1)
    module.config.num_hidden_layers = 2
    path = tmp_path / "m.gguf"
    gguf_files.write_gguf(path, module, add_tokenizer_for("llama"))
    refused(path, "lacks 9 tensors, among them blk.1.attn_k.weight")
    whole = path.read_bytes()
    for kept in (4, 100, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:kept])
        refused(path, "is not a whole GGUF file")
