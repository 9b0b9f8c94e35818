"""What a model directory says about itself, without torch or transformers.

The control plane knows a model only through this: identity, KV format, limits, stop ids and
defaults, from the JSON files and the headers of the safetensors files.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from splitserve.errors import ModelUnavailable
from splitserve.kv.format import KVFormat, ModelIdentity
from splitserve.model.support import (
    head_dim,
    kv_width,
    num_kv_heads,
    require_supported,
    rope_parameters,
    setting,
)

_HEADER_LIMIT_BYTES = 100_000_000  # the safetensors format's own limit
_PAGE_BYTES = 4096


class GenerationDefaults(msgspec.Struct, frozen=True):
    """What generation_config.json says of sampling: used where a request is silent.

    A field is None where the file is silent; do_sample false there means temperature 0.
    """

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    max_new_tokens: int | None = None
    repetition_penalty: float | None = None


class ModelInfo(msgspec.Struct, frozen=True):
    """Facts of one model directory."""

    path: str
    model_type: str
    identity: ModelIdentity
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    kv_width: int  # of a K or V head in the pool, at least head_dim
    hidden_size: int
    max_model_len: int  # tokens, prompt and output together
    vocab_size: int  # width of the logits
    eos_ids: tuple[int, ...]  # ascending; any of them ends an answer
    weights_bytes: int
    defaults: GenerationDefaults

    def kv_format(self, block_size: int, dtype: str = "float32") -> KVFormat:
        """The format of a pool with blocks of `block_size` tokens."""
        return KVFormat(
            dtype=dtype,
            block_size=block_size,
            num_layers=self.num_layers,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.kv_width,
        )


def describe(path: Path) -> ModelInfo:
    """Read a model directory.

    Raises ModelUnavailable if something is missing or broken, UnsupportedModel if the engine can't
    carry it.
    """
    config = _read_json(path / "config.json")
    generation = _read_json(path / "generation_config.json", optional=True)
    try:
        require_supported(config)
        return _described(path, config, generation)
    except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
        raise ModelUnavailable(
            f"{path / 'config.json'} or generation_config.json holds a value of the wrong kind: "
            f"{error}."
        ) from error


def _described(path: Path, config: dict[str, Any], generation: dict[str, Any]) -> ModelInfo:
    digest, weights_bytes = _weights(path)
    architectures = config.get("architectures") or [config.get("model_type", "")]
    return ModelInfo(
        path=str(path),
        model_type=str(config.get("model_type", "")),
        identity=ModelIdentity(
            architecture=str(architectures[0]),
            weights=digest,
            tokenizer=_digest_of(path / "tokenizer.json"),
            rope=json.dumps(rope_parameters(config), sort_keys=True),
        ),
        num_layers=int(setting(config, "num_hidden_layers")),
        num_heads=int(setting(config, "num_attention_heads")),
        num_kv_heads=num_kv_heads(config),
        head_dim=head_dim(config),
        kv_width=kv_width(config),
        hidden_size=int(setting(config, "hidden_size")),
        max_model_len=int(setting(config, "max_position_embeddings")),
        vocab_size=int(config["vocab_size"]),
        eos_ids=_eos_ids(generation, config),
        weights_bytes=weights_bytes,
        defaults=_defaults(generation),
    )


def _read_json(path: Path, *, optional: bool = False) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        if optional:
            return {}
        raise ModelUnavailable(f"{path.parent} holds no {path.name}.") from None
    except (OSError, ValueError) as error:
        raise ModelUnavailable(f"{path} can't be read: {error}.") from error
    if not isinstance(content, dict):
        raise ModelUnavailable(f"{path} is not a JSON object.")
    return content


def _digest_of(path: Path) -> str:
    try:
        return hashlib.blake2b(path.read_bytes(), digest_size=16).hexdigest()
    except OSError as error:
        raise ModelUnavailable(f"{path} can't be read: {error}.") from error


def _weights(path: Path) -> tuple[str, int]:
    """A digest of the weight files' names, headers, sizes and samples; their size in bytes.

    Fine-tunes of one model have equal headers and sizes: a page of each tensor tells them apart. A
    change of a few single weights may escape it.
    """
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise ModelUnavailable(f"{path} holds no safetensors files.")
    digest = hashlib.blake2b(digest_size=16)
    total = 0
    for file in files:
        size = file.stat().st_size
        header = _header(file, size)
        digest.update(struct.pack("<QQ", len(header), size))
        digest.update(file.name.encode() + b"\0" + header)
        for page in _sample(file, header):
            digest.update(page)
        total += size
    return digest.hexdigest(), total


def _header(file: Path, size: int) -> bytes:
    """The JSON header of a safetensors file: 8 bytes of little-endian length come before it."""
    with file.open("rb") as stream:
        prefix = stream.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else size
        if length > min(size - 8, _HEADER_LIMIT_BYTES):
            raise ModelUnavailable(f"{file} is not a whole safetensors file.")
        return stream.read(length)


def _sample(file: Path, header: bytes) -> Iterator[bytes]:
    """The page in the middle of each tensor, in the order in which they lie in the file."""
    try:
        entries = json.loads(header)
        entries.pop("__metadata__", None)
        spans = sorted(tuple(entry["data_offsets"]) for entry in entries.values())
        middles = [(begin + end) // 2 for begin, end in spans]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelUnavailable(f"{file} has a header that can't be read: {error}.") from error
    with file.open("rb") as stream:
        for middle in middles:
            stream.seek(8 + len(header) + middle)
            yield stream.read(_PAGE_BYTES)


def _eos_ids(*configs: dict[str, Any]) -> tuple[int, ...]:
    ids: set[int] = set()
    for config in configs:
        written = config.get("eos_token_id")
        if isinstance(written, int):
            ids.add(written)
        elif isinstance(written, list):
            ids.update(int(one) for one in written)
    return tuple(sorted(ids))


def _defaults(generation: dict[str, Any]) -> GenerationDefaults:
    names = GenerationDefaults.__struct_fields__
    found = {name: generation[name] for name in names if generation.get(name) is not None}
    if generation.get("do_sample") is False:
        found["temperature"] = 0.0
    try:
        return msgspec.convert(found, GenerationDefaults)
    except msgspec.ValidationError as error:
        raise ModelUnavailable(f"generation_config.json: {error}.") from error
