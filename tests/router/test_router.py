"""Filters, policies and predicted costs, over a fleet that was told what to believe."""

from __future__ import annotations

import numpy as np
import pytest

from splitserve.config import SplitMode
from splitserve.errors import ConfigError
from splitserve.kv.keys import GRANULE
from splitserve.latency.model import StepModel
from splitserve.router.fleet import Fleet, Floats, Ints
from splitserve.router.policies import POLICIES, make_policy
from splitserve.router.policy import Ask, Policy
from splitserve.router.router import NUM_PAIRED, SILENT_S, Router
from splitserve.router.slots import Slots
from splitserve.router.split import decide_split
from splitserve.wire import Leg, Role, View

P, D, M = Role.PREFILL, Role.DECODE, Role.MIXED
KEYS = [bytes([i]) * 16 for i in range(64)]


def step_model(token_s: float = 1e-3, base_s: float = 0.03, context_s: float = 1e-7) -> StepModel:
    model = StepModel()
    for _ in range(20):
        for size in (1, 2, 4, 8, 16, 32, 64, 128, 256):
            for context in (size, size * 500):
                model.add(size, context, base_s + size * token_s + context * context_s)
    return model


MODEL = step_model()


def add(
    router: Router,
    worker_id: str,
    role: Role,
    *,
    legs: int = 0,
    pending: int = 0,
    context: int = 0,
    free: int = 1000,
    block_size: int = 16,
    heard_s: float = 0.0,
    model: StepModel = MODEL,
) -> int:
    slot = router.fleet.add(
        worker_id, role, heard_s, num_blocks=1000, block_size=block_size, budget=256, model=model
    )
    view = View(running=legs, context_tokens=context, free_blocks=free, total_blocks=1000)
    router.fleet.set_view(slot, view, heard_s)
    router.fleet.legs[slot], router.fleet.pending[slot] = legs, pending
    return slot


