"""The transports by name, imported when asked for: one may need a library that is not installed."""

from __future__ import annotations

import importlib
import importlib.util
from typing import cast

from splitserve.errors import ConfigError
from splitserve.transport.base import Transport
from splitserve.transport.segment import Segment

LOOPBACK = "127.0.0.1"

TRANSPORTS = {
    "shm": ("splitserve.transport.shm", "ShmTransport", ""),
    "tcp": ("splitserve.transport.tcp", "TcpTransport", ""),
    "nixl": ("splitserve.transport.nixl", "NixlTransport", "nixl"),
    "collective": ("splitserve.transport.collective", "CollectiveTransport", ""),
    "mooncake": ("splitserve.transport.mooncake", "MooncakeTransport", "mooncake"),
}
"""Name: module, class, and the extra of this package that brings what it imports."""

LIBRARIES = {"nixl": "nixl_cu12", "mooncake": "mooncake", "collective": "torch"}
"""What a transport imports that may not be installed."""


def is_installed(name: str) -> bool:
    """Whether what the transport imports can be found."""
    return importlib.util.find_spec(LIBRARIES.get(name, "splitserve")) is not None


def make_transport(name: str, segment: Segment, host: str = LOOPBACK) -> Transport:
    """The transport `name` for one segment; raise ConfigError for an unknown name or a library
    that is missing.

    host: the address on which transports that listen do so.
    """
    if name not in TRANSPORTS:
        raise ConfigError(f"Unknown transport {name!r}; known: {', '.join(TRANSPORTS)}.")
    module, class_name, extra = TRANSPORTS[name]
    try:
        made = getattr(importlib.import_module(module), class_name)(segment, host)
    except ImportError as error:
        raise ConfigError(
            f"Transport {name} can't be had here: {error}.",
            advice=f"pip install 'splitserve[{extra}]'." if extra else "",
        ) from error
    return cast(Transport, made)
