"""Servers die, hang, lie and refuse; clients go away. Every request ends, and its client knows how.

Each test ends with `Rig`'s checks: no leg is left, and no server saw KV asked for twice or of
another prompt.
"""

from __future__ import annotations

import asyncio

import pytest

from splitserve.adopted import journey as journey_module
from splitserve.config import SplitMode
from tests.support.adopted import PROMPT, Rig, until
from tests.support.scripted import Fault, ScriptedServer, generate, text_of, tokenize

kinds = pytest.mark.parametrize("kind", ["completion", "chat"])
streams = pytest.mark.parametrize("stream", [False, True])
IDS = {"completion": tokenize(PROMPT), "chat": [1, *tokenize(PROMPT), 2]}
EXPECTED = {kind: text_of(generate(ids, 12)) for kind, ids in IDS.items()}

# --- leg 1


@streams
@pytest.mark.parametrize(
    "fault",
    [
        Fault("die"),
        Fault("refuse", status=500),
        Fault("refuse", status=503),
        Fault("refuse", status=401),
        Fault("refuse", status=429),
    ],
    ids=str,
)
async def test_prefill_fails_and_another_takes_over(fault: Fault, stream: bool) -> None:
    async with Rig(prefill=2) as rig:
        rig.prefill.faults.append(fault)
        answer = await rig.ask(stream=stream)
        assert answer.text() == EXPECTED["completion"]
        assert len(rig.servers["prefill-1"].requests) == 1
        assert rig.counts.handoffs == 1
        assert rig.adopted["prefill-0"].num_faults == (fault.status != 429)


@streams
async def test_prefill_is_dead_and_the_decode_server_does_it_all(stream: bool) -> None:
    async with Rig(split=SplitMode.AUTO) as rig:
        await rig.prefill.stop()
        prompt = "word " * 60
        answer = await rig.ask(prompt=prompt, stream=stream)
        assert answer.text() == text_of(generate(tokenize(prompt), 12))
        (only,) = rig.decode.requests
        assert "kv_transfer_params" not in only
        await until(lambda: not rig.adopted["prefill-0"].is_up, "noticed")


async def test_prefill_hangs_and_another_takes_over() -> None:
    async with Rig(prefill=2, prefill_queue_s=0.3) as rig:
        rig.prefill.faults.append(Fault("hang"))
        answer = await rig.ask(stream=True)
        assert answer.text() == EXPECTED["completion"]
        await until(lambda: rig.prefill.num_aborted == 1, "the hung server was told")


async def test_prefill_offers_nothing() -> None:
    async with Rig() as rig:
        rig.prefill.offers = False
        answer = await rig.ask(stream=True)
        assert answer.text() == EXPECTED["completion"]
        (only,) = rig.decode.requests
        assert "kv_transfer_params" not in only
        assert rig.counts.without_offer == 1


# --- leg 2, before its first byte


@kinds
@streams
@pytest.mark.parametrize(
    "fault", [Fault("die"), Fault("refuse", status=500), Fault("error", 0)], ids=str
)
async def test_decode_fails_before_its_first_byte(fault: Fault, stream: bool, kind: str) -> None:
    """Again from leg 1: the offer is spent."""
    if fault.kind == "error" and not stream:
        fault = Fault("die")
    async with Rig(decode=2) as rig:
        rig.decode.faults.append(fault)
        answer = await rig.ask(kind, stream=stream)
        assert answer.text() == EXPECTED[kind]
        assert len(rig.prefill.requests) == 2
        assert answer.usage["completion_tokens"] == 12 if not stream else answer.is_done


async def test_a_decode_server_that_can_not_be_reached_does_not_spend_the_offer() -> None:
    async with Rig(decode=2) as rig:
        await rig.decode.stop()
        answer = await rig.ask(stream=True)
        assert answer.text() == EXPECTED["completion"]
        assert len(rig.prefill.requests) == 1


