"""Routing policies by name."""

from __future__ import annotations

import importlib

from splitserve.errors import ConfigError
from splitserve.router.cost import Cost
from splitserve.router.fleet import Fleet
from splitserve.router.policy import Policy
from splitserve.router.simple import LeastLoaded, PrefixAware, RoundRobin

POLICIES: dict[str, type[Policy]] = {
    policy.name: policy for policy in (Cost, LeastLoaded, PrefixAware, RoundRobin)
}


def make_policy(name: str, fleet: Fleet) -> Policy:
    """By its name, or `module:Class` of one that is written elsewhere; raise ConfigError."""
    if name in POLICIES:
        return POLICIES[name](fleet)
    module, colon, attribute = name.partition(":")
    if not colon:
        raise ConfigError(
            f"Unknown routing policy {name!r}; known: {', '.join(POLICIES)}, or module:Class."
        )
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"Routing policy {name} can't be had: {error}.") from error
    if not (isinstance(found, type) and issubclass(found, Policy)):
        raise ConfigError(f"{name} is no splitserve.router.policy.Policy.")
    return found(fleet)
