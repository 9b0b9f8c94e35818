"""How fast workers were: what predictions of the next request start from."""

from __future__ import annotations

PRIOR_TRANSFER_BYTES_PER_S = 1e9
PRIOR_PREFILL_TOKENS_PER_S = 1000.0
_WEIGHT = 0.2  # of the newest observation


class Rates:
    """Moving means over all workers, of transfers with at least MIN_BYTES."""

    MIN_BYTES = 1 << 16  # less says more of the round trip than of the link

    def __init__(self) -> None:
        self.transfer_bytes_per_s = PRIOR_TRANSFER_BYTES_PER_S
        self.prefill_tokens_per_s = PRIOR_PREFILL_TOKENS_PER_S

    def note_transfer(self, num_bytes: int, seconds: float) -> None:
        if num_bytes >= self.MIN_BYTES and seconds > 0:
            new = num_bytes / seconds
            self.transfer_bytes_per_s += _WEIGHT * (new - self.transfer_bytes_per_s)

    def note_prefill(self, num_tokens: int, seconds: float) -> None:
        if num_tokens > 0 and seconds > 0:
            new = num_tokens / seconds
            self.prefill_tokens_per_s += _WEIGHT * (new - self.prefill_tokens_per_s)
