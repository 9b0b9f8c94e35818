from __future__ import annotations

import pytest

from splitserve.api.resolve import check_token_ids, resolve, unhonoured_defaults
from splitserve.api.schemas import ParsedRequest
from splitserve.errors import ContextLengthExceeded, InvalidValue
from splitserve.sampling import Sampling


def resolved(
    kind: str = "chat",
    defaults: dict[str, object] | None = None,
    prompt_len: int = 10,
    max_model_len: int = 100,
    **fields: object,
) -> Sampling:
    parsed = ParsedRequest(kind=kind, model="m", **fields)  # type: ignore[arg-type]
    return resolve(parsed, defaults or {}, [2, 0], lambda: 2**70 + 5, prompt_len, max_model_len)


def test_defaults_without_a_generation_config() -> None:
    assert resolved() == Sampling(
        seed=2**70 % 2**64 + 5, max_tokens=90, temperature=1.0, top_k=0, top_p=1.0, stop_ids=(0, 2)
    )


def test_the_models_defaults_hold_where_the_client_gave_none() -> None:
    defaults = {"temperature": 0.6, "top_k": 50, "top_p": 0.9, "min_p": 0.05, "do_sample": False}
    sampling = resolved(defaults=defaults)
    assert (sampling.temperature, sampling.top_k) == (0.6, 50)
    assert (sampling.top_p, sampling.min_p) == (0.9, 0.05)
    sampling = resolved(defaults=defaults, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0)
    assert (sampling.temperature, sampling.top_k) == (0.0, 0)
    assert (sampling.top_p, sampling.min_p) == (1.0, 0.0)


def test_null_and_odd_values_in_a_generation_config_are_not_defaults() -> None:
    assert resolved(defaults={"temperature": None, "top_k": True, "top_p": "x"}) == resolved()
    assert resolved(defaults={"top_k": -1}).top_k == 0


def test_a_seed_given_is_kept_and_the_source_not_asked() -> None:
    assert resolved(seed=7).seed == 7


def test_max_tokens() -> None:
    assert resolved("chat").max_tokens == 90
    assert resolved("chat", defaults={"max_new_tokens": 20}).max_tokens == 20
    assert resolved("chat", defaults={"max_new_tokens": 2000}).max_tokens == 90
    assert resolved("completion").max_tokens == 16
    assert resolved("completion", prompt_len=95).max_tokens == 5
    assert resolved(max_tokens=90).max_tokens == 90


def test_too_long_with_the_numbers() -> None:
    with pytest.raises(ContextLengthExceeded, match=r"10 tokens and max_tokens = 91 make 101.*100"):
        resolved(max_tokens=91)
    for prompt_len in (100, 101):
        with pytest.raises(ContextLengthExceeded, match=rf"{prompt_len} tokens.*100") as caught:
            resolved("completion", prompt_len=prompt_len)
        assert caught.value.param == "prompt"


def test_an_empty_prompt() -> None:
    with pytest.raises(InvalidValue, match="empty"):
        resolved(prompt_len=0)


def test_what_ends_an_answer() -> None:
    assert resolved(stop_token_ids=(9, 2)).stop_ids == (0, 2, 9)
    assert resolved(stop_token_ids=(9,), ignore_eos=True).stop_ids == (9,)


def test_prompt_ids_outside_the_vocabulary() -> None:
    check_token_ids([0, 99], 100, "prompt")
    for ids, bad in (([0, 100], "100"), ([5, 2**63], str(2**63)), ([-1], "-1")):
        with pytest.raises(InvalidValue, match=f"token id {bad};"):
            check_token_ids(ids, 100, "prompt")


def test_settings_of_the_model_that_are_not_applied_are_told() -> None:
    config = {"no_repeat_ngram_size": 3, "num_beams": 1, "temperature": 0.7, "typical_p": None}
    assert unhonoured_defaults(config) == ["no_repeat_ngram_size = 3"]
