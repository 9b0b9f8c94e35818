"""How long a step takes: piecewise linear in batched tokens, linear in attended context.

    seconds(n, a) = f(n) + c a

n: tokens in the batch; a: sum over them of the positions that each attends to; f: linear between
values at KNOTS, and on with the last slope beyond them. This is the shape of DistServe's and
Splitwise's models: flat while weights are read (few tokens), linear when GEMMs are computed, and
attention by itself. Fitted to relative errors of the latest steps of each size, so that neither
many small steps nor a slow minute forgets the others.
"""

from __future__ import annotations

import bisect
from collections import deque

import msgspec
import numpy as np
import numpy.typing as npt

from splitserve.errors import ConfigError

Floats = npt.NDArray[np.float64]

KNOTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)
PRIOR_STEP_S, PRIOR_TOKEN_S = 5e-3, 1e-3
PRIOR_SIGMA = 0.5  # of the logarithm: nothing is known yet
SAMPLES_KEPT = 64  # per knot
_FIT_EVERY = 16
_SMOOTH, _STAY = 1e-2, 1e-4  # weight of a bend, and of leaving the last fit, beside one sample
_OUTLIER = 2.5  # standard deviations from which on a sample weighs less
_MIN_S = 1e-5

_KNOTS = np.array(KNOTS, dtype=np.float64)


class FitError(msgspec.Struct, frozen=True):
    """Relative errors of the kept steps: |predicted / measured - 1|."""

    num_steps: int
    median: float
    p95: float


