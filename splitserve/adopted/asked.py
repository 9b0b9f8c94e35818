"""A client's body as it may go to an adopted server: field by field, nothing that is not known.

Types and ranges of most fields are left to the server, which refuses what is wrong; known here is
what the journey depends on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from splitserve.api import values
from splitserve.api.fields import HONOURED, check_fields
from splitserve.api.schemas import Kind, decode_object, read_prompts
from splitserve.api.values import wrong
from splitserve.errors import InvalidValue, UnsupportedField

MAX_CHOICES = 64  # prompts x n
DEFAULT_COMPLETION_TOKENS = 16  # vLLM's as well as OpenAI's

_MORE = frozenset(
    [
        "add_special_tokens",
        "allowed_token_ids",
        "bad_words",
        "cache_salt",
        "echo",
        "include_stop_str_in_output",
        "logprob_token_ids",
        "priority",
        "prompt_logprobs",
        "repetition_detection",
        "response_format",
        "return_token_ids",
        "return_tokens_as_token_ids",
        "skip_special_tokens",
        "spaces_between_special_tokens",
        "structured_outputs",
        "thinking_token_budget",
        "truncate_prompt_tokens",
        "truncation_side",
    ]
)
_MORE_CHAT = frozenset(
    [
        "add_generation_prompt",
        "chat_template_kwargs",
        "continue_final_message",
        "documents",
        "include_reasoning",
        "parallel_tool_calls",
        "reasoning_effort",
        "tool_choice",
        "tools",
    ]
)
FORWARDED: Mapping[Kind, frozenset[str]] = {
    "chat": HONOURED["chat"] | _MORE | _MORE_CHAT,
    "completion": HONOURED["completion"] | _MORE,
}
"""What vLLM 0.32 honours. What else `api.fields` knows is accepted at its neutral value, and not
forwarded. Refused are `chat_template`, which is code, and media: servers would fetch their URLs."""

_NOT_SENT = ("stream", "stream_options", "user", "metadata")  # set anew, or not vLLM's business

_MESSAGE_FIELDS = frozenset(
    [
        "role",
        "content",
        "name",
        "tool_calls",
        "tool_call_id",
        "refusal",
        "reasoning",
        "reasoning_content",
        "annotations",
        "audio",
        "function_call",
    ]
)
_UNREPEATABLE = (
    # what of the tokens so far is not in the prompt that a resume would send
    "presence_penalty",
    "frequency_penalty",
    "stop",
    "bad_words",
    "response_format",
    "structured_outputs",
    "repetition_detection",
    "thinking_token_budget",
    "include_reasoning",
    "echo",
    "prompt_logprobs",
    "continue_final_message",
)


@dataclass(frozen=True, slots=True)
class Asked:
    """One prompt of a request, and what of its fields the journey depends on.

    body: the client's fields, without those in _NOT_SENT. prompt: of a completion; None in a chat,
    whose body has the messages. max_tokens: as given, or vLLM's default; None: what the model's
    context and the server's generation config leave. one_worker: why it is not split; may be empty.
    """

    kind: Kind
    body: dict[str, Any]
    prompt: str | list[int] | None
    model: str
    stream: bool
    include_usage: bool
    n: int
    max_tokens: int | None
    restartable: bool
    one_worker: str
    keeps_ids: bool

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self.kind == "chat" else "/v1/completions"

    @property
    def guarantee(self) -> str:
        """The class of design 3.8."""
        return "restartable" if self.restartable else "passthrough"

    def estimate_tokens(self) -> int:
        """Roughly, for text: the server has the tokenizer."""
        if isinstance(self.prompt, list):
            return len(self.prompt)
        text = self.prompt if self.prompt is not None else str(self.body["messages"])
        return max(1, len(text) // 4)


def read_asked(kind: Kind, raw: bytes) -> list[Asked]:
    """One per prompt. Raises InvalidRequest's kinds, naming the field."""
    given = decode_object(raw)
    check_fields(given, kind, FORWARDED[kind])
    body = {name: value for name, value in given.items() if value is not None}
    model = values.string(body, "model")
    if not model:
        raise InvalidValue("model is required.", param="model")
    stream = values.boolean(body, "stream")
    include_usage = _include_usage(body.get("stream_options"), stream)
    n = values.integer(body, "n", 1, MAX_CHOICES) or 1
    prompts: list[str | list[int] | None] = [None]
    if kind == "chat":
        _check_messages(body.get("messages"))
    else:
        found = read_prompts(body.get("prompt"))
        prompts = [x if isinstance(x, str) else list(x) for x in found]
        if len(prompts) * n > MAX_CHOICES:
            raise InvalidValue(
                f"{len(prompts)} prompts with n = {n} make more than {MAX_CHOICES} choices.",
                param="n",
            )
    max_tokens = _max_tokens(kind, body)
    values.integer(body, "min_tokens", 0)
    forwarded = {
        name: value
        for name, value in body.items()
        if name in FORWARDED[kind] and name not in _NOT_SENT
    }
    return [
        Asked(
            kind=kind,
            body=forwarded,
            prompt=prompt,
            model=model,
            stream=stream,
            include_usage=include_usage,
            n=n,
            max_tokens=max_tokens,
            restartable=_is_restartable(kind, body, n, max_tokens),
            one_worker=_one_worker(kind, body, n),
            keeps_ids=values.boolean(body, "return_token_ids"),
        )
        for prompt in prompts
    ]