async def test_an_offer_is_not_used_when_it_is_old(monkeypatch: pytest.MonkeyPatch) -> None:
    """A third of the lease passes before a decode server is there."""
    async with Rig(lease_s=0.6) as rig:
        port = rig.decode.port
        await rig.decode.stop()
        await until(lambda: not rig.adopted["decode-0"].is_up, "lost")
        asking = asyncio.create_task(rig.ask(stream=True))
        await until(lambda: rig.counts.stale_offers == 1, "stale")
        await rig.decode.start(port)
        answer = await asking
        assert answer.text() == EXPECTED["completion"]
        # never fetched by anybody: it expires
        assert ScriptedServer.kept
        for request in rig.decode.requests:
            if "kv_transfer_params" in request:
                kept = request["kv_transfer_params"]["remote_request_id"]
                assert kept not in ScriptedServer.kept


async def test_an_error_of_the_clients_inside_a_stream_is_a_status() -> None:
    async with Rig() as rig:
        rig.decode.faults.append(Fault("error", 0, status=400))
        answer = await rig.ask(stream=True)
        assert answer.status == 400
        assert answer.json()["error"]["code"] == "refused_by_engine"
        assert rig.adopted["decode-0"].num_faults == 0


@streams
@pytest.mark.parametrize("status", [400, 404, 422])
async def test_what_the_engine_refuses_is_the_clients(status: int, stream: bool) -> None:
    async with Rig() as rig:
        rig.prefill.faults.append(Fault("refuse", status=status))
        answer = await rig.ask(stream=stream)
        assert answer.status == status
        error = answer.json()["error"]
        assert (error["code"], error["param"]) == ("refused_by_engine", "temperature")
        assert rig.adopted["prefill-0"].num_faults == 0
        assert not rig.decode.requests


# --- after the first byte


def bad_ends(kind: str) -> list[Fault]:
    first = 2 if kind == "chat" else 1  # the role is no answer yet
    return [
        Fault(what, after)
        for what in ("die", "error", "lie", "abort")
        for after in (first, first + 1, first + 2, first + 5, first + 10)
    ]


@pytest.mark.parametrize("fault", bad_ends("completion"), ids=str)
async def test_a_greedy_stream_goes_on_elsewhere(fault: Fault) -> None:
    async with Rig(decode=2) as rig:
        rig.decode.faults.append(fault)
        options = {"stream": True, "stream_options": {"include_usage": True}}
        answer = await rig.ask(**options, min_tokens=4)
        assert answer.text() == EXPECTED["completion"]
        assert answer.is_done
        assert answer.usage["completion_tokens"] == 12
        assert answer.usage["prompt_tokens"] == len(IDS["completion"])
        assert len({(e["id"], e["created"], e["model"]) for e in answer.events}) == 1
        reasons = [e["choices"][0]["finish_reason"] for e in answer.events if e["choices"]]
        assert [x for x in reasons if x] == ["length"]
        assert b"token_ids" not in answer.raw
        assert rig.counts.resumes == 1
        # the second leg 2 is of a prefill of its own, of prompt and answer so far
        (second,) = rig.servers["decode-1"].requests
        num_known = len(second["prompt"]) - len(IDS["completion"])
        assert second["max_tokens"] == 12 - num_known
        assert second["min_tokens"] == max(0, 4 - num_known)
        assert len(rig.prefill.requests) == 2


@pytest.mark.parametrize("after", [1, 2, 3, 4, 7, 12])
async def test_a_greedy_chat_goes_on_elsewhere(after: int) -> None:
    async with Rig(decode=2) as rig:
        rig.decode.faults.append(Fault("die", after))
        answer = await rig.ask("chat", stream=True)
        assert answer.text() == EXPECTED["chat"]
        roles = [e["choices"][0]["delta"].get("role") for e in answer.events]
        assert [x for x in roles if x] == ["assistant"]
        # the role alone is no answer: nothing was sent, and it was begun anew
        assert rig.counts.resumes == (after > 1)


