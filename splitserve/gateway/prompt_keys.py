"""The keys of one request's tokens, computed once."""

from __future__ import annotations

from collections.abc import Sequence

from splitserve import wire
from splitserve.kv.keys import GRANULE, extend_keys, root_key


class PromptKeys:
    """Of granules, shortened as workers tell them; grows with the answer."""

    def __init__(self, identity: bytes, salt: str) -> None:
        self._root = root_key(identity, salt)
        self._whole: list[bytes] = []
        self._short: list[bytes] = []

    def granules(self, token_ids: Sequence[int]) -> list[bytes]:
        """Of all full granules but one that the last token ends: that token is computed in any
        case. token_ids must begin with those of the calls before."""
        extend_keys(self._whole, self._root, token_ids)
        self._short += [key[: wire.KEY_BYTES] for key in self._whole[len(self._short) :]]
        return self._short[: (len(token_ids) - 1) // GRANULE]

    def blocks(self, token_ids: Sequence[int], block_size: int) -> list[bytes]:
        """Of full blocks, the same way."""
        per_block = block_size // GRANULE
        return self.granules(token_ids)[per_block - 1 :: per_block]
