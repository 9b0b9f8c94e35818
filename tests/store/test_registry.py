from __future__ import annotations

from pathlib import Path

import pytest

from splitserve.config import parse_bytes
from splitserve.errors import ConfigError
from splitserve.sizes import parse_size
from splitserve.store.base import Policy
from splitserve.store.registry import DEFAULT_LIMITS, TIERS, TierSpec, make_tier, parse_tier

GIB = 1 << 30


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("memory:?limit=2G", TierSpec("memory", "", 2 * GIB)),
        ("memory:", TierSpec("memory", "", DEFAULT_LIMITS["memory"])),
        ("memory:unix:some/name", TierSpec("memory", "unix:some/name", DEFAULT_LIMITS["memory"])),
        (
            "disk:/var/kv?limit=10G&ttl=3600&policy=lru",
            TierSpec("disk", "/var/kv", 10 * GIB, 3600.0),
        ),
        ("disk:relative/kv", TierSpec("disk", "relative/kv", DEFAULT_LIMITS["disk"])),
        ("shared_storage:/mnt/kv?limit=512M", TierSpec("shared_storage", "/mnt/kv", GIB // 2)),
        (
            "redis://host:6379/0?limit=2G&policy=frequency&timeout=.5",
            TierSpec("redis", "//host:6379/0", 2 * GIB, 0.0, Policy.FREQUENCY, 0.5),
        ),
        ("redis:/run/redis.sock", TierSpec("redis", "/run/redis.sock")),
        ("mooncake://host:50051", TierSpec("mooncake", "//host:50051")),
    ],
)
def test_what_the_operator_writes(text: str, spec: TierSpec) -> None:
    assert parse_tier(text) == spec


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("tape:/dev/st0", "memory:, disk:, shared_storage:, redis:"),
        ("disk", "known: memory:"),
        ("disk:", "names no place"),
        ("redis:?limit=1G", "names no place"),
        ("disk:/kv?size=1G", "limit, ttl, policy, timeout"),
        ("disk:/kv?limit=1G&limit=2G", "twice"),
        ("disk:/kv?limit=lots", "'lots' is not a size"),
        ("disk:/kv?limit=0", "'0' is not a size"),
        ("disk:/kv?policy=random", "lru, frequency"),
        ("disk:/kv?ttl=soon", "positive number of seconds"),
        ("disk:/kv?ttl=-1", "positive number of seconds"),
        ("disk:/kv?ttl=nan", "positive number of seconds"),
        ("disk:/kv?timeout=inf", "positive number of seconds"),
        ("disk:/kv?limit", "'' is not a size"),
    ],
)
def test_what_is_unknown_is_refused(text: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_tier(text)
    assert says in caught.value.message


def test_a_tier_can_be_moved() -> None:
    spec = parse_tier("memory:?limit=1G&policy=frequency")
    assert spec.at("unix:here") == parse_tier("memory:unix:here?limit=1G&policy=frequency")


def test_an_unknown_tier_names_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="memory, disk"):
        make_tier(TierSpec("tape"), b"m", 1)


def test_a_block_has_a_size(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="0 bytes"):
        make_tier(TierSpec("disk", str(tmp_path)), b"m", 0)


def test_a_missing_library_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TIERS, "redis", ("no.such.module", "RedisTier", "redis"))
    with pytest.raises(ConfigError) as caught:
        make_tier(parse_tier("redis://host"), b"m", 1)
    assert "splitserve[redis]" in caught.value.advice


def test_sizes_as_settings_have_them() -> None:
    assert parse_size("1.5K") == 1536
    assert [parse_bytes(text) for text in ("2GiB", "auto", "10")] == [2 * GIB, None, 10]
    with pytest.raises(ConfigError) as caught:
        parse_bytes("many")
    assert caught.value.message == "'many' is not a size."
    assert caught.value.advice == "Examples: 512M, 2G, auto."
