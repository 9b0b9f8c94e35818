"""A GGUF file to a Hugging Face model directory, in float32.

Format: ggml's docs/gguf.md. Names and changes to the weights are those of llama.cpp's
convert_hf_to_gguf.py, undone; what they are for each architecture is in gguf_families, the
tokenizer in gguf_tokenizer. transformers can load such files as well, but in 4 times the time, and
it ignores what it does not know: scaled rotations, widths of heads, Gemma's scale, whole tensors.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from splitserve.errors import ModelUnavailable
from splitserve.model.gguf_families import GLOBAL_NAMES, Family, Settings, family_of, hf_config
from splitserve.model.gguf_tokenizer import read_vocabulary, write_tokenizer

MAGIC = b"GGUF"
_ROPE_FREQS = "rope_freqs.weight"


def convert(gguf_file: Path, out_dir: Path, progress: Callable[[str], None]) -> None:
    """Write config, generation config, tokenizer, chat template and weights into out_dir.

    Raises ModelUnavailable for what this can't read: another architecture, tokenizer, setting,
    tensor or kind of quantization, a part of a split file, a file that was cut off.
    """
    reader = _open(gguf_file)
    meta = {
        name: field.contents()
        for name, field in reader.fields.items()
        if not name.startswith("GGUF.")
    }
    if meta.get("split.count", 1) > 1:
        raise ModelUnavailable(
            f"{gguf_file.name} is one of {meta['split.count']} parts.",
            advice="Join them with llama.cpp's llama-gguf-split --merge.",
        )
    architecture = str(meta.get("general.architecture"))
    family = family_of(architecture, gguf_file.name)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    freqs = tensors.pop(_ROPE_FREQS, None)
    settings = Settings(architecture, meta, None if freqs is None else _values(freqs))
    config = hf_config(family, settings)
    vocabulary = read_vocabulary(meta)
    _check_names(tensors, family, config["num_hidden_layers"])
    config |= {
        "attention_bias": _has_biases(tensors),
        "tie_word_embeddings": "output.weight" not in tensors,
        "vocab_size": int(tensors["token_embd.weight"].shape[1]),  # ggml's order of dimensions
        **vocabulary.token_settings(),
    }
    _write_json(out_dir / "config.json", config)
    ends = vocabulary.end_ids()
    generation = {
        **vocabulary.token_settings(),
        **({"eos_token_id": ends if len(ends) > 1 else ends[0]} if ends else {}),
    }
    _write_json(out_dir / "generation_config.json", generation)
    write_tokenizer(vocabulary, config["max_position_embeddings"], out_dir)
    _write_weights(list(tensors.values()), family, config, out_dir, progress)


def _open(gguf_file: Path) -> Any:
    import gguf

    try:
        return gguf.GGUFReader(gguf_file)
    except (ValueError, IndexError, KeyError, OSError, UnicodeDecodeError) as error:
        raise ModelUnavailable(
            f"{gguf_file} is not a whole GGUF file: {str(error).rstrip('.')}.",
            advice="Fetch it again.",
        ) from error


def _check_names(tensors: dict[str, Any], family: Family, num_layers: int) -> None:
    """Every tensor has a use, and none that a layer needs is missing."""
    kinds = [f"{name}.weight" for name in family.layer_names]
    if family.always_biased or _has_biases(tensors):
        kinds += [f"{name}.bias" for name in family.biases]
    needed = {f"blk.{n}.{kind}" for n in range(num_layers) for kind in kinds}
    needed |= {"token_embd.weight", "output_norm.weight"}
    for name in sorted(tensors.keys() - needed - {"output.weight"}):
        raise ModelUnavailable(f"The GGUF file holds a tensor of no known use: {name}.")
    if missing := sorted(needed - tensors.keys()):
        raise ModelUnavailable(
            f"The GGUF file lacks {len(missing)} tensors, among them {missing[0]}."
        )


def _has_biases(tensors: Iterable[str]) -> bool:
    return any(name.endswith(".bias") for name in tensors)


def _write_weights(
    tensors: list[Any],
    family: Family,
    config: dict[str, Any],
    out_dir: Path,
    progress: Callable[[str], None],
) -> None:
    from safetensors.numpy import save_file

    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    weights: dict[str, NDArray[np.float32]] = {}
    shown = 0
    for n, tensor in enumerate(tensors):
        values, kind = _values(tensor), tensor.name.split(".")[-2]
        if family.permuted and kind in heads:
            values = unpermute(values, heads[kind])
        if kind.endswith("norm"):
            values = values - np.float32(family.norm_offset)
        weights[hf_name(tensor.name, family)] = np.ascontiguousarray(values)
        if (percent := 100 * (n + 1) // len(tensors)) >= shown + 25:
            shown = percent
            progress(f"Converting: {percent} %")
    save_file(weights, out_dir / "model.safetensors", metadata={"format": "pt"})
    (out_dir / "model.safetensors").chmod(0o644)  # save_file makes it private


def _values(tensor: Any) -> NDArray[np.float32]:
    import gguf

    try:
        values = gguf.dequantize(tensor.data, tensor.tensor_type)
    except NotImplementedError as error:
        raise ModelUnavailable(
            f"{tensor.name} is quantized as {tensor.tensor_type.name}, which can't be read."
        ) from error
    float32: NDArray[np.float32] = values.astype(np.float32, copy=False)
    return float32


def hf_name(name: str, family: Family) -> str:
    """The transformers name of llama.cpp's tensor `name`, which has a use."""
    parts = name.split(".")
    if parts[0] == "blk":
        return f"model.layers.{parts[1]}.{family.layer_names[parts[2]]}.{parts[3]}"
    return f"{GLOBAL_NAMES[parts[0]]}.{parts[1]}"


def unpermute(weight: NDArray[np.float32], num_heads: int) -> NDArray[np.float32]:
    """Rows of Q or K from llama.cpp's order (pairs of rotary dimensions adjacent) to that of
    transformers (first halves, then second halves, per head). Shape [rows, ...] stays."""
    half = weight.shape[0] // num_heads // 2
    pairs = weight.reshape(num_heads, half, 2, *weight.shape[1:])
    return pairs.swapaxes(1, 2).reshape(weight.shape)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", "utf-8")
