"""Sizes in bytes as people write them."""

from __future__ import annotations

from splitserve.errors import ConfigError

_FACTORS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def parse_size(text: str, examples: str = "512M, 2G") -> int:
    """`512M`, `2G`, `2GiB`, `1073741824`: suffixes in powers of 1024. Raise ConfigError for what is
    no size, or not positive, with the examples as advice."""
    stripped = text.strip().upper().removesuffix("IB").removesuffix("B")
    factor = _FACTORS.get(stripped[-1:], 1)
    digits = stripped[:-1] if stripped[-1:] in _FACTORS else stripped
    try:
        num = int(float(digits) * factor)
    except (ValueError, OverflowError):
        num = 0
    if num <= 0:
        raise ConfigError(f"{text!r} is not a size.", advice=f"Examples: {examples}.")
    return num
