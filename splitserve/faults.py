"""Delays and damage at named points, set by the operator to see what then happens.

The chaos tests use them to hold a request in one state while something is killed. Without a
setting nothing is injected. Points:

  seal          before the digests of a lease are computed
  fetch.begin   before the first block is copied
  fetch.block   before the first block and after each one (between two, they can be cancelled)
  fetch.verify  after the last block was copied, before its proof
  push.begin    before a part, or a layer of it, is written to a landing
  push.block    after each block, or layer of one, was written
  find          before another worker, or the store, is asked who has a prompt's blocks
  save          before blocks are handed to the store
  step          after a step of the engine, when its frame has left

Setting: comma-separated `point=delay:SECONDS`, `point=hold:PATH` (wait as long as the file exists;
`{worker}` in PATH is the worker's id) or `fetch.block=flip` (flip one bit of each block copied).
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path

from splitserve.errors import ConfigError

POINTS = (
    "seal",
    "fetch.begin",
    "fetch.block",
    "fetch.verify",
    "push.begin",
    "push.block",
    "find",
    "save",
    "step",
)

_HOLD_PERIOD_S = 0.01


class Faults:
    """Parsed setting. `hit` is called at each point."""

    def __init__(self, setting: str = "") -> None:
        self._delays_s: dict[str, float] = {}
        self._holds: dict[str, Path] = {}
        self._flips: set[str] = set()
        for part in filter(None, (x.strip() for x in setting.split(","))):
            self._parse(part)

    def _parse(self, part: str) -> None:
        point, _, action = part.partition("=")
        kind, _, argument = action.partition(":")
        if point not in POINTS:
            raise ConfigError(f"Unknown fault point {point!r}; known: {', '.join(POINTS)}.")
        try:
            if kind == "flip" and point == "fetch.block":
                self._flips.add(point)
                return
            if kind == "delay":
                self._delays_s[point] = float(argument)
                return
            if kind == "hold" and argument:
                self._holds[point] = Path(argument)
                return
        except ValueError:
            pass
        raise ConfigError(
            f"Fault {part!r}: expected {point}=delay:SECONDS, {point}=hold:PATH or {point}=flip."
        )

    @property
    def delays_s(self) -> Mapping[str, float]:
        return self._delays_s

    def hit(self, point: str, cancelled: threading.Event) -> None:
        """Wait as set, or until cancelled."""
        delay_s = self._delays_s.get(point)
        if delay_s:
            cancelled.wait(delay_s)
        path = self._holds.get(point)
        while path is not None and path.exists() and not cancelled.wait(_HOLD_PERIOD_S):
            pass

    def flips(self, point: str) -> bool:
        """Whether to damage the block at hand."""
        return point in self._flips
