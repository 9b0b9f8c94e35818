"""How wrong predictions were, and so how likely a promise is missed."""

from __future__ import annotations

import math

_WEIGHT = 0.05  # of the newest
PRIOR_SIGMA = 0.5
MIN_SIGMA = 0.05


class Residuals:
    """Of ln(measured / predicted): moving mean and spread. Times are taken as log-normal."""

    def __init__(self) -> None:
        self.mean = 0.0
        self._square = PRIOR_SIGMA**2
        self.num = 0

    @property
    def sigma(self) -> float:
        return max(MIN_SIGMA, math.sqrt(self._square))

    def note(self, predicted_s: float, measured_s: float) -> None:
        if not (predicted_s > 0 and measured_s > 0):
            return
        residual = max(-3.0, min(3.0, math.log(measured_s / predicted_s)))
        self.num += 1
        weight = max(_WEIGHT, 1.0 / (self.num + 1))
        off = residual - self.mean
        self.mean += weight * off
        self._square += weight * (off * off - self._square)

    def corrected(self, predicted_s: float) -> float:
        """The median that is to be expected."""
        return predicted_s * math.exp(self.mean)

    def p_exceeds(self, predicted_s: float, limit_s: float) -> float:
        """Probability that the measured time will be over the limit."""
        if predicted_s <= 0:
            return 0.0
        if limit_s <= 0:
            return 1.0
        ratio = math.log(limit_s / self.corrected(predicted_s)) / self.sigma
        return 0.5 * math.erfc(ratio / math.sqrt(2.0))