async def test_it_goes_on_more_than_once() -> None:
    async with Rig(decode=3) as rig:
        rig.decode.faults.append(Fault("die", 4))
        rig.servers["decode-1"].faults.append(Fault("die", 3))
        answer = await rig.ask(stream=True)
        assert answer.text() == EXPECTED["completion"]
        assert rig.counts.resumes == 2


async def test_one_of_several_prompts_goes_on_elsewhere() -> None:
    async with Rig(decode=2) as rig:
        rig.decode.faults.append(Fault("die", 4))
        prompts = [PROMPT, PROMPT + " nine"]
        answer = await rig.ask(prompt=prompts, stream=True)
        for i, prompt in enumerate(prompts):
            assert answer.text(i) == text_of(generate(tokenize(prompt), 12))


@pytest.mark.parametrize("kind_of_fault", ["die", "error", "lie", "abort", "garble"])
@pytest.mark.parametrize("after", [2, 5])
async def test_another_stream_ends_in_an_error(kind_of_fault: str, after: int) -> None:
    async with Rig(decode=2) as rig:
        rig.decode.faults.append(Fault(kind_of_fault, after))
        answer = await rig.ask(stream=True, temperature=0.5)
        assert answer.status == 200
        assert answer.error is not None
        assert answer.error["code"] == "worker_lost"
        assert not answer.is_done
        assert EXPECTED["completion"].startswith(answer.text())
        assert rig.counts.cut_streams == 1


async def test_events_without_text_are_no_answer_yet() -> None:
    """The first token has no text of its own, and its id was not asked for: begun anew."""
    assert generate(IDS["completion"], 1)[0] % 5 == 0
    async with Rig(decode=2) as rig:
        rig.decode.faults.append(Fault("die", 1))
        answer = await rig.ask(stream=True, temperature=0.5)
        assert answer.text() == EXPECTED["completion"]
        assert answer.is_done


async def test_a_silent_stream_goes_on_elsewhere() -> None:
    async with Rig(decode=2, token_gap_s=0.3) as rig:
        rig.decode.faults.append(Fault("hang", 5))
        answer = await rig.ask(stream=True)
        assert answer.text() == EXPECTED["completion"]
        await until(lambda: rig.decode.num_aborted == 1, "the hung server was told")


async def test_nobody_is_left_to_go_on() -> None:
    async with Rig(token_gap_s=0.3) as rig:
        rig.decode.step_s = 0.02
        reply = await rig.open(stream=True)
        await reply.head(5)
        first = await reply.read(5)
        await rig.decode.stop()
        rest = await reply.body(5)
        reply.close()
        assert first.startswith(b"data: ")
        assert b'"code":"no_worker"' in rest
        assert b"[DONE]" not in rest


async def test_the_engines_error_to_the_client_in_the_middle() -> None:
    """It is passed on, and the server is not blamed."""
    async with Rig(decode=2) as rig:
        rig.decode.faults.append(Fault("error", 3, status=400))
        answer = await rig.ask(stream=True)
        assert answer.error is not None
        assert answer.error["code"] == "refused_by_engine"
        assert not answer.is_done
        assert rig.adopted["decode-0"].num_faults == 0


# --- deadlines, and who is left out


@streams
async def test_all_hang(stream: bool) -> None:
    async with Rig(prefill_queue_s=0.2, first_token_s=0.6, total_s=2) as rig:
        rig.prefill.faults.extend([Fault("hang")] * 9)
        rig.decode.faults.extend([Fault("hang")] * 9)
        answer = await rig.ask(stream=stream)
        assert answer.status in (502, 503, 504)


async def test_all_are_gone() -> None:
    async with Rig(first_token_s=0.4) as rig:
        for server in rig.servers.values():
            await server.stop()
        answer = await rig.ask()
        assert answer.status == 503
        assert answer.json()["error"]["code"] == "no_worker"
        await until(lambda: not any(x.is_up for x in rig.adopted.values()), "noticed")
        assert (await rig.get("/ready"))[0] == 503


