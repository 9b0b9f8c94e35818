"""What goes to which server, and what comes back of it."""

from __future__ import annotations

import asyncio
import json

import pytest

from splitserve.config import SplitMode
from tests.support.adopted import PROMPT, Rig, until
from tests.support.scripted import MODEL, ScriptedServer, generate, text_of, tokenize

kinds = pytest.mark.parametrize("kind", ["completion", "chat"])
IDS = {"completion": tokenize(PROMPT), "chat": [1, *tokenize(PROMPT), 2]}
EXPECTED = {kind: text_of(generate(ids, 12)) for kind, ids in IDS.items()}


@kinds
@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_comes_of_two_legs(kind: str, stream: bool) -> None:
    async with Rig() as rig:
        options = {"stream_options": {"include_usage": True}} if stream else {}
        answer = await rig.ask(kind, stream=stream, **options)
        assert answer.status == 200
        assert answer.text() == EXPECTED[kind]
        assert answer.usage["prompt_tokens"] == len(IDS[kind])
        assert answer.usage["completion_tokens"] == 12
        assert answer.is_done == stream
        (first,), (second,) = rig.prefill.requests, rig.decode.requests
        assert first["kv_transfer_params"] == {"do_remote_decode": True, "do_remote_prefill": False}
        assert second["max_tokens"] == 12
        assert second["kv_transfer_params"]["do_remote_prefill"] is True
        if kind == "chat":
            assert second["kv_transfer_params"]["prompt_token_ids"] == IDS[kind]
        else:
            assert second["prompt"] == IDS[kind]
        assert rig.counts.handoffs == 1
        # nothing that only servers tell each other, and no ids that nobody asked for
        for word in (b"remote", b"transfer", b"token_ids"):
            assert word not in answer.raw


async def test_leg_one_keeps_what_shapes_the_prompt_and_nothing_else() -> None:
    async with Rig() as rig:
        await rig.ask(
            "chat",
            min_tokens=5,
            stop=["x"],
            logprobs=True,
            top_logprobs=2,
            response_format={"type": "json_object"},
            chat_template_kwargs={"enable_thinking": False},
            add_generation_prompt=True,
            cache_salt="s",
            user="me",
            stream=True,
        )
        (first,), (second,) = rig.prefill.requests, rig.decode.requests
        assert first["min_tokens"] == 1
        assert first["max_completion_tokens"] == first["max_tokens"] == 1
        for name in ("stop", "logprobs", "top_logprobs", "response_format", "stream_options"):
            assert name not in first
        for name in ("chat_template_kwargs", "add_generation_prompt", "cache_salt", "messages"):
            assert first[name] == second[name]
        assert second["stop"] == ["x"]
        assert second["min_tokens"] == 5
        assert "user" not in second


async def test_token_ids_go_to_who_asks_for_them() -> None:
    async with Rig() as rig:
        answer = await rig.ask(stream=True, return_token_ids=True)
        ids = [x for e in answer.events for x in e["choices"][0]["token_ids"]]
        assert ids == generate(IDS["completion"], 12)
        assert answer.events[0]["choices"][0]["prompt_token_ids"] == IDS["completion"]
        whole = (await rig.ask(return_token_ids=True)).json()
        assert whole["choices"][0]["token_ids"] == ids


@pytest.mark.parametrize("stream", [False, True])
async def test_each_prompt_of_a_list_has_its_own_journey(stream: bool) -> None:
    async with Rig(decode=2) as rig:
        prompts = [PROMPT, PROMPT + " nine", "other words are here now for once again"]
        options = {"stream_options": {"include_usage": True}} if stream else {}
        answer = await rig.ask(prompt=prompts, stream=stream, **options)
        for i, prompt in enumerate(prompts):
            assert answer.text(i) == text_of(generate(tokenize(prompt), 12))
        assert len(rig.prefill.requests) == 3
        assert answer.usage["prompt_tokens"] == sum(len(tokenize(x)) for x in prompts)
        assert answer.usage["completion_tokens"] == 36
        assert len({event["id"] for event in answer.events}) == 1


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"n": 2}, "n = 2"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"echo": True, "logprobs": 1}, "echo"),
    ],
)
@pytest.mark.parametrize("mixed", [0, 1])
async def test_some_are_served_on_one_server(
    fields: dict[str, object], why: str, mixed: int
) -> None:
    async with Rig(mixed=mixed) as rig:
        answer = await rig.ask(**fields)
        assert answer.status == 200
        assert not rig.prefill.requests
        server = rig.servers["mixed-0"] if mixed else rig.decode
        (only,) = server.requests
        assert "kv_transfer_params" not in only
        assert only["prompt"] == PROMPT
        assert any(why in note for note in rig.notes())


async def test_short_prompts_stay_on_the_decode_server() -> None:
    async with Rig(split=SplitMode.AUTO) as rig:
        assert (await rig.ask(prompt="Hi")).status == 200
        assert not rig.prefill.requests
        assert (await rig.ask(prompt="word " * 60)).status == 200
        assert len(rig.prefill.requests) == 1


