"""Answers of the same requests by different ways, down to the bits of their logits."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from splitserve import wire
from splitserve.clock import MonotonicClock
from splitserve.engine.scheduler import SchedulerConfig
from splitserve.engine.step import OnLayer, Runner, StepPlan
from splitserve.model.device_pool import DevicePool
from splitserve.model.loader import LoadedModel
from splitserve.model.runner import TorchRunner
from splitserve.sampling import Sampling
from splitserve.store.chain import KVStore
from splitserve.store.registry import make_tier, parse_tier
from tests.support.engines import Blocks, EngineHost

BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    prompt_ids: list[int]
    sampling: Sampling


@dataclass(slots=True)
class Answers:
    """By case name: the output ids, and a digest of the logits that each was drawn from."""

    tokens: dict[str, list[int]] = field(default_factory=dict)
    logits: dict[tuple[str, int], bytes] = field(default_factory=dict)

    def require_equal(self, other: Answers, start: dict[str, int] | None = None) -> int:
        """The same tokens from the same logits; those before `start` were given, not drawn.
        Returns how many were compared."""
        assert self.tokens.keys() == other.tokens.keys()
        num_compared = 0
        for name, tokens in self.tokens.items():
            assert other.tokens[name] == tokens, name
            for index in range(start[name] if start else 0, len(tokens)):
                assert other.logits[name, index] == self.logits[name, index], (name, index)
                num_compared += 1
        return num_compared


class RecordingRunner:
    """A TorchRunner that keeps a digest of the logits of every draw; a leg's suffix is dropped."""

    def __init__(self, runner: TorchRunner, answers: Answers) -> None:
        self._runner = runner
        forward = runner._forward
        inner = forward.logits

        def logits(plan: StepPlan, on_layer: OnLayer | None = None) -> npt.NDArray[np.float32]:
            rows = inner(plan, on_layer)
            drawing = [item for item in plan.items if item.draw is not None]
            for item, row in zip(drawing, rows, strict=True):
                key = item.request_id.partition(".")[0], len(item.draw.output_ids)
                digest = hashlib.blake2b(row.tobytes(), digest_size=16).digest()
                assert answers.logits.setdefault(key, digest) == digest, key
            return rows

        forward.logits = logits

    @property
    def kv_format(self) -> object:
        return self._runner.kv_format

    @property
    def device_pool(self) -> DevicePool | None:
        return self._runner.device_pool

    def execute(self, plan: StepPlan, on_layer: OnLayer | None = None) -> object:
        return self._runner.execute(plan, on_layer)