async def test_retries_are_bounded() -> None:
    async with Rig() as rig:
        rig.prefill.faults.extend([Fault("die")] * 9)
        rig.decode.faults.extend([Fault("die")] * 9)
        answer = await rig.ask()
        assert answer.status == 502
        assert answer.json()["error"]["code"] == "worker_lost"
        assert len(rig.prefill.requests) + len(rig.decode.requests) == 4


async def test_a_server_whose_requests_fail_is_left_out_for_a_while() -> None:
    async with Rig(decode=2) as rig:
        rig.decode.faults.extend([Fault("refuse", status=500)] * 3)
        for _ in range(8):
            assert (await rig.ask()).status == 200
        before = len(rig.decode.requests)
        assert rig.adopted["decode-0"].breaker.is_open(rig.runtime.service.clock.now())
        assert (await rig.ask()).status == 200
        assert len(rig.decode.requests) == before
        await until(lambda: not rig.runtime.fleet.router.fleet.draining.any(), "tried again")
        for _ in range(4):
            assert (await rig.ask()).status == 200
        assert len(rig.decode.requests) > before


async def test_a_server_that_does_not_answer_its_polls_is_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With what runs there: an answer that is not streamed has no other sign of life."""
    monkeypatch.setattr("splitserve.adopted.fleet.POLL_S", 0.05)
    async with Rig(decode=2) as rig:
        rig.decode.faults.append(Fault("hang"))
        asking = asyncio.create_task(rig.ask())
        await until(lambda: rig.decode.requests, "sent")
        rig.decode.health = 500
        answer = await asking
        assert answer.text() == EXPECTED["completion"]
        rig.decode.health = 200
        await until(lambda: rig.adopted["decode-0"].is_up, "back")


# --- the client goes away


@pytest.mark.parametrize("stream", [False, True])
async def test_the_client_goes_during_leg_one(stream: bool) -> None:
    async with Rig() as rig:
        rig.prefill.hold = asyncio.Event()
        reply = await rig.open(stream=stream)
        await until(lambda: rig.prefill.requests, "leg 1 is sent")
        reply.close()
        await until(lambda: rig.prefill.num_aborted == 1, "told")
        assert not rig.decode.requests


async def test_the_client_goes_between_the_legs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody fetches the KV: only the server's own expiry frees it."""
    async with Rig() as rig:
        reached, go_on = asyncio.Event(), asyncio.Event()
        inner = journey_module.AdoptedJourney._fetch_and_answer

        async def held(*args: object) -> None:
            reached.set()
            await go_on.wait()
            await inner(*args)  # type: ignore[arg-type]

        monkeypatch.setattr(journey_module.AdoptedJourney, "_fetch_and_answer", held)
        reply = await rig.open(stream=True)
        await reached.wait()
        reply.close()
        await until(lambda: not rig.runtime.service.num_inflight, "over")
        go_on.set()
        assert not rig.decode.requests
        assert len(ScriptedServer.kept) == 1


@kinds
async def test_the_client_goes_in_the_middle(kind: str) -> None:
    async with Rig() as rig:
        rig.decode.step_s = 0.05
        reply = await rig.open(kind, stream=True)
        await reply.head(5)
        await reply.read(5)
        reply.close()
        await until(lambda: rig.decode.num_aborted == 1, "told")
        await until(lambda: not rig.runtime.service.num_inflight, "over")


async def test_draining_ends_what_is_inside() -> None:
    async with Rig() as rig:
        rig.decode.step_s = 0.2
        asking = asyncio.create_task(rig.ask(stream=True))
        await until(lambda: rig.decode.requests, "running")
        assert await rig.runtime.service.drain(0.1) == 1
        answer = await asking
        code = (answer.error or answer.json().get("error"))["code"] if answer.events else None
        assert code in (None, "draining")
        assert not answer.is_done
