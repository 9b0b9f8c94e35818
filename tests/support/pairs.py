"""A prefill and a decode engine in this process, and what the gateway does between them."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

from splitserve import wire
from splitserve.engine.scheduler import SchedulerConfig
from splitserve.sampling import Sampling
from splitserve.store.chain import KVStore
from splitserve.wire import Grain, Leg
from tests.support.engines import EngineHost, expected_tokens

GREEDY = Sampling(seed=0, max_tokens=12, temperature=0.0)
PROMPT = list(range(300))
CHUNK = 64


class Pair:
    """A prefill and a decode engine, and the gateway's part: it passes parts and offers on."""

    def __init__(
        self,
        *,
        prefix_cache: bool = True,
        digests: str = "full",
        faults: str = "",
        way: str = "chunk-pull",
        transport: str = "shm",
        zone_blocks: int = 40,
        source_faults: str = "",
        make_store: Callable[[], KVStore] | None = None,
        by_store: bool = False,
        with_hints: bool = False,
    ) -> None:
        grain, _, direction = way.partition("-")
        self.grain, self.push = Grain(grain), direction == "push"
        config = SchedulerConfig(CHUNK, 16, prefix_cache=prefix_cache)
        self.prefill = EngineHost(
            worker_id="p",
            config=config,
            digests=digests,
            faults=source_faults,
            transport=transport,
            store=make_store() if make_store else None,
            by_store=by_store,
        )
        self.decode = EngineHost(
            worker_id="d",
            config=config,
            digests=digests,
            faults=faults,
            transport=transport,
            zone_blocks=zone_blocks if self.push else 0,
            store=make_store() if make_store else None,
            by_store=by_store,
        )
        self.with_hints = with_hints  # each prefill leg is told to ask the decode engine
        self.at_start = False  # decode legs are opened when prefill starts, as the gateway does
        self._unopened: dict[str, tuple[list[int], Sampling]] = {}
        self.past: list[list[int]] = []  # prompts of earlier rounds, whose KV is saved by now
        self.num_loaded = 0
        self.num_pushed = 0
        self.num_parts = 0
        self.offers: dict[str, wire.Offer] = {}
        self.requests: dict[str, tuple[list[int], Sampling]] = {}

    def submit(
        self, prompt: list[int] = PROMPT, name: str = "r", sampling: Sampling = GREEDY
    ) -> None:
        self.requests[name] = prompt, sampling
        legs = [(self.prefill, Leg.PREFILL)]
        if self.grain is not Grain.REQUEST:
            legs.append((self.decode, Leg.DECODE))
            if self.at_start:
                self._unopened[name] = prompt, sampling
                legs.pop()
        for host, leg in legs:
            push = self.push and leg is Leg.DECODE
            hints = [self.hint(prompt)] if self.with_hints and leg is Leg.PREFILL else []
            host.submit(name, prompt, sampling, leg, grain=self.grain, push=push, hints=hints)

    def abort(self, name: str, host: EngineHost) -> None:
        """On one side; no leg of it is opened any more."""
        self._unopened.pop(name, None)
        host.engine.abort(name)

    def hint(self, prompt: list[int]) -> wire.Hint:
        config, address = self.decode.config, self.decode.connector.address
        num_blocks = max(0, len(prompt) - 1) // 16
        return wire.Hint(config.worker_id, config.epoch, address, num_blocks, 0.0, 1.0)

    def turn(self) -> None:
        self.prefill.turn()
        self.pass_on()
        self.decode.turn()
        self.tell_source()

    def tell_source(self) -> None:
        for notice in self.decode.notices:
            if isinstance(notice, wire.Landed):
                self.prefill.engine.land(notice.request_id, notice.landing)

    def pass_on(self) -> None:
        for notice in self.prefill.notices:
            if isinstance(notice, wire.PartReady):
                self.num_parts += 1
                self.num_pushed += notice.part.pushed
                self.decode.engine.deliver(notice.request_id, notice.part)
            elif isinstance(notice, wire.Started) and notice.request_id in self._unopened:
                name = notice.request_id
                prompt, sampling = self._unopened.pop(name)
                self.decode.submit(name, prompt, sampling, Leg.DECODE, grain=self.grain)
            elif isinstance(notice, wire.Loaded):
                self.num_loaded += notice.num_tokens
            elif isinstance(notice, wire.Offered):
                self.offers[notice.request_id] = notice.offer
                self.complete(notice.request_id, notice.offer)
        self.prefill.notices.clear()

    def complete(self, name: str, offer: wire.Offer) -> None:
        if self.grain is not Grain.REQUEST:
            self.decode.engine.complete(name, offer)
            return
        prompt, sampling = self.requests[name]
        self.decode.submit(name, prompt, sampling, Leg.DECODE, list(offer.output_ids), offer)

    def run(self, *kinds: type, num: int = 1) -> list[wire.Notice]:
        """Turn both until the decode engine has told so many notices of the kinds."""
        for _ in range(4000):
            found = [x for x in self.decode.notices if isinstance(x, kinds)]
            if len(found) >= num:
                return found
            self.turn()
            self.decode.woken.wait(0.002)
            self.decode.woken.clear()
        raise AssertionError(f"no {kinds}: {self.decode.notices}")

    def settle(self) -> None:
        """Turn both until nothing is left to do, then check each."""
        end = time.monotonic() + 20
        while not (self.prefill.engine.is_idle and self.decode.engine.is_idle):
            self.turn()
            self.decode.woken.wait(0.001)
            self.decode.woken.clear()
            assert time.monotonic() < end, "not idle"
        for host in (self.prefill, self.decode):
            host.settle()

    def forget(self) -> None:
        """What was told so far, so that names can be used again."""
        for host in (self.prefill, self.decode):
            host.notices.clear()
            host.tokens.clear()
        self.offers.clear()

    def close(self) -> None:
        self.prefill.close()
        self.decode.close()


def random_handoffs(pair: Pair, rng: random.Random, num: int) -> int:
    """Requests of any length, aborted at any moment on either side, side by side. Afterwards both
    engines are idle, their invariants hold, and what was not aborted has its right answer. Returns
    how many those were."""
    answers = {}
    alive: list[str] = []
    for number in range(num):
        prompt = [rng.randrange(3) for _ in range(rng.randrange(1, 250))]
        earlier = [*pair.past[-30:], *(prompt for prompt, _ in answers.values())][:60]
        if pair.with_hints and earlier and rng.random() < 0.7:
            prompt = [*rng.choice(earlier), *prompt][:250]
        name = f"r{number}"
        pair.submit(prompt, name)
        answers[name] = (prompt, expected_tokens(prompt, GREEDY, 12))
        alive.append(name)
        for _ in range(rng.randrange(6)):
            pair.turn()
        if rng.random() < 0.4:
            victim = rng.choice(alive[-20:])
            sides = [pair.prefill, pair.decode]
            rng.shuffle(sides)
            for side in sides:
                pair.abort(victim, side)
                for _ in range(rng.randrange(3)):
                    pair.turn()
            alive.remove(victim)
    pair.settle()
    pair.past += [prompt for prompt, _ in answers.values()]
    assert pair.decode.pool.num_quarantined == pair.prefill.pool.num_quarantined == 0
    for name in alive:
        assert [pair.offers[name].output_ids[0], *pair.decode.tokens[name]] == answers[name][1]
    return len(alive)
