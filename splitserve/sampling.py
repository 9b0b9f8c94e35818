"""What a client may ask of the sampler: data only, shared by gateway, scheduler and runner."""

from __future__ import annotations

import msgspec


class Sampling(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Resolved sampling parameters of one choice.

    temperature: 0 is greedy (argmax, lowest id on ties); else logits are divided by it.
    top_k: keep the k most likely tokens; 0 keeps all.
    top_p: keep the smallest set whose probability reaches top_p, in (0, 1]; 1 keeps all.
    min_p: keep tokens with probability >= min_p x the largest, in [0, 1]; 0 keeps all.
    Order of the filters: temperature, min_p, top_k, top_p (as in vLLM).
    seed: the effective 64-bit seed, always set by the gateway.
    choice: index of the choice within its request.
    max_tokens: at most so many output tokens, >= 1.
    stop_ids: token ids that end the answer: the model's EOS ids and the client's stop ids.
    min_tokens: no stop id can be drawn before so many output tokens.
    logit_bias: (token id, bias) pairs, added to the logits.
    repetition_penalty: logits of tokens in prompt or output are divided by it if positive, else
        multiplied (CTRL, Keskar et al. 2019); 1 is none.
    frequency_penalty, presence_penalty: subtracted from the logits of tokens in the output, once
        per occurrence, and once; 0 is none.
    logprobs: tell the log-probability of each token drawn, and of so many of the likeliest; None
        tells none. They are of the raw logits, before anything above.
    All but logprobs come before the temperature, in the order min_tokens, logit_bias, repetition,
    frequency and presence (as in vLLM).
    """

    seed: int
    max_tokens: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    choice: int = 0
    stop_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    logit_bias: tuple[tuple[int, float], ...] = ()
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logprobs: int | None = None


class Logprobs(msgspec.Struct, frozen=True, array_like=True):
    """Natural logarithms of probabilities at one output position; top_ids likeliest first."""

    drawn: float
    top_ids: list[int] = []
    top: list[float] = []
