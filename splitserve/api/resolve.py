"""What the client left open, filled in from the model: ParsedRequest to Sampling."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from splitserve.api.schemas import ParsedRequest
from splitserve.api.values import show
from splitserve.errors import ContextLengthExceeded, InvalidValue
from splitserve.sampling import Sampling

DEFAULT_COMPLETION_TOKENS = 16
"""max_tokens of a completion that does not say: OpenAI's default."""

_UNHONOURED: Mapping[str, object] = {
    "no_repeat_ngram_size": 0,
    "typical_p": 1.0,
    "num_beams": 1,
    "min_new_tokens": 0,
}


def resolve(
    parsed: ParsedRequest,
    generation_defaults: Mapping[str, object],
    eos_ids: Iterable[int],
    seed_source: Callable[[], int],
    prompt_len: int,
    max_model_len: int,
    choice: int = 0,
) -> Sampling:
    """Sampling of one prompt of the request.

    generation_defaults: the model's generation_config.json. As in vLLM its temperature, top_k,
    top_p, min_p and repetition_penalty hold where the client gave none, and its do_sample is not
    read; its max_new_tokens is the default of max_tokens for a chat.
    seed_source: called once, for a 64-bit seed, when the client gave none.
    prompt_len: in tokens; max_model_len: of prompt and output together.

    Raises InvalidValue for an empty prompt, ContextLengthExceeded with the numbers.
    """
    seed = seed_source() if parsed.seed is None else parsed.seed
    return Sampling(
        seed=seed % 2**64,
        max_tokens=_max_tokens(parsed, generation_defaults, prompt_len, max_model_len),
        temperature=_or_default(parsed.temperature, generation_defaults, "temperature", 1.0),
        top_k=max(0, int(_or_default(parsed.top_k, generation_defaults, "top_k", 0))),
        top_p=_or_default(parsed.top_p, generation_defaults, "top_p", 1.0),
        min_p=_or_default(parsed.min_p, generation_defaults, "min_p", 0.0),
        choice=choice,
        logprobs=parsed.logprobs,
        min_tokens=parsed.min_tokens,
        logit_bias=parsed.logit_bias,
        presence_penalty=parsed.presence_penalty,
        frequency_penalty=parsed.frequency_penalty,
        repetition_penalty=_or_default(
            parsed.repetition_penalty, generation_defaults, "repetition_penalty", 1.0
        ),
        stop_ids=tuple(sorted({*parsed.stop_token_ids, *(() if parsed.ignore_eos else eos_ids)})),
    )


def check_token_ids(ids: Sequence[int], vocab_size: int, param: str) -> None:
    """Raises InvalidValue naming the first id that is not in [0, vocab_size)."""
    if ids and (max(ids) >= vocab_size or min(ids) < 0):
        bad = next(i for i in ids if not 0 <= i < vocab_size)
        raise InvalidValue(
            f"{param} holds the token id {show(bad)}; this model's are 0 to {vocab_size - 1}.",
            param=param,
        )


def prompt_too_long(num_tokens: str, max_model_len: int, param: str) -> ContextLengthExceeded:
    return ContextLengthExceeded(
        f"The prompt has {num_tokens} tokens; {max_model_len} fit here, "
        "with at least one output token.",
        param=param,
        advice="Shorten the prompt.",
    )


def unhonoured_defaults(generation_defaults: Mapping[str, object]) -> list[str]:
    """Settings of generation_config.json that change answers elsewhere and that this server does
    not apply, as "name = value": for a warning at start."""
    return [
        f"{name} = {generation_defaults[name]}"
        for name, neutral in _UNHONOURED.items()
        if generation_defaults.get(name) not in (None, neutral)
    ]


def _max_tokens(
    parsed: ParsedRequest, defaults: Mapping[str, object], prompt_len: int, max_model_len: int
) -> int:
    param = "messages" if parsed.kind == "chat" else "prompt"
    if prompt_len < 1:
        raise InvalidValue("The prompt is empty: it has no tokens.", param=param)
    room = max_model_len - prompt_len
    if room < 1:
        raise prompt_too_long(str(prompt_len), max_model_len, param)
    if parsed.max_tokens is None:
        if parsed.kind == "completion":
            return min(DEFAULT_COMPLETION_TOKENS, room)
        limit = defaults.get("max_new_tokens")
        return min(limit, room) if isinstance(limit, int) and limit > 0 else room
    if parsed.max_tokens > room:
        raise ContextLengthExceeded(
            f"The prompt's {prompt_len} tokens and max_tokens = {parsed.max_tokens} make "
            f"{prompt_len + parsed.max_tokens} tokens; {max_model_len} fit here.",
            param="max_tokens",
        )
    return parsed.max_tokens


def _or_default(
    given: float | None, defaults: Mapping[str, object], name: str, otherwise: float
) -> float:
    if given is not None:
        return given
    value = defaults.get(name)
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    return otherwise
