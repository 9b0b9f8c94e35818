"""How vLLM is asked for the legs of a split request, and what it answers. All that is vLLM's own.

Read in the source of vLLM 0.32: design §9, docs/engines.md.
"""

from __future__ import annotations

from typing import Any

import msgspec

from splitserve.adopted.asked import Asked
from splitserve.adopted.events import Malformed

KV_LEASE_S = 30.0  # vLLM's kv_lease_duration, unless it is told another

_NOT_ON_LEG_ONE = (
    # not what shapes the prompt, or of no use to one token that is thrown away
    "logprobs",
    "top_logprobs",
    "logprob_token_ids",
    "response_format",
    "structured_outputs",
    "stop",
    "include_stop_str_in_output",
    "repetition_detection",
    "thinking_token_budget",
    "include_reasoning",
    "echo",
    "return_tokens_as_token_ids",
)


class LegOneChoice(msgspec.Struct):
    prompt_token_ids: list[int] | None = None


class LegOneReply(msgspec.Struct):
    """kv_transfer_params: where the KV is; to be handed on as it is, once."""

    choices: list[LegOneChoice] = []
    prompt_token_ids: list[int] | None = None
    kv_transfer_params: dict[str, Any] | None = None

    @property
    def prompt_ids(self) -> list[int] | None:
        if self.prompt_token_ids:
            return self.prompt_token_ids
        return self.choices[0].prompt_token_ids if self.choices else None

    @property
    def offer(self) -> dict[str, Any] | None:
        """None if there is nothing to fetch: the server keeps no KV for others."""
        params = self.kv_transfer_params
        is_there = params and params.get("do_remote_prefill") and params.get("remote_block_ids")
        return params if is_there else None


_read = msgspec.json.Decoder(LegOneReply).decode


def read_leg_one(body: bytes) -> LegOneReply:
    """Raise Malformed."""
    try:
        return _read(body)
    except (msgspec.MsgspecError, UnicodeError) as error:
        raise Malformed(f"a reply that can't be read: {error}") from None


class Prompt:
    """A prompt as it is known so far: as the client gave it, then by its ids, then with the tokens
    of the answer that the client has."""

    def __init__(self, asked: Asked) -> None:
        self.asked = asked
        self.ids: list[int] | None = asked.prompt if isinstance(asked.prompt, list) else None
        self.output_ids: list[int] = []

    @property
    def num_tokens(self) -> int:
        known = self.asked.estimate_tokens() if self.ids is None else len(self.ids)
        return known + len(self.output_ids)

    def leg_one(self) -> bytes:
        """Compute the prompt and keep its KV for whoever fetches it."""
        body = self._body(self._by_ids({"do_remote_decode": True, "do_remote_prefill": False}))
        for name in _NOT_ON_LEG_ONE:
            body.pop(name, None)
        body.update(
            max_tokens=1,
            min_tokens=min(1, body.get("min_tokens", 0)),
            n=1,
            stream=False,
            return_token_ids=True,
        )
        if self.asked.kind == "chat":
            body["max_completion_tokens"] = 1
        return msgspec.json.encode(body)

    def leg_two(self, offer: dict[str, Any]) -> bytes:
        """Fetch the offered KV and answer. Never of an offer that was sent before."""
        return self._answer(self._by_ids(offer))

    def whole(self) -> bytes:
        """Prefill and answer on one server."""
        return self._answer(self._by_ids({}) if self.output_ids else {})

    def _answer(self, params: dict[str, Any]) -> bytes:
        asked = self.asked
        body = self._body(params)
        body["stream"] = asked.stream
        if asked.stream:
            body["stream_options"] = {"include_usage": True}
            if asked.restartable:
                body["return_token_ids"] = True
        return msgspec.json.encode(body)

    def _by_ids(self, params: dict[str, Any]) -> dict[str, Any]:
        """A chat's ids go among the transfer parameters: vLLM then renders no template."""
        if self.asked.kind == "chat" and self.ids is not None:
            return {**params, "prompt_token_ids": self.ids + self.output_ids}
        return dict(params)

    def _body(self, params: dict[str, Any]) -> dict[str, Any]:
        asked = self.asked
        body = dict(asked.body)
        if asked.kind == "completion":
            # echo wants the text, which a server does not make of ids
            by_ids = self.ids is not None and not body.get("echo")
            body["prompt"] = (self.ids or []) + self.output_ids if by_ids else asked.prompt
        if params:
            body["kv_transfer_params"] = params
        num = len(self.output_ids)
        if num:
            assert asked.max_tokens is not None
            for name in ("max_tokens", "max_completion_tokens"):
                if name in body or (name == "max_tokens" and asked.kind == "completion"):
                    body[name] = asked.max_tokens - num
            if "min_tokens" in body:
                body["min_tokens"] = max(0, body["min_tokens"] - num)
            for name in ("truncate_prompt_tokens", "truncation_side"):
                body.pop(name, None)
        return body
