"""A POST body of /v1/chat/completions or /v1/completions, as a checked value.

Strict: what is unknown, out of range or not honoured is refused by name. Fields that were not
given stay None; `api.resolve` fills them in from the model.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from splitserve.api import values
from splitserve.api.fields import check_fields
from splitserve.api.messages import read_messages
from splitserve.api.values import wrong
from splitserve.errors import InvalidValue, MalformedJSON, UnsupportedField

MAX_PROMPTS = 64
MAX_CHOICES = 64  # prompts x n
MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 1024
MAX_STOP_TOKEN_IDS = 256
MAX_BIASES = 1024
MAX_LOGPROBS = 20
MAX_METADATA_PAIRS = 16
MAX_TEMPERATURE = 2.0

Kind = Literal["chat", "completion"]
Prompt = str | tuple[int, ...]


class ParsedRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the client asked for; None where it left the choice to the model.

    messages: of a chat, each {"role", "content"[, "name"]}; empty for a completion.
    prompts: of a completion, each text or token ids; empty for a chat. One choice per prompt.
    seed: as an unsigned 64-bit integer.
    n: choices per prompt; those of prompt i are numbered i n, ..., i n + n - 1.
    logprobs: tell the log-probability of each token and of so many of the likeliest; None: no.
    user, metadata: identification; they have no influence on the answer.
    """

    kind: Kind
    model: str
    messages: tuple[dict[str, str], ...] = ()
    prompts: tuple[Prompt, ...] = ()
    stream: bool = False
    include_usage: bool = False
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    logit_bias: tuple[tuple[int, float], ...] = ()
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float | None = None
    logprobs: int | None = None
    n: int = 1
    user: str | None = None
    metadata: dict[str, str] = {}


def parse_chat(raw: bytes) -> ParsedRequest:
    """The body of a POST to /v1/chat/completions. Raises InvalidRequest's kinds."""
    body = decode_object(raw)
    check_fields(body, "chat")
    messages = read_messages(body.get("messages"))
    logprobs = _chat_logprobs(body)
    return _parsed("chat", body, _chat_max_tokens(body), logprobs, messages=messages)


def parse_completion(raw: bytes) -> ParsedRequest:
    """The body of a POST to /v1/completions. Raises InvalidRequest's kinds."""
    body = decode_object(raw)
    check_fields(body, "completion")
    return _completion(body, read_prompts(body.get("prompt")))


def parse_settings(body: dict[str, Any]) -> ParsedRequest:
    """The sampling fields of a completion, checked as those of a body are, for callers in this
    process. Raises InvalidRequest's kinds."""
    return _completion({"model": "-", **body}, ())


def _completion(body: dict[str, Any], prompts: tuple[Prompt, ...]) -> ParsedRequest:
    logprobs = values.integer(body, "logprobs", 0, MAX_LOGPROBS)
    max_tokens = values.integer(body, "max_tokens", 1)
    return _parsed("completion", body, max_tokens, logprobs, prompts=prompts)


def decode_object(raw: bytes) -> dict[str, Any]:
    """The JSON object in `raw`. Raises MalformedJSON."""
    try:
        body = msgspec.json.decode(raw)
    except msgspec.ValidationError as error:  # a number that no float can hold
        raise InvalidValue(f"The body holds a value that can't be read: {error}.") from None
    except RecursionError:
        raise MalformedJSON("The body is nested too deeply.") from None
    except (msgspec.DecodeError, UnicodeError) as error:
        raise MalformedJSON(f"The body is not JSON in UTF-8: {error}.") from None
    if not isinstance(body, dict):
        raise MalformedJSON(f"The body must be a JSON object, not {values.show(body)}.")
    return body


def read_prompts(value: object) -> tuple[Prompt, ...]:
    """A string, token ids, or a list of either; never a mixture."""
    if value is None:
        raise InvalidValue("prompt is required.", param="prompt")
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list):
        raise wrong("prompt", "a string, a list of token ids, or a list of these", value)
    if not value:
        raise InvalidValue("prompt must not be empty.", param="prompt")
    if isinstance(value[0], int):
        return (values.token_ids(value, "prompt"),)
    if len(value) > MAX_PROMPTS:
        raise wrong("prompt", f"a list of at most {MAX_PROMPTS} prompts", value)
    return tuple(_one_prompt(item, value[0], f"prompt[{i}]") for i, item in enumerate(value))


def _one_prompt(item: object, first: object, param: str) -> Prompt:
    if isinstance(item, str) and isinstance(first, str):
        return item
    if isinstance(item, list) and isinstance(first, list):
        if not item:
            raise InvalidValue(f"{param} must not be empty.", param=param)
        return values.token_ids(item, param)
    if isinstance(first, str | list):
        expected = "a string" if isinstance(first, str) else "a list of token ids"
        raise wrong(param, f"{expected}, like the first prompt", item)
    raise wrong(param, "a string or a list of token ids", item)