def ask(router: Router, num_tokens: int = 512, **options: object) -> Ask:
    made = Ask(num_tokens, 0.0, bytes_per_token=46_080.0, **options)  # type: ignore[arg-type]
    made.hits = router.hits(KEYS[: num_tokens // GRANULE], GRANULE)
    return made


def taken(router: Router, leg: Leg, num_tokens: int = 512, **options: object) -> str:
    picked = router.pick(leg, ask(router, num_tokens, **options))
    assert picked is not None
    assert picked.worker_id in picked.reason
    return picked.worker_id


# --- filters


@pytest.mark.parametrize("policy", POLICIES)
def test_preferred_roles_first(policy: str) -> None:
    router = Router(policy)
    assert router.pick(Leg.PREFILL, ask(router)) is None
    add(router, "d", D)
    assert router.pick(Leg.PREFILL, ask(router)) is None
    assert taken(router, Leg.WHOLE) == "d"
    add(router, "m", M)
    assert taken(router, Leg.PREFILL) == "m"
    assert taken(router, Leg.WHOLE) == "m"
    assert taken(router, Leg.DECODE) == "d"
    add(router, "p", P)
    assert taken(router, Leg.PREFILL) == "p"


@pytest.mark.parametrize("policy", POLICIES)
def test_silent_avoided_and_draining_ones(policy: str) -> None:
    router = Router(policy)
    add(router, "a", D, heard_s=-2 * SILENT_S)
    b = add(router, "b", D, legs=9)
    assert taken(router, Leg.DECODE) == "b"
    assert taken(router, Leg.DECODE, avoid=frozenset("b")) == "b", "there is no other that is heard"
    c = add(router, "c", D, legs=9)
    assert taken(router, Leg.DECODE, avoid=frozenset("b")) == "c"
    assert taken(router, Leg.DECODE, near=frozenset("b")) == "b"
    router.fleet.draining[[b, c]] = True
    assert taken(router, Leg.DECODE) == "a", "silent, but nobody else takes anything"
    assert router.has(D)
    router.fleet.remove("a")
    assert not router.has(D, M)
    assert router.pick(Leg.DECODE, ask(router)) is None


@pytest.mark.parametrize("policy", POLICIES)
def test_who_failed_is_avoided_rather_than_a_role(policy: str) -> None:
    """A retry that goes back to a dying worker spends the request's budget on it."""
    router = Router(policy)
    add(router, "m", M)
    add(router, "d", D)
    assert taken(router, Leg.WHOLE) == "m"
    assert taken(router, Leg.WHOLE, avoid=frozenset("m")) == "d"
    assert taken(router, Leg.WHOLE, avoid=frozenset("md")) == "m"
    assert taken(router, Leg.WHOLE, avoid=frozenset(["m", "unknown"])) == "d"


def test_rows_are_used_again_and_clean() -> None:
    router = Router("least_loaded")
    slot = add(router, "a", D, legs=5, pending=500)
    router.index.add("a", KEYS)
    router.index.drop("a")
    router.fleet.remove("a")
    assert add(router, "b", M) == slot
    assert router.fleet.legs[slot] == 0
    assert len(router.fleet) == 1
    for i in range(100):  # more than it began with
        add(router, f"w{i}", D)
    assert len(router.fleet) == 101
    assert taken(router, Leg.DECODE) == "w0"
    router.index.check()


def test_hits_by_each_worker_s_block_size() -> None:
    router = Router("cost")
    add(router, "a", P, block_size=16)
    add(router, "b", P, block_size=32)
    router.index.add("a", KEYS[:5])
    router.index.add("b", KEYS[1:8:2])  # blocks of two granules, by their last one's key
    hits = router.hits(KEYS[:20], GRANULE)
    assert [hits[router.fleet.slots.give(name)] for name in "ab"] == [80, 128]


# --- policies


def test_round_robin_goes_round() -> None:
    router = Router("round_robin")
    for name in "abc":
        add(router, name, P, pending=100 * ord(name))
    assert [taken(router, Leg.PREFILL) for _ in range(6)] == list("abcabc")


def test_least_loaded() -> None:
    router = Router("least_loaded")
    add(router, "a", P, pending=500)
    add(router, "b", P, pending=400, legs=3)
    add(router, "c", D, legs=2)
    add(router, "d", D, legs=1, free=10)
    assert taken(router, Leg.PREFILL) == "b"
    assert taken(router, Leg.DECODE) == "d"


def test_prefix_aware_until_it_is_out_of_balance() -> None:
    router = Router("prefix_aware")
    add(router, "a", P)
    b = add(router, "b", P, pending=1000)
    router.index.add("b", KEYS[:8])
    assert taken(router, Leg.PREFILL) == "b"
    router.fleet.pending[b] = 3000
    assert taken(router, Leg.PREFILL) == "a"


def test_affinity_is_worth_the_seconds_it_saves() -> None:
    """512 tokens take half a second; to fetch 480 of them 22 ms and to ask 5."""
    router = Router("cost")
    add(router, "a", P)
    b = add(router, "b", P)
    router.index.add("b", KEYS[:30])
    assert taken(router, Leg.PREFILL) == "b"
    router.fleet.pending[b] = 20  # 20 ms in line: still less than fetching
    assert taken(router, Leg.PREFILL) == "b"
    router.fleet.pending[b] = 60
    assert taken(router, Leg.PREFILL) == "a"
    slow = {"transfer_bytes_per_s": 1e8}  # 220 ms
    assert taken(router, Leg.PREFILL, **slow) == "b"
    router.fleet.pending[b] = 5000
    assert taken(router, Leg.PREFILL, **slow) == "a"


def test_costs_are_seconds_of_each_worker_s_own_model() -> None:
    router = Router("cost")
    add(router, "fast", P, pending=700, model=step_model(0.2e-3))
    add(router, "slow", P)
    assert taken(router, Leg.PREFILL, 1024) == "fast"
    assert taken(router, Leg.PREFILL, 16) == "slow"
    picked = router.pick(Leg.PREFILL, ask(router, 512))
    assert picked is not None
    expected = 700 * (0.03 / 256 + 0.2e-3) + step_model(0.2e-3).prefill_s(512, 0, 256)
    assert picked.score == pytest.approx(expected, rel=0.15)


def test_decode_goes_where_it_delays_the_least() -> None:
    router = Router("cost")
    add(router, "a", D, legs=8, context=8000)
    add(router, "b", D, legs=2, context=2000)
    assert taken(router, Leg.DECODE) == "b"
    router.index.add("a", KEYS[:30])
    assert taken(router, Leg.DECODE) == "b", "22 ms of transfer are not worth slower tokens"
    assert taken(router, Leg.DECODE, transfer_bytes_per_s=1e6) == "a", "22 s are"
    full = Router("cost")
    add(full, "a", D, legs=2, context=2000, free=3)
    add(full, "b", D, legs=3, context=3000)
    assert taken(full, Leg.DECODE) == "b", "it would wait for blocks"


def test_pairs_know_that_one_worker_needs_no_transfer() -> None:
    router = Router("cost")
    for name in ("m0", "m1"):
        add(router, name, M)
    add(router, "p", P, pending=5000)
    pair = router.pick_pair(ask(router, transfer_bytes_per_s=1e7))
    assert pair is not None
    assert pair.prefill == "p", "mixed workers prefill only where there is no prefill worker"
    router.fleet.remove("p")
    pair = router.pick_pair(ask(router, transfer_bytes_per_s=1e7))
    assert pair is not None
    assert pair.prefill == pair.decode


def test_a_pair_is_the_best_of_all_pairs() -> None:
    rng = np.random.default_rng(0)
    router = Router("cost")
    for i in range(20):
        add(router, f"p{i:02}", P, pending=int(rng.integers(0, 3000)))
        legs = int(rng.integers(0, 20))
        add(router, f"d{i:02}", D, legs=legs, context=legs * 300)
    for i in range(20):
        router.index.add(f"p{i:02}", KEYS[: int(rng.integers(0, 32))])
    wanted = ask(router)
    prefill, decode = router.eligible(Leg.PREFILL, wanted), router.eligible(Leg.DECODE, wanted)
    scores = (
        router.policy.score(Leg.PREFILL, prefill, wanted)[:, None]
        + router.policy.score(Leg.DECODE, decode, wanted)[None, :]
    )
    pair = router.pick_pair(wanted)
    assert pair is not None
    assert pair.score == pytest.approx(scores.min())
    assert NUM_PAIRED < 20
    picked = router.pick(Leg.PREFILL, wanted)
    assert picked is not None
    assert "16 more" in picked.reason
    assert picked.worker_id == pair.prefill


# --- a policy of somebody else's


class ByName(Policy):
    """The last one by name."""

    name = "by_name"

    def score(self, leg: Leg, slots: Ints, ask: Ask) -> Floats:
        names = sorted(self.fleet.names(slots))
        return np.array([-float(names.index(name)) for name in self.fleet.names(slots)])


def test_a_policy_from_elsewhere() -> None:
    router = Router(f"{__name__}:ByName")
    for name in "abc":
        add(router, name, D)
    assert taken(router, Leg.DECODE) == "c"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("best", "known: cost"),
        ("nowhere.at_all:Policy", "No module"),
        ("splitserve.router.policy:Missing", "Missing"),
        ("splitserve.router.policy:Ask", "is no"),
    ],
)
def test_policies_that_are_none(name: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        make_policy(name, Fleet())


def test_slots_are_given_again() -> None:
    slots = Slots()
    assert [slots.give(name) for name in "abca"] == [0, 1, 2, 0]
    slots.free("b")
    slots.free("nobody")
    assert slots.get("b") is None
    assert slots.give("d") == 1
    assert slots.name(1) == "d"
    assert len(slots) == 3


# --- split or local


def test_split_or_local() -> None:
    router = Router("cost")
    add(router, "d", D)
    assert not decide_split(SplitMode.AUTO, 500, 32, router).split
    assert decide_split(SplitMode.ALWAYS, 5, 32, router).split
    add(router, "p", P)
    assert decide_split(SplitMode.AUTO, 500, 32, router).split
    assert not decide_split(SplitMode.AUTO, 32, 32, router).split
    assert not decide_split(SplitMode.AUTO, 500, 32, router, 2).split
    assert not decide_split(SplitMode.NEVER, 500, 32, router).split
