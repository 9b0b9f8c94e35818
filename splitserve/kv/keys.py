"""Keys of granules: what was computed, not its bytes (design 3.1).

key_i = blake2b-256(key_{i-1} | the granule's token ids as int32, little endian), rooted in
blake2b-256(model identity | tenant's salt). A prefix of tokens has the same keys in any process.
"""

from __future__ import annotations

import hashlib
import sys
from array import array
from collections.abc import Sequence

GRANULE = 16  # tokens per key
_KEY_BYTES = 32


def root_key(identity: bytes, salt: str = "") -> bytes:
    """The parent of a sequence's first granule."""
    return hashlib.blake2b(identity + b"\0" + salt.encode(), digest_size=_KEY_BYTES).digest()


def extend_keys(keys: list[bytes], root: bytes, token_ids: Sequence[int]) -> None:
    """Append to `keys` those of the full granules of `token_ids` that it lacks.

    keys[i] must be the key of tokens [16 i, 16 (i + 1)); the unfinished tail never gets one.
    """
    parent = keys[-1] if keys else root
    for start in range(len(keys) * GRANULE, len(token_ids) - GRANULE + 1, GRANULE):
        granule = array("i", token_ids[start : start + GRANULE])
        if sys.byteorder == "big":
            granule.byteswap()
        parent = hashlib.blake2b(parent + granule.tobytes(), digest_size=_KEY_BYTES).digest()
        keys.append(parent)


def granule_keys(root: bytes, token_ids: Sequence[int]) -> list[bytes]:
    """The keys of all full granules of `token_ids`."""
    keys: list[bytes] = []
    extend_keys(keys, root, token_ids)
    return keys
