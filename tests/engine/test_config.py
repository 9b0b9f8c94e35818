"""Settings that can't work are refused with a reason, before anything is loaded."""

from __future__ import annotations

import pytest

from splitserve.config import GatewayConfig, Handoff, Network, ServeConfig
from splitserve.errors import ConfigError

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