async def test_headers_are_chosen_and_not_passed_on() -> None:
    async with Rig(key="the-servers") as rig:
        reply = await rig.open(stream=True)
        assert await reply.head(5) == 200
        await reply.body(5)
        reply.close()
        (first,), (second,) = rig.prefill.headers, rig.decode.headers
        for headers in (first, second):
            assert headers["authorization"] == "bearer the-servers"
            assert set(headers) == {
                "host",
                "accept",
                "content-type",
                "content-length",
                "authorization",
                "x-request-id",
            }
        # one request, one id everywhere
        assert first["x-request-id"] == second["x-request-id"]
        request_id = "cmpl-" + first["x-request-id"]
        status, timeline = await rig.get(f"/debug/requests/{request_id}")
        assert status == 200
        moments = [mark["moment"] for mark in json.loads(timeline)["moments"]]
        for moment in ("arrived", "admitted", "picked", "prefill_ended", "decode_queued"):
            assert moment in moments
        assert moments.index("prefill_ended") < moments.index("first_token")
        assert moments[-1] == "finished"


@kinds
async def test_the_guarantee_is_told(kind: str) -> None:
    async def told(**fields: object) -> str:
        reply = await rig.open(kind, **fields)
        await reply.head(5)
        headers = dict(reply.connection.headers)
        await reply.body(5)
        reply.close()
        return headers[b"x-splitserve-guarantee"].decode()

    async with Rig() as rig:
        assert await told() == "restartable"
        for fields in (
            {"temperature": 0.7},
            {"temperature": ...},  # whatever the server's default is
            {"stop": ["x"]},
            {"presence_penalty": 0.5},
            {"n": 2},
        ):
            assert await told(**fields) == "passthrough", fields
        assert await told(presence_penalty=0, stop=[]) == "restartable"
        if kind == "chat":
            assert await told(max_tokens=...) == "passthrough"
        else:
            assert await told(max_tokens=...) == "restartable"
            assert await told(logprobs=1) == "passthrough"


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"kv_transfer_params": {"do_remote_prefill": True}}, "unsupported_field", None),
        ({"data_parallel_rank": 1}, "unsupported_field", None),
        ({"frequencypenalty": 1}, "unknown_field", None),
        ({"use_beam_search": True}, "unsupported_field", None),
        ({"vllm_xargs": {"a": 1}}, "unsupported_field", None),
        ({"model": "other"}, "model_not_found", "model"),
        ({"n": 0}, "invalid_value", "n"),
        ({"stream": 1}, "invalid_value", "stream"),
        ({"stream_options": {"include_usage": True}}, "invalid_value", "stream_options"),
    ],
)
@kinds
async def test_what_is_not_known_goes_nowhere(
    kind: str, fields: dict[str, object], code: str, param: str | None
) -> None:
    async with Rig() as rig:
        answer = await rig.ask(kind, **fields)
        assert answer.status in (400, 404)
        error = answer.json()["error"]
        assert error["code"] == code
        assert error["param"] == (param or next(iter(fields)))
        assert not rig.prefill.requests
        assert not rig.decode.requests


async def test_media_goes_nowhere() -> None:
    async with Rig() as rig:
        part = {"type": "image_url", "image_url": {"url": "http://169.254.169.254/"}}
        answer = await rig.ask("chat", messages=[{"role": "user", "content": [part]}])
        assert answer.status == 400
        assert answer.json()["error"]["param"] == "messages[0].content[0]"
        assert not rig.prefill.requests


async def test_a_server_with_other_models_is_refused() -> None:
    async with Rig(decode=2) as rig:
        other = rig.servers["decode-1"]
        port = other.port
        await other.stop()
        await until(lambda: not rig.adopted["decode-1"].is_up, "lost")
        other.model = "another"
        await other.start(port)
        await until(lambda: "serves another" in rig.adopted["decode-1"].reason, "refused")
        assert not rig.adopted["decode-1"].is_up
        assert (await rig.ask()).status == 200
        assert not other.requests


async def test_a_connection_is_used_again() -> None:
    async with Rig() as rig:
        for stream in (True, False, True):
            assert (await rig.ask(stream=stream)).status == 200
        # one for the polls, one for the legs, one more if a poll met a leg
        assert rig.decode.num_connections <= 3
        assert rig.prefill.num_connections <= 3


async def test_requests_beside_each_other_are_not_mixed_up() -> None:
    async with Rig(prefill=2, decode=2) as rig:
        prompts = [f"{PROMPT} {i}" for i in range(20)]
        answers = await asyncio.gather(*[rig.ask(prompt=x, stream=True) for x in prompts])
        for prompt, answer in zip(prompts, answers, strict=True):
            assert answer.text() == text_of(generate(tokenize(prompt), 12))
        assert all(server.requests for server in rig.servers.values())


async def test_models_and_metrics_are_told() -> None:
    async with Rig() as rig:
        await rig.ask()
        status, body = await rig.get("/v1/models")
        assert status == 200
        (card,) = json.loads(body)["data"]
        assert (card["id"], card["max_model_len"]) == (MODEL, 2048)
        _, text = await rig.get("/metrics")
        samples = dict(
            line.rsplit(" ", 1) for line in text.decode().splitlines() if line[:1] != "#"
        )
        assert samples["splitserve_adopted_handoffs_total"] == "1.0"
        assert samples['splitserve_adopted_up{server="decode-0"}'] == "1.0"
        assert samples['splitserve_adopted_kv_fetched_late_total{server="prefill-0"}'] == "1.0"
        assert samples['splitserve_adopted_kv_usage{server="prefill-0"}'] == "0.25"
        assert samples['splitserve_requests_total{outcome="length"}'] == "1.0"
        assert samples["splitserve_prompt_tokens_total"] == str(float(len(IDS["completion"])))
        assert not ScriptedServer.kept
