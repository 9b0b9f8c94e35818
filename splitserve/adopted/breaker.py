"""When a server that answers its polls is left out, since requests fail there. Pure."""

from __future__ import annotations

FAULTS = 3  # in a row
FIRST_S = 1.0
LONGEST_S = 30.0


class Breaker:
    """Counts the server's faults, never the client's. After so many in a row it is open for a
    while, doubled each time; then one more fault opens it again, and a success closes it."""

    def __init__(self) -> None:
        self._num_faults = 0
        self._pause_s = FIRST_S
        self._until_s = float("-inf")

    def fault(self, now_s: float) -> None:
        self._num_faults += 1
        if self._num_faults >= FAULTS and not self.is_open(now_s):
            self._until_s = now_s + self._pause_s
            self._pause_s = min(LONGEST_S, 2 * self._pause_s)

    def success(self) -> None:
        self._num_faults = 0
        self._pause_s = FIRST_S
        self._until_s = float("-inf")

    def is_open(self, now_s: float) -> bool:
        return now_s < self._until_s

    def open_s(self, now_s: float) -> float:
        """How much longer."""
        return max(0.0, self._until_s - now_s)