class Bench:
    """Makes hosts of one loaded model; `run` and `run_split` answer cases on them."""

    def __init__(self, loaded: LoadedModel, *, exact: bool = True) -> None:
        self._loaded = loaded
        self._exact = exact
        self.num_loaded = 0  # tokens, by the last `run_hinted`

    def host(
        self,
        answers: Answers,
        num_blocks: int,
        transport: str = "shm",
        zone_blocks: int = 0,
        store: KVStore | None = None,
        by_store: bool = False,
        block_size: int = BLOCK_SIZE,
        **config: object,
    ) -> EngineHost:
        def make_runner(blocks: Blocks) -> Runner:
            runner = TorchRunner(self._loaded, blocks, block_size, self._exact, 1)
            return RecordingRunner(runner, answers)  # type: ignore[return-value]

        settings = {"max_batched_tokens": 4096, "max_sequences": 32} | config
        return EngineHost(
            num_blocks,
            SchedulerConfig(**settings),  # type: ignore[arg-type]
            kv_format=self._loaded.kv_format(block_size),
            block_size=block_size,
            make_runner=make_runner,
            transport=transport,
            zone_blocks=zone_blocks,
            store=store,
            by_store=by_store,
        )

    def make_store(self, *texts: str) -> KVStore:
        """A store of these tiers for this model's blocks."""
        size = self._loaded.kv_format(BLOCK_SIZE).block_bytes
        tiers = [make_tier(parse_tier(text), b"parity", size) for text in texts]
        return KVStore(tiers, MonotonicClock())

    def run(
        self,
        cases: Iterable[Case],
        num_blocks: int,
        *,
        at_once: int = 1_000_000,
        resumed: Answers | None = None,
        start: dict[str, int] | None = None,
        observe: Callable[[EngineHost], None] = lambda host: None,
        rounds: int = 1,
        store: tuple[str, ...] = (),
        **config: object,
    ) -> Answers:
        """Colocated; `at_once` in the engine at a time. With `resumed`, its tokens up to `start`
        are given. With several rounds, the last one's answers."""
        answers = Answers()
        kept = self.make_store(*store) if store else None
        host = self.host(answers, num_blocks, store=kept, **config)
        try:
            for number in range(rounds):
                waiting = list(cases)
                while waiting:
                    batch, waiting = waiting[:at_once], waiting[at_once:]
                    for case in batch:
                        given = resumed.tokens[case.name][: start[case.name]] if start else []
                        name = f"{case.name}.{number}"
                        answers.tokens[case.name] = list(given)
                        host.submit(name, case.prompt_ids, case.sampling, output_ids=given)
                    finish(host, {f"{case.name}.{number}" for case in batch})
                    for case in batch:
                        answers.tokens[case.name] += host.tokens[f"{case.name}.{number}"]
            observe(host)
            host.settle()
        finally:
            host.close()
        return answers

    def run_split(
        self,
        cases: Iterable[Case],
        num_blocks: int,
        *,
        resumed: Answers | None = None,
        start: dict[str, int] | None = None,
        observe: Callable[[EngineHost, EngineHost], None] = lambda source, target: None,
        grain: wire.Grain = wire.Grain.REQUEST,
        push: bool = False,
        transport: str = "shm",
        store: tuple[str, ...] = (),
        by_store: bool = False,
        target_bench: Bench | None = None,
        target_block_size: int = BLOCK_SIZE,
        **config: object,
    ) -> Answers:
        """Prefill on one engine, decode on another, all at once: from pool to pool, or by a store
        of these tiers."""
        answers = Answers()
        by_leg = {f"{case.name}.p": case for case in cases}
        source, target = (
            bench.host(
                answers,
                num_blocks,
                transport,
                zone_blocks,
                self.make_store(*store) if store else None,
                by_store,
                block_size,
                **config,
            )
            for bench, zone_blocks, block_size in (
                (self, 0, BLOCK_SIZE),
                (target_bench or self, num_blocks if push else 0, target_block_size),
            )
        )
        try:
            for leg, case in by_leg.items():
                given = resumed.tokens[case.name][: start[case.name]] if start else []
                answers.tokens[case.name] = list(given)
                source.submit(
                    leg, case.prompt_ids, case.sampling, wire.Leg.PREFILL, given, grain=grain
                )
                if grain is not wire.Grain.REQUEST:
                    early = f"{case.name}.d"
                    target.submit(
                        early,
                        case.prompt_ids,
                        case.sampling,
                        wire.Leg.DECODE,
                        given,
                        grain=grain,
                        push=push,
                    )
            open_legs = set(by_leg)
            seen = seen_target = 0
            while open_legs:
                progressed = source.turn() + target.turn()
                for landed in target.notices[seen_target:]:
                    if isinstance(landed, wire.Landed):
                        leg = landed.request_id.replace(".d", ".p")
                        source.engine.land(leg, landed.landing)
                seen_target = len(target.notices)
                for notice in source.notices[seen:]:
                    leg = notice.request_id.replace(".p", ".d")
                    if isinstance(notice, wire.PartReady):
                        target.engine.deliver(leg, notice.part)
                    elif isinstance(notice, wire.End):
                        target.engine.abort(leg)
                    elif isinstance(notice, wire.Offered):
                        case, offer = by_leg[notice.request_id], notice.offer
                        if grain is wire.Grain.REQUEST:
                            target.submit(
                                leg,
                                case.prompt_ids,
                                case.sampling,
                                wire.Leg.DECODE,
                                offer.output_ids,
                                offer,
                            )
                        else:
                            target.engine.complete(leg, offer)
                        open_legs.remove(notice.request_id)
                        open_legs.add(leg)
                seen = len(source.notices)
                open_legs -= ended(source) | ended(target)
                if not progressed:
                    target.woken.wait(0.001)
            for leg, case in by_leg.items():
                drawn = source.tokens[leg] + target.tokens.get(f"{case.name}.d", [])
                answers.tokens[case.name] += drawn
            observe(source, target)
            source.settle()
            target.settle()
        finally:
            source.close()
            target.close()
        return answers

    def run_hinted(self, cases: Iterable[Case], num_blocks: int, num_at_once: int = 16) -> Answers:
        """Each case on one engine; then on another, which is told that the first has its prompt,
        and fetches what it lacks of it. The other's answers."""
        answers, others = Answers(), Answers()
        holder, other = self.host(others, num_blocks), self.host(answers, num_blocks)
        try:
            for case in cases:
                holder.submit(case.name, case.prompt_ids, case.sampling)
            finish(holder, {case.name for case in cases})
            waiting = list(cases)
            while waiting:
                batch, waiting = waiting[:num_at_once], waiting[num_at_once:]
                for case in batch:
                    config = holder.config
                    num = max(0, len(case.prompt_ids) - 1) // BLOCK_SIZE
                    address = holder.connector.address
                    hint = wire.Hint(config.worker_id, config.epoch, address, num, 0.0, 1.0)
                    other.submit(case.name, case.prompt_ids, case.sampling, hints=[hint])
                while not {case.name for case in batch} <= ended(other):
                    holder.turn()
                    other.turn()
            for case in cases:
                answers.tokens[case.name] = other.tokens[case.name]
            loaded = [x for x in other.notices if isinstance(x, wire.Loaded)]
            assert not any(one.reason for one in loaded)
            self.num_loaded = sum(one.num_tokens for one in loaded)
            other.settle()
            holder.settle()
        finally:
            holder.close()
            other.close()
        return answers


def ended(host: EngineHost) -> set[str]:
    """Requests whose answer is over; an error is a failure."""
    ends = [notice for notice in host.notices if isinstance(notice, wire.End)]
    assert not any(end.reason == "error" for end in ends), ends
    assert not any(isinstance(notice, wire.FetchFailed) for notice in host.notices)
    return {end.request_id for end in ends}


def finish(host: EngineHost, request_ids: set[str]) -> None:
    while not request_ids <= ended(host):
        host.turn()


def notices(host: EngineHost, kind: type) -> list[wire.Notice]:
    return [notice for notice in host.notices if isinstance(notice, kind)]
