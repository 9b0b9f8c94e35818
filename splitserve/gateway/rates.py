"""How fast workers were: what predictions of the next request start from."""

from __future__ import annotations

PRIOR_TRANSFER_BYTES_PER_S = 1e9
PRIOR_PREFILL_TOKENS_PER_S = 1000.0
PRIOR_OUTPUT_TOKENS = 128.0
_OUTPUT_WEIGHT = 0.05
_WEIGHT = 0.2  # of the newest observation


class Rates:
    """Moving means over all workers, of transfers and prefills that are not too small: those say
    more of the round trip, or the step, than of the rate."""

    MIN_BYTES = 1 << 16
    MIN_TOKENS = 32

    def __init__(self) -> None:
        self.transfer_bytes_per_s = PRIOR_TRANSFER_BYTES_PER_S
        self.prefill_tokens_per_s = PRIOR_PREFILL_TOKENS_PER_S
        self.output_tokens = PRIOR_OUTPUT_TOKENS  # of an answer

    def note_transfer(self, num_bytes: int, seconds: float) -> None:
        if num_bytes >= self.MIN_BYTES and seconds > 0:
            new = num_bytes / seconds
            self.transfer_bytes_per_s += _WEIGHT * (new - self.transfer_bytes_per_s)

    def note_prefill(self, num_tokens: int, seconds: float) -> None:
        if num_tokens >= self.MIN_TOKENS and seconds > 0:
            new = num_tokens / seconds
            self.prefill_tokens_per_s += _WEIGHT * (new - self.prefill_tokens_per_s)

    def note_output(self, num_tokens: int) -> None:
        """An answer ended by itself."""
        self.output_tokens += _OUTPUT_WEIGHT * (num_tokens - self.output_tokens)