def _is_restartable(kind: Kind, body: Mapping[str, Any], n: int, max_tokens: int | None) -> bool:
    """Whether prompt + tokens so far, sent as a prompt, go on as the answer would have."""
    temperature = values.number(body, "temperature", 0, 100)
    if temperature != 0 or n > 1 or max_tokens is None:
        return False
    if kind == "completion" and body.get("logprobs") is not None:
        return False  # they count the characters since the prompt's end
    if body.get("tools") and body.get("tool_choice") != "none":
        return False
    # a neutral value is none, 0, false or empty
    return not any(body.get(name) for name in _UNREPEATABLE)


def _one_worker(kind: Kind, body: Mapping[str, Any], n: int) -> str:
    if n > 1:
        return f"local: n = {n}"
    if body.get("prompt_logprobs") is not None:
        return "local: prompt_logprobs"
    if kind == "completion" and body.get("echo") and body.get("logprobs") is not None:
        return "local: echo with logprobs"
    if kind == "completion" and body.get("max_tokens") == 0:
        return "local: no output"
    if body.get("tools") and body.get("tool_choice") not in (None, "none", "auto"):
        return "local: a tool call is required"
    return ""


def _max_tokens(kind: Kind, body: Mapping[str, Any]) -> int | None:
    old = values.integer(body, "max_tokens", 1 if kind == "chat" else 0)
    if kind == "completion":
        return DEFAULT_COMPLETION_TOKENS if old is None else old
    new = values.integer(body, "max_completion_tokens", 1)
    if old is not None and new is not None and old != new:
        raise InvalidValue(
            f"max_tokens = {old} and max_completion_tokens = {new} are the same setting; "
            "give one of them.",
            param="max_completion_tokens",
        )
    return old if new is None else new


def _include_usage(value: object, stream: bool) -> bool:
    if value is None:
        return False
    if not isinstance(value, dict):
        raise wrong("stream_options", "an object", value)
    if not stream:
        raise InvalidValue(
            "stream_options is only allowed with stream = true.", param="stream_options"
        )
    for name, option in value.items():
        param = f"stream_options.{name}"[:200]
        if name != "include_usage" and option:
            raise UnsupportedField(f"{param} is not supported.", param=param)
        if option is not None and not isinstance(option, bool):
            raise wrong(param, "true or false", option)
    return bool(value.get("include_usage"))


def _check_messages(value: object) -> None:
    """Their shape, as far as it decides where they go: media would make a server fetch URLs."""
    if not isinstance(value, list) or not value:
        raise wrong("messages", "a list of at least one message", value)
    for i, message in enumerate(value):
        param = f"messages[{i}]"
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise wrong(param, "an object with role and content", message)
        for name in message:
            if name not in _MESSAGE_FIELDS:
                raise UnsupportedField(f"{param}.{name[:100]} is not supported.", param=param)
        content = message.get("content")
        if content is None or isinstance(content, str):
            continue
        if not isinstance(content, list):
            raise wrong(f"{param}.content", "a string or a list of text parts", content)
        for j, part in enumerate(content):
            if not isinstance(part, dict) or part.get("type") != "text" or len(part) != 2:
                raise UnsupportedField(
                    f"{param}.content[{j}] is not a text part; nothing else is forwarded.",
                    param=f"{param}.content[{j}]",
                )
