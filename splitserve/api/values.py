"""Readers of single JSON values: each returns the value or raises InvalidValue.

A message names the field (`param`), what was expected and what came. None means "not given"; a
JSON null counts as not given, as in OpenAI's API.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from splitserve.errors import InvalidValue

_MAX_SHOWN_CHARS = 60


def show(value: object) -> str:
    """A value as its sender would recognise it, cut to a readable length."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list):
        return f"a list of {len(value)}" if value else "an empty list"
    text = repr(value) if not isinstance(value, str) else f'"{value}"'
    return text if len(text) <= _MAX_SHOWN_CHARS else text[: _MAX_SHOWN_CHARS - 1] + "…"


def wrong(param: str, expected: str, got: object) -> InvalidValue:
    return InvalidValue(f"{param} must be {expected}, not {show(got)}.", param=param)


def boolean(body: Mapping[str, Any], name: str, default: bool = False) -> bool:
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise wrong(name, "true or false", value)
    return value


def string(body: Mapping[str, Any], name: str) -> str | None:
    value = body.get(name)
    if value is not None and not isinstance(value, str):
        raise wrong(name, "a string", value)
    return value


def number(
    body: Mapping[str, Any], name: str, low: float, high: float, *, above_low: bool = False
) -> float | None:
    """A finite number in [low, high], or (low, high] with above_low."""
    value = body.get(name)
    if value is None:
        return None
    bracket = "(" if above_low else "["
    expected = f"a number in {bracket}{low:g}, {high:g}]"
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise wrong(name, expected, value)
    # compared before float(): an integer may be too large for a float
    if not low <= value <= high or (above_low and value == low) or not math.isfinite(value):
        raise wrong(name, expected, value)
    return float(value)


def integer(body: Mapping[str, Any], name: str, low: int, high: int | None = None) -> int | None:
    """An integer in [low, high]; 3.0 is not an integer, nor is true."""
    value = body.get(name)
    if value is None:
        return None
    expected = f"an integer of at least {low}" if high is None else f"an integer in [{low}, {high}]"
    if isinstance(value, bool) or not isinstance(value, int):
        raise wrong(name, expected, value)
    if value < low or (high is not None and value > high):
        raise wrong(name, expected, value)
    return value


def token_ids(value: list[Any], param: str) -> tuple[int, ...]:
    """A list of non-negative integers."""
    for item in value:
        if isinstance(item, bool) or not isinstance(item, int) or item < 0:
            raise wrong(param, "a list of token ids (integers of at least 0)", item)
    return tuple(value)
