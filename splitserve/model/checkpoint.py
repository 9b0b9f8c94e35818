"""Whether the files of a model hold its weights: all of them, of the right shapes, and no others.

transformers fills in at random what it does not find and only logs that, and it leaves aside what
it has no place for. The self-check could not tell: both of its sides would have the same weights.
"""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from splitserve.errors import ModelUnavailable
from splitserve.model.selfcheck import FOREIGN

_NUM_NAMED = 3

_UNMERGEABLE = re.compile(r"^([\w.]+) *\| *CONVERSION", re.MULTILINE)
"""In transformers' report: a tensor to be made of several, such as all experts of a layer."""

_BUFFERS = re.compile(
    r"(^|\.)(rotary_emb\.inv_freq|(attn|attention)\.masked_bias|attn\.bias|position_ids)$"
)
"""What older versions of transformers saved although it follows from the configuration: rotary
frequencies, causal masks, positions. What a class declares itself, transformers has left out."""


def require_complete(path: Path, told: dict[str, Any]) -> None:
    """Raise ModelUnavailable, naming tensors, if the files hold other weights than the model has.

    told: the loading info of from_pretrained(…, ignore_mismatched_sizes=True). Its missing keys
    are without those that are tied to others or that the model's class declares to be optional.

    Tensors of no use are refused, since they show that config.json is of another model: one with
    fewer layers, without biases, or of the text part of one that also sees.
    """
    faults = []
    if missing := sorted(told["missing_keys"]):
        faults.append(f"the weights lack {_named(missing)}")
    if mismatched := sorted(told["mismatched_keys"]):
        names = [f"{name} {list(found)}, not {list(needed)}" for name, found, needed in mismatched]
        faults.append(f"the weights have other shapes than config.json tells: {_named(names)}")
    if unexpected := sorted(key for key in told["unexpected_keys"] if not _BUFFERS.search(key)):
        faults.append(f"config.json tells of a model that has no {_named(unexpected)}")
    if faults:
        raise ModelUnavailable(f"{path} can't be loaded: {'; '.join(faults)}.")


def require_finite(path: Path, module: torch.nn.Module) -> None:
    """Raise ModelUnavailable, naming tensors, if weights hold NaN or infinities."""
    bad = [name for name, weights in module.named_parameters() if not _is_finite(weights)]
    if bad:
        raise ModelUnavailable(f"{path} can't be loaded: weights hold NaN or inf: {_named(bad)}.")


@contextlib.contextmanager
def told_here(path: Path) -> Iterator[None]:
    """Load inside: transformers' own table of what it found missing stays out of the log, and what
    can't be read raises ModelUnavailable in one line."""
    said: list[str] = []

    def keep(record: logging.LogRecord) -> bool:
        said.append(record.getMessage())
        return False

    logger = logging.getLogger("transformers.modeling_utils")
    logger.addFilter(keep)
    try:
        yield
    except (*FOREIGN, OSError, ImportError, SafetensorError) as error:
        if unmergeable := _UNMERGEABLE.findall("\n".join(said)):
            why = f"the weights hold not all parts of {_named(unmergeable)}"
        else:
            why = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
        raise ModelUnavailable(f"{path} can't be loaded: {why}.") from error
    finally:
        logger.removeFilter(keep)


def _named(names: Iterable[str]) -> str:
    """'a', 'a, b', or 'a, b, c and 9 more'."""
    names = list(names)
    more = len(names) - _NUM_NAMED
    return ", ".join(names[:_NUM_NAMED]) + (f" and {more} more" if more > 0 else "")


def _is_finite(weights: torch.Tensor) -> bool:
    # one pass without a mask of the weights' size; a sum may overflow where no weight is infinite
    total = weights.sum(dtype=torch.float32)
    return bool(torch.isfinite(total)) or bool(torch.isfinite(weights).all())
