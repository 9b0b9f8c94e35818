"""The tiers by name, imported when asked for, and how the operator writes one down.

  memory:?limit=1G                         the host's segment (store.memory_server), started for us
  memory:unix:NAME                         the one that is served at this abstract Unix socket
  disk:/var/kv?limit=10G&ttl=3600          files of this host
  shared_storage:/mnt/kv?limit=10G         files that several hosts see
  redis://host:6379/0?limit=2G&policy=lru  a redis server; redis:/run/redis.sock by a Unix socket
  mooncake://host:50051?limit=1G           the pool of a Mooncake master, and what we add to it

Options: limit (bytes of blocks, all namespaces; of mooncake, what each worker adds to the pool),
ttl (seconds; never, unless told), policy (lru or frequency), timeout (seconds after which what does
not answer can't be reached).
"""

from __future__ import annotations

import importlib
from typing import Any, cast

import msgspec

from splitserve.errors import ConfigError
from splitserve.sizes import parse_size
from splitserve.store.base import IO_TIMEOUT_S, Policy, Tier, TierConfig

TIERS = {
    "memory": ("splitserve.store.memory", "MemoryTier", ""),
    "disk": ("splitserve.store.disk", "DiskTier", ""),
    "shared_storage": ("splitserve.store.shared_storage", "SharedStorageTier", ""),
    "redis": ("splitserve.store.redis", "RedisTier", "redis"),
    "mooncake": ("splitserve.store.mooncake", "MooncakeTier", "mooncake"),
}
"""Name: module, class, and the extra of this package that brings what it imports. A class is made
from the place that the operator wrote and a TierConfig."""

DEFAULT_LIMITS = {"memory": 1 << 30, "disk": 10 << 30, "shared_storage": 10 << 30}
"""Where nothing else keeps a tier from growing. A server has limits of its own."""

OPTIONS = ("limit", "ttl", "policy", "timeout")


class TierSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A tier as it was asked for. place: what follows the name up to the options: a directory, a
    server's address, or nothing."""

    name: str
    place: str = ""
    limit_bytes: int = 0
    ttl_s: float = 0.0
    policy: Policy = Policy.LRU
    timeout_s: float = IO_TIMEOUT_S

    def at(self, place: str) -> TierSpec:
        """The same in another place: where a server was started for it."""
        return msgspec.structs.replace(self, place=place)


def parse_tier(text: str) -> TierSpec:
    """Raise ConfigError naming what is known, for an unknown tier or option, or a bad value."""
    name, colon, rest = text.partition(":")
    if name not in TIERS or not colon:
        raise ConfigError(
            f"Unknown tier {text!r}; known: {', '.join(f'{known}:' for known in TIERS)}.",
            advice="Examples: disk:/var/kv?limit=10G, redis://host:6379/0.",
        )
    place, _, query = rest.partition("?")
    if not place and name != "memory":
        raise ConfigError(f"Tier {text!r} names no place.", advice=f"Example: {_EXAMPLES[name]}.")
    values: dict[str, Any] = {"limit_bytes": DEFAULT_LIMITS.get(name, 0)}
    seen = set()
    for part in filter(None, query.split("&")):
        option, _, value = part.partition("=")
        if option not in OPTIONS:
            raise ConfigError(
                f"Unknown option {option!r} of tier {text!r}; known: {', '.join(OPTIONS)}."
            )
        if option in seen:
            raise ConfigError(f"Option {option} is given twice in tier {text!r}.")
        seen.add(option)
        values |= _parse_option(option, value)
    return TierSpec(name, place, **values)


_EXAMPLES = {
    "disk": "disk:/var/kv",
    "shared_storage": "shared_storage:/mnt/kv",
    "redis": "redis://localhost:6379/0",
    "mooncake": "mooncake://localhost:50051",
}


def _parse_option(option: str, value: str) -> dict[str, Any]:
    if option == "limit":
        return {"limit_bytes": parse_size(value)}
    if option == "policy":
        if value not in list(Policy):
            raise ConfigError(f"Unknown policy {value!r}; known: {', '.join(Policy)}.")
        return {"policy": Policy(value)}
    try:
        seconds = float(value)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise ConfigError(f"{option}={value!r}: expected a positive number of seconds.")
    return {f"{option}_s": seconds}


def make_tier(spec: TierSpec, namespace: bytes, block_bytes: int) -> Tier:
    """Open a tier for blocks of one size and meaning. Raise ConfigError for an unknown name, a
    library that is missing or a place that can't be one. What can't be reached now may come back,
    so that is a StoreError of the first use."""
    if spec.name not in TIERS:
        raise ConfigError(f"Unknown tier {spec.name!r}; known: {', '.join(TIERS)}.")
    if block_bytes <= 0:
        raise ConfigError(f"A block of {block_bytes} bytes can't be kept.")
    module, class_name, extra = TIERS[spec.name]
    config = TierConfig(
        namespace, block_bytes, spec.limit_bytes, spec.ttl_s, spec.policy, spec.timeout_s
    )
    try:
        made = getattr(importlib.import_module(module), class_name)(spec.place, config)
    except ImportError as error:
        raise ConfigError(
            f"Tier {spec.name} can't be had here: {error}.",
            advice=f"pip install 'splitserve[{extra}]'." if extra else "",
        ) from error
    return cast(Tier, made)
