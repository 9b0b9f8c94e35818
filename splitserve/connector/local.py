"""Connector `local`: nothing moves. For an engine that has no peers."""

from __future__ import annotations

from collections.abc import Sequence

from splitserve.connector.base import Connector, SchedulerSide, WorkerSide
from splitserve.connector.jobs import (
    Event,
    FetchJob,
    FindJob,
    HandoffState,
    PushJob,
    SaveJob,
    SealJob,
)
from splitserve.connector.push import ZoneLender
from splitserve.errors import TransferFailed
from splitserve.kv.lease import Lease
from splitserve.wire import Landing, Offer, Part


class _NoScheduler(SchedulerSide):
    def make_offer(self, lease: Lease, state: HandoffState, digests: list[bytes]) -> Offer:
        raise AssertionError("an engine without peers has nobody to offer KV to")

    def make_part(self, lease: Lease, first: int, blocks: list[int], digests: list[bytes]) -> Part:
        raise AssertionError("an engine without peers has nobody to offer KV to")

    def check_offer(self, offer: Offer, keys: Sequence[bytes], num_tokens: int) -> None:
        raise TransferFailed("This engine has no peers.")


class _NoWorker(WorkerSide):
    def start_seal(self, job: SealJob) -> None:
        raise AssertionError("an engine without peers runs no prefill legs")

    def start_fetch(self, job: FetchJob) -> None:
        raise AssertionError("an offer was admitted that `check_offer` refuses")

    def cancel_fetch(self, request_id: str) -> None:
        pass

    def start_find(self, job: FindJob) -> None:
        raise AssertionError("an engine without peers was given hints")

    def answer(self, ask_id: int, part: Part | None) -> bool:
        raise AssertionError("nobody can ask an engine without peers")

    def start_save(self, job: SaveJob) -> None:
        raise AssertionError("an engine without a store saves nothing")

    def start_push(self, job: PushJob) -> None:
        raise AssertionError("an engine without peers was lent no landing")

    def end_push(self, landing: Landing) -> None:
        raise AssertionError("an engine without peers was lent no landing")

    def meet(self, worker_id: str, epoch: str, address: str) -> None:
        pass

    def end_lease(self, offer: Part | Offer) -> None:
        pass

    def poll(self) -> list[Event]:
        return []

    def close(self) -> None:
        pass


def make_local() -> Connector:
    return Connector("local", _NoScheduler(), _NoWorker(), ZoneLender("", "", "", None))
