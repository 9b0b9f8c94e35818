"""Settings that can't work are refused with a reason, before anything is loaded."""

from __future__ import annotations

import re
from typing import Any

import pytest

from splitserve.config import ConnectorKind, GatewayConfig, Handoff, Network, ServeConfig
from splitserve.errors import ConfigError
from splitserve.store.registry import parse_tier

PUSH = GatewayConfig(handoff=Handoff.LAYER_PUSH)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"num_mixed": 100_000}, "more than 64"),
        ({"num_mixed": -1}, "negative"),
        ({"num_mixed": 1, "transport": "pigeon"}, "known: shm, tcp"),
        ({"num_mixed": 2, "gateway": PUSH, "digests": "lease"}, "digests=full"),
        ({"num_mixed": 2, "gateway": PUSH, "device": "cuda"}, "for the CPU"),
        ({"num_mixed": 2, "gateway": PUSH, "zone_fraction": 0.0}, "share of the pool"),
        ({"num_mixed": 1, "networks": (Network("mixed-7", "10.0.0.1"),)}, "mixed-7"),
        ({"num_mixed": 1, "networks": (Network("mixed-0", "10.0.0.1"),)}, "another transport"),
    ],
    ids=str,
)
def test_it_is_refused(settings: dict[str, object], reason: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ServeConfig(**settings)  # type: ignore[arg-type]
    assert reason in caught.value.message


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"connector": "store"}, "needs a place"),
        ({"connector": "p2p", "tiers": ("disk:/x",)}, "has no store"),
        ({"connector": "shared_storage", "tiers": ("disk:/x",)}, "one place"),
        ({"connector": "nfs"}, "Unknown connector 'nfs'; known: p2p"),
        ({"connector": "store", "tiers": ("disk:/x",), "way": "layer-push"}, "no landing"),
        ({"connector": "store", "tiers": ("disk:/x",), "way": "chunk-push"}, "no landing"),
        ({"decode_block_size": 24}, "multiple of 16"),
        ({"block_size": 48, "decode_block_size": 32}, "48 and 32 tokens can't be converted"),
        ({"decode_block_size": 32, "way": "chunk-push"}, "landing zone"),
        ({"decode_block_size": 32, "connector": "store", "tiers": ("disk:/x",)}, "not in a store"),
    ],
)
def test_connectors_that_can_not_be_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        make(**settings)


def make(
    connector: str = "", tiers: tuple[str, ...] = (), way: str = "auto", **settings: Any
) -> ServeConfig:
    parsed = tuple(parse_tier(text) for text in tiers)
    return ServeConfig(
        num_prefill=1,
        num_decode=1,
        connector=ConnectorKind.parse(connector, parsed),
        tiers=parsed,
        gateway=GatewayConfig(handoff=Handoff(way)),
        **settings,
    )


def test_tiers_alone_mean_multi() -> None:
    tiers = (parse_tier("disk:/var/kv?limit=1G"),)
    assert ConnectorKind.parse("", tiers) is ConnectorKind.MULTI
    assert ConnectorKind.parse("", ()) is ConnectorKind.P2P
