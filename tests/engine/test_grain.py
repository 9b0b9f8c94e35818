"""How much KV moves at a time: worked by hand."""

from __future__ import annotations

import pytest

from splitserve.config import Handoff
from splitserve.errors import ConfigError
from splitserve.router.grain import GAIN_S, PART_OVERHEAD_S, KVShape, decide_grain
from splitserve.wire import Grain

BYTES_PER_TOKEN = 46_080.0  # 30 layers, 3 heads of 64, float32
SHAPE = KVShape(BYTES_PER_TOKEN, num_layers=30, chunk_tokens=256)


def decide(handoff: Handoff = Handoff.AUTO, tokens: int = 1024, bandwidth: float = 1e9) -> Grain:
    return decide_grain(handoff, tokens, SHAPE, bandwidth, 300.0).grain


def test_predictions_are_those_of_the_formula() -> None:
    decision = decide_grain(Handoff.AUTO, 1024, SHAPE, 10e6, 300.0)
    whole = 1024 * BYTES_PER_TOKEN / 10e6  # 4.7 s, of which 768 / 300 = 2.56 s can hide
    assert decision.exposed_s[Grain.REQUEST] == pytest.approx(whole + PART_OVERHEAD_S)
    assert decision.exposed_s[Grain.CHUNK] == pytest.approx(whole - 2.56 + 4 * PART_OVERHEAD_S)
    hidden = 1024 / 300  # layers move from the first one on
    assert decision.exposed_s[Grain.LAYER] == pytest.approx(
        whole / 30 + whole - hidden + 4 * PART_OVERHEAD_S
    )
    fast = decide_grain(Handoff.AUTO, 1024, SHAPE, 1e9, 300.0)
    last = 256 * BYTES_PER_TOKEN / 1e9
    assert fast.exposed_s[Grain.CHUNK] == pytest.approx(last + 4 * PART_OVERHEAD_S)


@pytest.mark.parametrize(
    ("tokens", "bandwidth", "grain"),
    [
        (1024, 1e9, Grain.CHUNK),
        (1024, 1e7, Grain.CHUNK),
        (256, 1e9, Grain.REQUEST),  # one step: nothing to hide behind
        (200, 1e7, Grain.REQUEST),
        (320, 100e9, Grain.REQUEST),  # gains less than GAIN_S
    ],
)
def test_auto_takes_what_exposes_less(tokens: int, bandwidth: float, grain: Grain) -> None:
    assert decide(tokens=tokens, bandwidth=bandwidth) is grain


def test_what_was_asked_for_is_done() -> None:
    assert decide(Handoff.CHUNK_PULL, 20) is Grain.CHUNK
    assert decide(Handoff.REQUEST_PULL, 4096) is Grain.REQUEST
    assert decide(Handoff.LAYER_PUSH, 20) is Grain.LAYER
    pushes = [decide_grain(handoff, 1024, SHAPE, 1e9, 300.0).push for handoff in list(Handoff)]
    assert pushes == [False, False, False, True, True]
    assert GAIN_S > PART_OVERHEAD_S


@pytest.mark.parametrize("pair", ["request-push", "layer-pull"])
def test_pairs_that_are_none_are_refused_with_the_reason(pair: str) -> None:
    with pytest.raises(ConfigError, match=pair) as caught:
        Handoff.parse(pair)
    assert "chunk-pull" in caught.value.advice


def test_an_unknown_handoff_names_the_known() -> None:
    with pytest.raises(ConfigError, match="request-pull"):
        Handoff.parse("token-teleport")
    assert Handoff.parse("auto") is Handoff.AUTO