def _parsed(
    kind: Kind,
    body: dict[str, Any],
    max_tokens: int | None,
    logprobs: int | None,
    messages: tuple[dict[str, str], ...] = (),
    prompts: tuple[Prompt, ...] = (),
) -> ParsedRequest:
    model = values.string(body, "model")
    if not model:
        raise InvalidValue("model is required.", param="model")
    stream = values.boolean(body, "stream")
    return ParsedRequest(
        kind=kind,
        model=model,
        messages=messages,
        prompts=prompts,
        stream=stream,
        include_usage=_include_usage(body.get("stream_options"), stream),
        temperature=values.number(body, "temperature", 0, MAX_TEMPERATURE),
        top_p=values.number(body, "top_p", 0, 1, above_low=True),
        top_k=_top_k(body),
        min_p=values.number(body, "min_p", 0, 1),
        seed=_seed(body),
        max_tokens=max_tokens,
        stop=_stop(body.get("stop")),
        stop_token_ids=_stop_token_ids(body.get("stop_token_ids")),
        ignore_eos=values.boolean(body, "ignore_eos"),
        logprobs=logprobs,
        n=_num_choices(body, len(prompts)),
        min_tokens=_min_tokens(body, max_tokens),
        logit_bias=_logit_bias(body.get("logit_bias")),
        presence_penalty=values.number(body, "presence_penalty", -2, 2) or 0.0,
        frequency_penalty=values.number(body, "frequency_penalty", -2, 2) or 0.0,
        repetition_penalty=values.number(body, "repetition_penalty", 0, 10, above_low=True),
        user=values.string(body, "user"),
        metadata=_metadata(body.get("metadata")),
    )


def _chat_max_tokens(body: dict[str, Any]) -> int | None:
    """max_completion_tokens is the newer name of max_tokens; two different values contradict."""
    old = values.integer(body, "max_tokens", 1)
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
        if name not in ("include_usage", "include_obfuscation", "continuous_usage_stats"):
            raise UnsupportedField(f"{param} is not supported.", param=param)
        if option is not None and not isinstance(option, bool):
            raise wrong(param, "true or false", option)
        if option and name != "include_usage":
            raise UnsupportedField(f"{param} = true is not supported.", param=param)
    return bool(value.get("include_usage"))


def _top_k(body: dict[str, Any]) -> int | None:
    top_k = values.integer(body, "top_k", -1, 2**31 - 1)
    return 0 if top_k == -1 else top_k


def _num_choices(body: dict[str, Any], num_prompts: int) -> int:
    num = values.integer(body, "n", 1, MAX_CHOICES) or 1
    if num * num_prompts > MAX_CHOICES:
        raise InvalidValue(
            f"{num_prompts} prompts with n = {num} make more than {MAX_CHOICES} choices.",
            param="n",
        )
    return num


def _chat_logprobs(body: dict[str, Any]) -> int | None:
    """logprobs true or false, top_logprobs how many beside the token itself."""
    wanted = values.boolean(body, "logprobs")
    num_top = values.integer(body, "top_logprobs", 0, MAX_LOGPROBS)
    if num_top and not wanted:
        raise InvalidValue("top_logprobs needs logprobs = true.", param="top_logprobs")
    return (num_top or 0) if wanted else None


def _min_tokens(body: dict[str, Any], max_tokens: int | None) -> int:
    least = values.integer(body, "min_tokens", 0, 2**31 - 1) or 0
    if max_tokens is not None and least > max_tokens:
        raise InvalidValue(
            f"min_tokens = {least} is more than max_tokens = {max_tokens}.", param="min_tokens"
        )
    return least


def _logit_bias(value: object) -> tuple[tuple[int, float], ...]:
    """OpenAI's object of token id (as a string) to a bias from -100 to 100."""
    if value is None:
        return ()
    if not isinstance(value, dict) or len(value) > MAX_BIASES:
        raise wrong("logit_bias", f"an object of at most {MAX_BIASES} biases by token id", value)
    pairs = []
    for name in value:
        param = f"logit_bias.{name}"[:200]
        if not (name.isascii() and name.isdigit() and len(name) < 11):
            raise wrong(param, "a token id as the name of each bias", name)
        bias = values.number({param: value[name]}, param, -100, 100)
        pairs.append((int(name), bias or 0.0))
    return tuple(sorted(pairs))


def _seed(body: dict[str, Any]) -> int | None:
    seed = values.integer(body, "seed", -(2**63), 2**64 - 1)
    return None if seed is None else seed % 2**64


def _stop(value: object) -> tuple[str, ...]:
    if value is None:
        return ()
    strings = [value] if isinstance(value, str) else value
    expected = f"a string or a list of at most {MAX_STOP_STRINGS} strings"
    if not isinstance(strings, list) or len(strings) > MAX_STOP_STRINGS:
        raise wrong("stop", expected, value)
    for item in strings:
        if not isinstance(item, str):
            raise wrong("stop", expected, item)
        if not item:
            raise InvalidValue("stop must not hold an empty string.", param="stop")
        if len(item) > MAX_STOP_CHARS:
            raise wrong("stop", f"of strings of at most {MAX_STOP_CHARS} characters", item)
    return tuple(dict.fromkeys(strings))


def _stop_token_ids(value: object) -> tuple[int, ...]:
    if value is None:
        return ()
    if not isinstance(value, list) or len(value) > MAX_STOP_TOKEN_IDS:
        expected = f"a list of at most {MAX_STOP_TOKEN_IDS} token ids"
        raise wrong("stop_token_ids", expected, value)
    return tuple(dict.fromkeys(values.token_ids(value, "stop_token_ids")))


def _metadata(value: object) -> dict[str, str]:
    if value is None:
        return {}
    expected = f"an object of at most {MAX_METADATA_PAIRS} strings"
    if not isinstance(value, dict) or len(value) > MAX_METADATA_PAIRS:
        raise wrong("metadata", expected, value)
    for item in value.values():
        if not isinstance(item, str):
            raise wrong("metadata", expected, item)
    return dict(value)
