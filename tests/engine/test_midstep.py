"""What can't wait for the end of a step is heard and told in its middle."""

from __future__ import annotations

import time

import pytest

from splitserve import wire
from splitserve.engine.scheduler import SchedulerConfig
from splitserve.engine.step import OnLayer, StepPlan, StepResult
from splitserve.kv.format import KVFormat
from splitserve.model.simulated import SimulatedRunner
from splitserve.sampling import Sampling
from splitserve.wire import Grain, Leg
from tests.support.engines import VOCAB, Blocks, EngineHost, expected_tokens
from tests.support.pairs import Pair

GREEDY = Sampling(seed=0, max_tokens=4, temperature=0.0)
CONFIG = SchedulerConfig(max_batched_tokens=64, max_sequences=8)
NUM_LAYERS = 200


class Layered:
    """A simulated model that computes in many layers, as long as `goes_on`."""

    def __init__(self, blocks: Blocks) -> None:
        self._inner = SimulatedRunner(blocks, 16, VOCAB)
        self.in_step = False
        self.waits_for = lambda: True

    @property
    def kv_format(self) -> KVFormat:
        return self._inner.kv_format

    def execute(self, plan: StepPlan, on_layer: OnLayer | None = None) -> StepResult:
        self.in_step = True
        for layer in range(NUM_LAYERS):
            if on_layer is not None:
                on_layer(layer)
            if self.waits_for():
                break
            time.sleep(0.01)
        self.in_step = False
        return self._inner.execute(plan)


class Watched:
    """An engine of which it is known what was told in the middle of a step."""

    def __init__(self) -> None:
        faults = "seal=delay:0.1"  # digests are there when the next step has begun
        self.host = EngineHost(config=CONFIG, make_runner=self._make, faults=faults)
        self.told: list[wire.Notice] = []
        self.host.engine.flush = self._flush

    def _make(self, blocks: Blocks) -> Layered:
        self.runner = Layered(blocks)
        return self.runner

    def _flush(self) -> None:
        outbox = self.host.engine.take_outbox()
        self.host.notices += outbox.notices
        if self.runner.in_step:
            self.told += outbox.notices

    def has_told(self, kind: type) -> bool:
        return any(isinstance(notice, kind) for notice in self.told)


def test_an_offer_is_told_while_the_next_prompt_is_computed() -> None:
    watched = Watched()
    host, runner = watched.host, watched.runner
    host.submit("first", list(range(64)), GREEDY, Leg.PREFILL)
    host.submit("second", list(range(100, 164)), GREEDY, Leg.PREFILL)
    host.turn()
    assert host.tokens["first"]
    assert not any(isinstance(notice, wire.Offered) for notice in host.notices)
    runner.waits_for = lambda: watched.has_told(wire.Offered)
    host.turn()
    assert [x.request_id for x in watched.told if isinstance(x, wire.Offered)] == ["first"]
    host.run_until(wire.Offered, num=2)
    for name in ("first", "second"):
        host.engine.abort(name)
    host.settle()
    host.close()


def test_a_question_is_answered_in_the_middle_of_a_step() -> None:
    watched = Watched()
    holder, runner = watched.host, watched.runner
    prompt = list(range(64))
    holder.submit("known", prompt, GREEDY)
    holder.run_until(wire.End)
    other = EngineHost(config=CONFIG)
    config = holder.config
    hint = wire.Hint(config.worker_id, config.epoch, holder.connector.address, 3, 0.0, 1.0)
    other.submit("r", prompt, GREEDY, hints=[hint])

    def found() -> bool:
        other.turn()
        return any(isinstance(notice, wire.Loaded) for notice in other.notices)

    runner.waits_for = found
    holder.submit("busy", list(range(200, 264)), GREEDY)
    holder.turn()
    assert found()
    other.run_until(wire.End)
    assert other.tokens["r"] == expected_tokens(prompt, GREEDY, 4)
    runner.waits_for = lambda: True
    for host in (holder, other):
        host.settle()
        host.close()


@pytest.mark.parametrize("when", [0, 7])
def test_a_landing_that_comes_in_the_middle_gets_the_layers_before(when: int) -> None:
    """One step, a landing heard at some layer of it: all layers are pushed, in order."""
    pair = Pair(way="layer-push")
    pushed: list[int | None] = []
    worker = pair.prefill.connector.worker
    start_push = worker.start_push

    def spy(job):  # type: ignore[no-untyped-def]
        pushed.append(job.layer)
        start_push(job)

    worker.start_push = spy  # type: ignore[method-assign]
    prompt = list(range(48))
    pair.submit(prompt)
    pair.decode.turn()
    inner = pair.prefill.engine.runner.execute
    layers = iter(range(20))

    def listen() -> None:
        if next(layers) == when:
            pair.tell_source()

    def execute(plan: StepPlan, on_layer: OnLayer | None = None) -> StepResult:
        for layer in range(10):
            if on_layer is not None:
                on_layer(layer)
        return inner(plan)

    pair.prefill.engine.listen = listen
    pair.prefill.engine.runner.execute = execute  # type: ignore[method-assign]
    assert pair.grain is Grain.LAYER
    pair.prefill.engine.pump()
    pair.prefill.engine.step()
    assert pushed[:10] == list(range(10))
    pair.prefill.engine.abort("r")
    pair.decode.engine.abort("r")
    pair.settle()
    pair.close()
