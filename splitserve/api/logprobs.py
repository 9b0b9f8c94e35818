"""Log-probabilities in the two shapes that OpenAI's endpoints have for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from splitserve.api.schemas import Kind
from splitserve.sampling import Logprobs
from splitserve.text.tokenizer import Tokenizer

_LOWEST = -9999.0  # JSON has no minus infinity; OpenAI's and vLLM's stand-in


class LogprobWriter:
    """The `logprobs` objects of one choice, for as many tokens at a time as there are."""

    def __init__(self, kind: Kind, tokenizer: Tokenizer, bytes_of: Callable[[int], bytes]) -> None:
        self._kind = kind
        self._tokenizer = tokenizer
        self._bytes_of = bytes_of
        self._offset = 0  # characters of the tokens told so far

    def take(self, token_ids: Sequence[int], told: Sequence[Logprobs]) -> dict[str, Any]:
        """The object for the next tokens."""
        pairs = list(zip(token_ids, told, strict=True))
        if self._kind == "chat":
            return {"content": [self._chat(*pair) for pair in pairs], "refusal": None}
        offsets = []
        for token_id in token_ids:
            offsets.append(self._offset)
            self._offset += len(self._text(token_id))
        return {
            "tokens": [self._name(token_id) for token_id in token_ids],
            "token_logprobs": [_number(one.drawn) for one in told],
            "top_logprobs": [self._top(*pair) for pair in pairs],
            "text_offset": offsets,
        }

    def _chat(self, token_id: int, told: Logprobs) -> dict[str, Any]:
        top = zip(told.top_ids, told.top, strict=True)
        likeliest = [self._entry(one, value) for one, value in top]
        return {**self._entry(token_id, told.drawn), "top_logprobs": likeliest}

    def _entry(self, token_id: int, value: float) -> dict[str, Any]:
        text = self._text(token_id)
        return {
            "token": text,
            "logprob": _number(value),
            "bytes": list(self._bytes_of(token_id)),
        }

    def _top(self, token_id: int, told: Logprobs) -> dict[str, float] | None:
        """The likeliest by their text, and the token drawn; None if only that was asked for."""
        if not told.top_ids:
            return None
        top = zip(told.top_ids, told.top, strict=True)
        found: dict[str, float] = {}
        for one, value in top:
            found.setdefault(self._name(one), _number(value))  # of equal names the likeliest
        return found | {self._name(token_id): _number(told.drawn)}

    def _name(self, token_id: int) -> str:
        """The token's text or, if it is part of a character, OpenAI's notation for its bytes: all
        of those would read U+FFFD, and be one key."""
        text = self._text(token_id)
        if "\ufffd" not in text:
            return text
        data = self._bytes_of(token_id)
        try:
            data.decode()
            return text
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def _text(self, token_id: int) -> str:
        return self._tokenizer.decode([token_id], skip_special_tokens=False)


def _number(value: float) -> float:
    return max(value, _LOWEST)
