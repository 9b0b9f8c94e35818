"""The named moments of a request and what is derived from them: the one place that does.

All times are on the gateway's monotonic clock. What happens inside a worker is placed on it by the
durations that workers report, counted from the moment the gateway handed the leg over.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field


class Moment(enum.StrEnum):
    """In the order in which a split request meets them."""

    ARRIVED = "arrived"
    ADMITTED = "admitted"
    PICKED = "picked"
    PREFILL_QUEUED = "prefill_queued"
    PREFILL_STARTED = "prefill_started"
    PREFILL_ENDED = "prefill_ended"
    TRANSFER_STARTED = "transfer_started"
    TRANSFER_ENDED = "transfer_ended"
    DECODE_QUEUED = "decode_queued"
    FIRST_TOKEN = "first_token"
    SECOND_TOKEN = "second_token"
    FINISHED = "finished"


@dataclass(frozen=True, slots=True)
class Mark:
    moment: Moment
    at_s: float
    worker: str | None
    attempt: int


@dataclass(slots=True)
class Timeline:
    """What happened to one request, and when."""

    marks: list[Mark] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # decisions and retries, in words
    attempt: int = 0
    num_output: int = 0
    cached_tokens: int | None = None
    transfer_s: float | None = None  # spent copying and proving
    transfer_bytes: int = 0
    num_parts: int = 0  # of the handoff that moved before its offer
    exposed_predicted_s: dict[str, float] = field(default_factory=dict)  # by grain
    reused_tokens: int = 0
    loaded_tokens: int = 0  # of the prompt, whose KV came from elsewhere before prefill started
    loaded_from: str = ""  # a worker's id, or `store`
    load_s: float = 0.0
    num_hints_failed: int = 0
    transfer_proof: str = ""
    num_preemptions: int = 0

    def mark(self, moment: Moment, at_s: float, worker: str | None = None) -> None:
        self.marks.append(Mark(moment, at_s, worker, self.attempt))

    def first(self, moment: Moment) -> float | None:
        """When the moment came first."""
        return next((mark.at_s for mark in self.marks if mark.moment is moment), None)

    def last(self, moment: Moment) -> float | None:
        """When the moment came last: after retries, that of the attempt that counted."""
        return next((m.at_s for m in reversed(self.marks) if m.moment is moment), None)

    def workers(self, moment: Moment) -> list[str]:
        """Who did it, over all attempts."""
        return [m.worker for m in self.marks if m.moment is moment and m.worker is not None]

    def _span(self, start: Moment, stop: Moment) -> float | None:
        """From when `start` came last; None if `stop` has not come since."""
        first = last = None
        for mark in self.marks:
            if mark.moment is start:
                first, last = mark.at_s, None
            elif mark.moment is stop:
                last = mark.at_s
        return None if first is None or last is None else last - first

    @property
    def ttft_s(self) -> float | None:
        """Arrival to first token."""
        first, arrived = self.first(Moment.FIRST_TOKEN), self.first(Moment.ARRIVED)
        return None if first is None or arrived is None else first - arrived

    @property
    def tpot_s(self) -> float | None:
        """Mean time per output token after the first."""
        first, finished = self.first(Moment.FIRST_TOKEN), self.first(Moment.FINISHED)
        if first is None or finished is None or self.num_output < 2:
            return None
        return (finished - first) / (self.num_output - 1)

    @property
    def handoff_gap_s(self) -> float | None:
        """First to second token: what a split TTFT does not show (design 3.11)."""
        first, second = self.first(Moment.FIRST_TOKEN), self.first(Moment.SECOND_TOKEN)
        return None if first is None or second is None else second - first

    @property
    def exposed_transfer_s(self) -> float | None:
        """End of prefill to end of the transfer: what moving the KV added to the handoff gap."""
        prefill = self.last(Moment.PREFILL_ENDED)
        ended = self.last(Moment.TRANSFER_ENDED)
        started = self.last(Moment.TRANSFER_STARTED)
        if prefill is None or ended is None or started is None:
            return None
        return max(0.0, ended - max(prefill, started))

    @property
    def hidden_transfer(self) -> float | None:
        """Share of the transfer that went on beside the prefill, 0 to 1."""
        exposed = self.exposed_transfer_s
        if exposed is None or not self.transfer_s:
            return None
        return max(0.0, 1.0 - exposed / self.transfer_s)

    def spans(self) -> dict[str, float]:
        """Seconds by phase, of the last attempt; phases that did not occur are left out."""
        finished = self.last(Moment.FINISHED)
        second = self.first(Moment.SECOND_TOKEN)
        spans = {
            "queue": self._span(Moment.PREFILL_QUEUED, Moment.PREFILL_STARTED),
            "prefill": self._span(Moment.PREFILL_STARTED, Moment.PREFILL_ENDED),
            "load": self.load_s if self.loaded_from else None,
            "transfer": self.transfer_s,
            "exposed_transfer": self.exposed_transfer_s,
            "handoff_gap": self.handoff_gap_s,
            "decode": None if finished is None or second is None else finished - second,
            "ttft": self.ttft_s,
            "tpot": self.tpot_s,
            "total": self._span(Moment.ARRIVED, Moment.FINISHED),
        }
        return {name: span for name, span in spans.items() if span is not None}

    def negative_spans(self) -> list[str]:
        """Names of spans below zero: each is a bug."""
        return [name for name, span in self.spans().items() if span < 0]

    def to_json(self) -> dict[str, object]:
        """For /debug: milliseconds since arrival, spans in milliseconds."""
        origin = self.first(Moment.ARRIVED) or 0.0
        return {
            "moments": [
                {
                    "moment": mark.moment.value,
                    "ms": round((mark.at_s - origin) * 1e3, 3),
                    "worker": mark.worker,
                    "attempt": mark.attempt,
                }
                for mark in sorted(self.marks, key=lambda mark: mark.at_s)
            ],
            "spans_ms": {name: round(span * 1e3, 3) for name, span in self.spans().items()},
            "attempts": self.attempt + 1,
            "output_tokens": self.num_output,
            "cached_tokens": self.cached_tokens,
            "transfer_bytes": self.transfer_bytes,
            "parts": self.num_parts,
            "hidden_transfer": self.hidden_transfer,
            "exposed_predicted_ms": {
                grain: round(seconds * 1e3, 3)
                for grain, seconds in self.exposed_predicted_s.items()
            },
            "reused_tokens": self.reused_tokens,
            "loaded_tokens": self.loaded_tokens,
            "loaded_from": self.loaded_from,
            "hints_failed": self.num_hints_failed,
            "transfer_proof": self.transfer_proof,
            "preemptions": self.num_preemptions,
            "notes": self.notes,
        }
