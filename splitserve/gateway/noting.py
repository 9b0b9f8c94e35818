"""What workers tell of a leg, written into its request's timeline on the gateway's clock."""

from __future__ import annotations

from splitserve import wire
from splitserve.gateway.hub import WorkerHub
from splitserve.gateway.legs import LegStream
from splitserve.moments import Moment, Timeline


def note_started(timeline: Timeline, stream: LegStream, started: wire.Started) -> None:
    at_s = stream.opened_s + started.queued_s
    timeline.mark(Moment.PREFILL_STARTED, at_s, stream.worker_id)
    if timeline.cached_tokens is None:
        timeline.cached_tokens = started.cached_tokens


def note_prefilled(
    timeline: Timeline, hub: WorkerHub, stream: LegStream, ended: wire.PrefillEnded
) -> None:
    start_s = timeline.last(Moment.PREFILL_STARTED) or stream.opened_s
    timeline.mark(Moment.PREFILL_ENDED, start_s + ended.prefill_s, stream.worker_id)
    hub.rates.note_prefill(ended.computed_tokens, ended.prefill_s)


def note_loaded(timeline: Timeline, hub: WorkerHub, loaded: wire.Loaded) -> None:
    """KV of the prompt came from elsewhere, before the leg started."""
    timeline.loaded_tokens += loaded.num_tokens
    timeline.load_s += loaded.seconds
    if loaded.num_tokens:
        timeline.loaded_from = loaded.source
    if loaded.reason:
        timeline.notes.append(f"load from {loaded.source} failed: {loaded.reason}")
    elif loaded.num_tokens:
        timeline.notes.append(f"loaded {loaded.num_tokens} tokens from {loaded.source}")
    if loaded.source in hub.workers:
        hub.rates.note_transfer(loaded.num_bytes, loaded.seconds)


def note_fetched(
    timeline: Timeline, hub: WorkerHub, stream: LegStream, fetched: wire.FetchEnded, now_s: float
) -> None:
    """The transfer's end, on our clock: a handoff by parts stood still between them."""
    timeline.mark(Moment.TRANSFER_ENDED, now_s, stream.worker_id)
    timeline.transfer_s = fetched.transfer_s
    timeline.transfer_bytes += fetched.num_bytes
    timeline.reused_tokens = fetched.reused_tokens
    timeline.transfer_proof = fetched.proof
    if fetched.missing_tokens:
        timeline.notes.append(
            f"{stream.worker_id} computes {fetched.missing_tokens} tokens of the prompt that the "
            "store does not have"
        )
    hub.rates.note_transfer(fetched.num_bytes, fetched.transfer_s)
