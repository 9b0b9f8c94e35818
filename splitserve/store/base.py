"""The tier contract: one place that keeps KV blocks by key. It knows bytes, not requests.

A key names what was computed (design 3.1); two writers of one key hold equivalent bytes, so a block
that is there is never written again. A block is kept together with its digest, and is a miss unless
both its key and its digest are right when it is loaded: neither a crash in the middle of a write
nor a flipped byte can poison a tier.

What every tier promises, and the contract suite asserts:

  - `load` fills targets with proved bytes, in order, and stops at the first block that is missing,
    truncated, expired or wrong; what is wrong is removed and counted, not raised;
  - a block is there whole or not at all, whatever died while it was saved;
  - what can't be reached is a StoreError within the timeout, and works again when it is back;
  - it stays within its limit by evicting others, by its policy; a block larger than the limit is
    not kept;
  - a namespace (model identity and KV format) sees only its own blocks, the limit is for all;
  - its methods may be called by two threads at once: one that loads and one that saves.
"""

from __future__ import annotations

import abc
import enum
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Block = npt.NDArray[np.uint8]
"""uint8 [block_bytes], contiguous: a block of a pool, or a place for one."""

IO_TIMEOUT_S = 2.0
"""A server that does not answer for so long can't be reached."""


class Policy(enum.StrEnum):
    """What is evicted first."""

    LRU = "lru"  # what was not used for longest
    FREQUENCY = "frequency"  # what was used least often, old uses counting less


@dataclass(frozen=True, slots=True)
class TierConfig:
    """namespace: of model identity and KV format. limit_bytes: of payload, 0 for none (where the
    tier's server has its own). ttl_s: age at which a block is a miss, 0 for never."""

    namespace: bytes
    block_bytes: int
    limit_bytes: int = 0
    ttl_s: float = 0.0
    policy: Policy = Policy.LRU
    timeout_s: float = IO_TIMEOUT_S


@dataclass(slots=True)
class TierStats:
    """Blocks counted since this process opened the tier; the first two are of what is there now,
    all namespaces, as far as the tier knows."""

    num_blocks: int = 0
    num_bytes: int = 0
    hits: int = 0
    misses: int = 0  # a load that stopped: one each
    saved: int = 0
    evicted: int = 0
    corrupt: int = 0  # truncated or wrong, found by a load


class Tier(abc.ABC):
    """Keeps blocks of one size. Raise StoreError, and only that, if the place can't be reached."""

    name: str

    @abc.abstractmethod
    def find(self, keys: Sequence[bytes]) -> int:
        """How many leading keys are there, in one lookup. Not a promise: a load may find fewer."""

    @abc.abstractmethod
    def missing(self, keys: Sequence[bytes]) -> list[bool]:
        """Of each key whether it is not there, in one lookup: what is worth saving."""

    @abc.abstractmethod
    def load(self, keys: Sequence[bytes], targets: Sequence[Block]) -> int:
        """Fill targets[i] with the block of keys[i], as far as possible. Returns how many leading
        ones are filled and proved; the others' content is undefined. Counts as a use of each."""

    @abc.abstractmethod
    def save(self, keys: Sequence[bytes], blocks: Sequence[Block], digests: Sequence[bytes]) -> int:
        """Keep these blocks; those that are there already are left as they are. digests: xxh3-128
        of each. Returns how many are newly there."""

    @abc.abstractmethod
    def stats(self) -> TierStats:
        """A copy of the counts. Never blocks for long, never raises."""

    @abc.abstractmethod
    def close(self) -> None:
        """Free what it holds; kept blocks stay, if the place outlives us. Idempotent."""