class StepModelState(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A fitted model as JSON. knot_s: seconds at each of knots, without attention; context_s: per
    attended position; sigma: standard deviation of ln(measured / predicted)."""

    knots: tuple[int, ...]
    knot_s: tuple[float, ...]
    context_s: float
    sigma: float
    error: FitError


class StepModel:
    """Learns from steps of one worker, or of several that are alike."""

    def __init__(self) -> None:
        self.knot_s: Floats = PRIOR_STEP_S + PRIOR_TOKEN_S * _KNOTS
        self.context_s = 0.0
        self.sigma = PRIOR_SIGMA
        self.num_steps = 0
        self._samples: list[deque[tuple[float, float, float]]] = [
            deque(maxlen=SAMPLES_KEPT) for _ in KNOTS
        ]
        self._num_unfitted = 0

    def begin_as(self, other: StepModel) -> None:
        """Predict as another does, until there are steps of its own."""
        self.knot_s, self.context_s = other.knot_s.copy(), other.context_s

    @property
    def is_fitted(self) -> bool:
        return self.num_steps >= _FIT_EVERY

    def add(self, num_tokens: int, context: int, seconds: float) -> bool:
        """A step was measured; returns whether the model was fitted anew."""
        if num_tokens < 1 or not seconds > 0:
            return False
        bucket = min(bisect.bisect_left(KNOTS, num_tokens), len(KNOTS) - 1)
        self._samples[bucket].append((float(num_tokens), float(context), seconds))
        self.num_steps += 1
        self._num_unfitted += 1
        if self._num_unfitted < min(_FIT_EVERY * 4, max(_FIT_EVERY, self.num_steps // 8)):
            return False
        self._num_unfitted = 0
        self._fit()
        return True

    def predict(self, num_tokens: float, context: float) -> float:
        """Seconds of a step."""
        last = len(KNOTS) - 2
        left = min(bisect.bisect_right(KNOTS, num_tokens) - 1, last) if num_tokens > 1 else 0
        low, high = KNOTS[left], KNOTS[left + 1]
        share = (max(num_tokens, 1.0) - low) / (high - low)
        first, second = float(self.knot_s[left]), float(self.knot_s[left + 1])
        return first + share * (second - first) + self.context_s * context

    def prefill_s(self, num_tokens: int, first: int, budget: int) -> float:
        """Seconds to compute positions [first, first + num_tokens) in chunks of budget tokens,
        alone in the batch."""
        total, start = 0.0, first
        while num_tokens > 0:
            size = min(budget, num_tokens)
            total += self.predict(size, size * (start + (size + 1) / 2))
            start, num_tokens = start + size, num_tokens - size
        return total

    def error(self) -> FitError:
        samples = self._all()
        if not len(samples):
            return FitError(0, 0.0, 0.0)
        relative = np.abs(self._predicted(samples) / samples[:, 2] - 1.0)
        median, p95 = np.quantile(relative, (0.5, 0.95))
        return FitError(len(samples), float(median), float(p95))

    def state(self) -> StepModelState:
        return StepModelState(
            KNOTS,
            tuple(round(float(x), 9) for x in self.knot_s),
            self.context_s,
            self.sigma,
            self.error(),
        )

    def to_json(self) -> bytes:
        return msgspec.json.encode(self.state())

    @classmethod
    def from_json(cls, text: bytes) -> StepModel:
        """Raise ConfigError for what is no model of this version."""
        try:
            state = msgspec.json.decode(text, type=StepModelState)
        except msgspec.MsgspecError as error:
            raise ConfigError(f"This is no latency model: {error}.") from None
        if state.knots != KNOTS or len(state.knot_s) != len(KNOTS):
            raise ConfigError(f"This latency model has knots {state.knots}, not {KNOTS}.")
        if min(*state.knot_s, state.sigma) <= 0 or state.context_s < 0:
            raise ConfigError("This latency model predicts times below zero.")
        model = cls()
        model.knot_s = np.array(state.knot_s)
        model.context_s, model.sigma = state.context_s, state.sigma
        model.num_steps = state.error.num_steps
        return model

    # --- inside

    def _all(self) -> Floats:
        """[steps, 3]: tokens, context, seconds."""
        return np.array([x for bucket in self._samples for x in bucket], dtype=np.float64).reshape(
            -1, 3
        )

    def _predicted(self, samples: Floats) -> Floats:
        result: Floats = _basis(samples[:, 0]) @ self.knot_s + self.context_s * samples[:, 1]
        return result

    def _fit(self) -> None:
        """Least squares of relative errors; steps far off (a core was taken away) weigh less."""
        samples = self._all()
        weight = 1.0 / np.maximum(samples[:, 2], _MIN_S)
        self._solve(samples, weight)
        residual = np.log(np.maximum(samples[:, 2], _MIN_S) / self._predicted(samples))
        spread = 1.4826 * float(np.median(np.abs(residual - np.median(residual)))) + 1e-3
        weight *= np.minimum(1.0, _OUTLIER * spread / np.maximum(np.abs(residual), 1e-9))
        self._solve(samples, weight)
        residual = np.log(np.maximum(samples[:, 2], _MIN_S) / self._predicted(samples))
        self.sigma = max(0.01, float(np.sqrt(np.mean(residual**2))))

    def _solve(self, samples: Floats, weight: Floats) -> None:
        for with_context in (True, False):
            rows = [_basis(samples[:, 0]), samples[:, 1:2] * float(with_context)]
            design = np.concatenate(rows, axis=1) * weight[:, None]
            target = samples[:, 2] * weight
            penalty, wanted = self._penalty()
            matrix = design.T @ design + penalty
            solved = np.linalg.solve(matrix, design.T @ target + wanted)
            if solved[-1] >= 0.0:
                break
        self.knot_s = np.maximum.accumulate(np.maximum(solved[:-1], _MIN_S))
        self.context_s = float(max(0.0, solved[-1]))

    def _penalty(self) -> tuple[Floats, Floats]:
        """What holds values that no step told: a straight line on, and the last fit."""
        num = len(KNOTS)
        bends = np.zeros((num - 2, num + 1))
        for j in range(1, num - 1):
            left, right = _KNOTS[j] - _KNOTS[j - 1], _KNOTS[j + 1] - _KNOTS[j]
            scale = _KNOTS[j] / max(self.knot_s[j], _MIN_S)
            bends[j - 1, j - 1 : j + 2] = (
                scale / left,
                -scale / left - scale / right,
                scale / right,
            )
        stay = np.append(_STAY / np.maximum(self.knot_s, _MIN_S), _STAY * 1e6)
        matrix = (_SMOOTH * bends).T @ (_SMOOTH * bends) + np.diag(stay**2)
        return matrix, stay**2 * np.append(self.knot_s, self.context_s)


def segments(knot_s: Floats) -> tuple[Floats, Floats]:
    """(base, slope), [..., knots - 1]: of f(n) = base + slope n between two knots."""
    slope: Floats = np.diff(knot_s, axis=-1) / np.diff(_KNOTS)
    base: Floats = knot_s[..., :-1] - slope * _KNOTS[:-1]
    return base, slope


def segment_of(num_tokens: Floats) -> npt.NDArray[np.int64]:
    """Between which two knots each number is: KNOTS are the powers of two."""
    exponent = np.frexp(num_tokens)[1] - 1
    result: npt.NDArray[np.int64] = exponent.clip(0, len(KNOTS) - 2)
    return result


def _basis(num_tokens: Floats) -> Floats:
    """[n, knots]: weights of the knots' values."""
    left = segment_of(num_tokens)
    share = (num_tokens - _KNOTS[left]) / (_KNOTS[left + 1] - _KNOTS[left])
    basis = np.zeros((len(num_tokens), len(KNOTS)))
    rows = np.arange(len(num_tokens))
    basis[rows, left], basis[rows, left + 1] = 1.0 - share, share
    return basis
