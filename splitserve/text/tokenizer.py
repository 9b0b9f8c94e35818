"""Text to token ids and back, with the model's own tokenizer.json.

Only the `tokenizers` library: `transformers.AutoTokenizer` would import torch.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders

from splitserve.errors import ModelUnavailable

_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token")
_MAX_ID = 2**32 - 1


class Tokenizer:
    """The tokenizer of one model directory; immutable once loaded, shared by all streams."""

    def __init__(
        self, raw: tokenizers.Tokenizer, *, digest: str, special: Mapping[str, str] | None = None
    ) -> None:
        raw.no_truncation()
        raw.no_padding()
        self.raw = raw
        self.digest = digest
        self.special = dict(special or {})
        self.vocab_size: int = raw.get_vocab_size(with_added_tokens=True)
        self._longest_token = max(map(len, raw.get_vocab(with_added_tokens=True)), default=1)
        # then every character of the text is in some token, which spells it with one or more
        self._keeps_all = raw.normalizer is None and isinstance(raw.decoder, decoders.ByteLevel)

    @classmethod
    def load(cls, model_dir: str | Path) -> Tokenizer:
        """Read tokenizer.json and the names of the special tokens.

        Raises ModelUnavailable if there is no readable tokenizer.json.
        """
        path = Path(model_dir) / "tokenizer.json"
        try:
            data = path.read_bytes()
            raw = tokenizers.Tokenizer.from_str(data.decode("utf-8"))
        except FileNotFoundError:
            raise ModelUnavailable(
                f"{model_dir} has no tokenizer.json.",
                advice="Save one with transformers: AutoTokenizer.from_pretrained(…)"
                ".save_pretrained(…).",
            ) from None
        except Exception as error:  # `tokenizers` raises plain Exception
            raise ModelUnavailable(f"{path} can't be read: {error}") from error
        digest = hashlib.sha256(data).hexdigest()
        return cls(raw, digest=digest, special=special_tokens(Path(model_dir)))

    @property
    def bos_token(self) -> str | None:
        return self.special.get("bos_token")

    @property
    def eos_token(self) -> str | None:
        return self.special.get("eos_token")

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`.

        add_special_tokens: True for a completion's prompt (whatever this tokenizer adds by
        default); False for a rendered chat, whose template wrote them already.
        """
        ids: list[int] = self.raw.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def min_tokens(self, text: str) -> int:
        """How many tokens `text` has at least, without tokenizing it: megabytes take seconds."""
        return -(-len(text) // self._longest_token) if self._keeps_all else 0

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Text of `ids`; ids that no token has are left out."""
        known = [i for i in ids if 0 <= i <= _MAX_ID]
        text: str = self.raw.decode(known, skip_special_tokens=skip_special_tokens)
        return text

    def token(self, token_id: int) -> str | None:
        """The token with this id as the vocabulary spells it, or None."""
        if not 0 <= token_id <= _MAX_ID:
            return None
        token: str | None = self.raw.id_to_token(token_id)
        return token

    def token_id(self, token: str) -> int | None:
        token_id: int | None = self.raw.token_to_id(token)
        return token_id

    def special_ids(self) -> frozenset[int]:
        """Ids that decoding leaves out."""
        added = self.raw.get_added_tokens_decoder()
        return frozenset(i for i, token in added.items() if token.special)


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`; empty if the file does not exist. Raises ModelUnavailable."""
    try:
        value = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ModelUnavailable(f"{path} can't be read: {error}") from error
    if not isinstance(value, dict):
        raise ModelUnavailable(f"{path} does not hold a JSON object.")
    return value


def special_tokens(model_dir: Path) -> dict[str, str]:
    """tokenizer_config.json's special tokens, else those of special_tokens_map.json."""
    found: dict[str, str] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        config = read_json(model_dir / name)
        for key in _SPECIAL_NAMES:
            value = config.get(key)
            if isinstance(value, dict):
                value = value.get("content")
            if isinstance(value, str):
                found[key] = value
    return found
