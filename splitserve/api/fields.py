"""Which fields of a body are honoured, which only at their neutral value, and which never.

The names are those of OpenAI's two endpoints and of vLLM's extensions to them. A field that is
known here but not honoured is accepted at a value that asks for nothing, and refused by name at
any other: what is not honoured is never ignored.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from splitserve.api.values import show
from splitserve.errors import UnknownField, UnsupportedField

_COMMON = frozenset(
    [
        "model",
        "stream",
        "stream_options",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "seed",
        "max_tokens",
        "stop",
        "stop_token_ids",
        "ignore_eos",
        "min_tokens",
        "n",
        "logit_bias",
        "presence_penalty",
        "frequency_penalty",
        "repetition_penalty",
        "user",
        "metadata",
    ]
)
HONOURED: Mapping[str, frozenset[str]] = {
    "chat": _COMMON | {"messages", "max_completion_tokens", "logprobs", "top_logprobs"},
    "completion": _COMMON | {"prompt", "logprobs"},
}

_NOTHING: tuple[object, ...] = ()
_EMPTY: tuple[object, ...] = ([], {})
_FALSE: tuple[object, ...] = (False,)

_NEUTRAL_COMMON: Mapping[str, tuple[object, ...]] = {
    "length_penalty": (1,),
    "prompt_logprobs": _NOTHING,
    "return_token_ids": _FALSE,
    "return_tokens_as_token_ids": _FALSE,
    "allowed_token_ids": _NOTHING,
    "bad_words": _EMPTY,
    "include_stop_str_in_output": _FALSE,
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "truncate_prompt_tokens": _NOTHING,
    "use_beam_search": _FALSE,
    "detokenize": (True,),
    "logits_processors": _EMPTY,
    "structured_outputs": _NOTHING,
    "guided_json": _NOTHING,
    "guided_regex": _NOTHING,
    "guided_choice": _NOTHING,
    "guided_grammar": _NOTHING,
    "guided_decoding_backend": _NOTHING,
    "response_format": ({"type": "text"},),
    "priority": (0,),
    "request_id": _NOTHING,
    "cache_salt": _NOTHING,
    "vllm_xargs": _EMPTY,
    "service_tier": ("auto", "default"),
    "store": _FALSE,
}
_NEUTRAL_OWN: Mapping[str, Mapping[str, tuple[object, ...]]] = {
    "chat": {
        "tools": _EMPTY,
        "tool_choice": ("none",),
        "parallel_tool_calls": (True, False),  # without tools there is nothing to call
        "functions": _EMPTY,
        "function_call": ("none",),
        "modalities": (["text"],),
        "audio": _NOTHING,
        "prediction": _NOTHING,
        "reasoning_effort": _NOTHING,
        "verbosity": _NOTHING,
        "web_search_options": _NOTHING,
        "moderation": _NOTHING,
        "safety_identifier": _NOTHING,
        "prompt_cache_key": _NOTHING,
        "prompt_cache_retention": _NOTHING,
        "add_generation_prompt": (True,),
        "add_special_tokens": _FALSE,
        "continue_final_message": _FALSE,
        "chat_template": _NOTHING,
        "chat_template_kwargs": _EMPTY,
        "include_reasoning": (True,),
        "documents": _EMPTY,
        "echo": _FALSE,
        "mm_processor_kwargs": _EMPTY,
        "media_io_kwargs": _EMPTY,
    },
    "completion": {
        "add_special_tokens": (True,),
        "best_of": (1,),
        "echo": _FALSE,
        "suffix": _NOTHING,
        "prompt_embeds": _NOTHING,
    },
}
NEUTRAL: Mapping[str, Mapping[str, tuple[object, ...]]] = {
    kind: {**_NEUTRAL_COMMON, **own} for kind, own in _NEUTRAL_OWN.items()
}

INTERNAL = frozenset(
    [
        "kv_transfer_params",
        "ec_transfer_params",
        "disagg_prefill_resp",
        "disaggregated_params",
        "bootstrap_host",
        "bootstrap_port",
        "bootstrap_room",
        "bootstrap_info",
        "data_parallel_rank",
        "remote_block_ids",
        "remote_engine_id",
        "remote_host",
        "remote_port",
        "remote_request_id",
        "do_remote_prefill",
        "do_remote_decode",
        "lora_request",
        "routed_dp_rank",
    ]
)
"""Fields by which servers steer KV between each other: they never come from a client."""


def check_fields(
    body: Mapping[str, Any], kind: str, honoured: frozenset[str] | None = None
) -> None:
    """Refuse every field that this server would not honour. honoured: by others that compute.

    Raises UnknownField or UnsupportedField, naming the field.
    """
    honoured, neutral = HONOURED[kind] if honoured is None else honoured, NEUTRAL[kind]
    for name, value in body.items():
        if name in honoured:
            continue
        if name in INTERNAL:
            raise UnsupportedField(
                f"{name} is set by servers only, never by a client.",
                param=name,
                advice="Leave it out.",
            )
        if name not in neutral:
            raise unknown_field(name, honoured | neutral.keys(), kind)
        if value is not None and not _is_neutral(value, neutral[name]):
            raise UnsupportedField(f"{name} = {show(value)} is not supported.", param=name)


def unknown_field(name: str, known: frozenset[str], kind: str, where: str = "") -> UnknownField:
    """The error for a field that nobody knows, with the nearest known one."""
    near = difflib.get_close_matches(name[:100], sorted(known), n=1, cutoff=0.7)
    hint = f" Did you mean {near[0]}?" if near else _other_endpoint(name, kind)
    return UnknownField(f"Unknown field {show(name)}.{hint}", param=f"{where}{name}"[:200])


def _other_endpoint(name: str, kind: str) -> str:
    other = "completion" if kind == "chat" else "chat"
    path = {"chat": "/v1/chat/completions", "completion": "/v1/completions"}[other]
    return f" It belongs to {path}." if name in HONOURED[other] | NEUTRAL[other].keys() else ""


def _is_neutral(value: object, neutral: tuple[object, ...]) -> bool:
    # True == 1 in Python, but not in JSON
    return any(
        value == choice and isinstance(value, bool) == isinstance(choice, bool)
        for choice in neutral
    )
