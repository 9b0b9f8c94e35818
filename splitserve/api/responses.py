"""OpenAI's response objects as JSON bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from splitserve.errors import SplitserveError

FinishReason = Literal["stop", "length"]

_encode = msgspec.json.Encoder().encode


class Usage(msgspec.Struct, frozen=True):
    """Token counts of one request, over all its choices.

    cached_tokens: prompt tokens whose KV existed before the request arrived and was used.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0

    def body(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


class Choice(msgspec.Struct, frozen=True):
    """One finished answer; choices are in the order of their index."""

    text: str
    finish_reason: FinishReason
    logprobs: dict[str, Any] | None = None


class ModelCard(msgspec.Struct, frozen=True):
    """A served model. created: seconds since 1970; max_model_len: its context in tokens."""

    id: str
    created: int
    max_model_len: int | None = None
    owned_by: str = "splitserve"


def chat_completion(
    request_id: str, created: int, model: str, choices: Sequence[Choice], usage: Usage
) -> bytes:
    """The whole answer of /v1/chat/completions."""
    return _encode(
        {
            "id": request_id,
            "object": "chat.completion",
            "created": created,
            "model": model,
            "choices": [
                {
                    "index": index,
                    "message": {"role": "assistant", "content": choice.text, "refusal": None},
                    "logprobs": choice.logprobs,
                    "finish_reason": choice.finish_reason,
                }
                for index, choice in enumerate(choices)
            ],
            "usage": usage.body(),
        }
    )


def text_completion(
    request_id: str, created: int, model: str, choices: Sequence[Choice], usage: Usage
) -> bytes:
    """The whole answer of /v1/completions."""
    return _encode(
        {
            "id": request_id,
            "object": "text_completion",
            "created": created,
            "model": model,
            "choices": [
                {
                    "index": index,
                    "text": choice.text,
                    "logprobs": choice.logprobs,
                    "finish_reason": choice.finish_reason,
                }
                for index, choice in enumerate(choices)
            ],
            "usage": usage.body(),
        }
    )


def model_object(card: ModelCard) -> bytes:
    """The answer of GET /v1/models/{id}."""
    return _encode(_model_body(card))


def model_list(cards: Sequence[ModelCard]) -> bytes:
    """The answer of GET /v1/models."""
    return _encode({"object": "list", "data": [_model_body(card) for card in cards]})


def error_object(error: SplitserveError) -> bytes:
    """The body of an answer with `error.status`."""
    return _encode(error.body())


def _model_body(card: ModelCard) -> dict[str, Any]:
    return {
        "id": card.id,
        "object": "model",
        "created": card.created,
        "owned_by": card.owned_by,
        "max_model_len": card.max_model_len,
    }
