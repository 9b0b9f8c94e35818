"""The official `openai` client, unchanged, against both servers.

Long because it goes through all that the API honours, against servers that are started once.
"""

from __future__ import annotations

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest
from openai.types import Completion

from splitserve.moments import Moment
from splitserve.text.tokenizer import Tokenizer
from tests.support.cluster import until
from tests.support.served import Served

pytestmark = pytest.mark.processes

HELLO = [{"role": "user", "content": "Say something at random."}]
PROMPT = "the quick brown fox"
GREEDY = {"temperature": 0.0, "max_tokens": 24, "extra_body": {"ignore_eos": True}}


def complete(server: Served, prompt: object = PROMPT, **settings: object) -> Completion:
    return server.client.completions.create(model="tiny", prompt=prompt, **settings)  # type: ignore


def pieces(server: Served, **settings: object) -> tuple[str, str | None, Completion]:
    """A streamed completion: its text, finish reason and last event."""
    settings = {"prompt": PROMPT} | settings
    stream = server.client.completions.create(model="tiny", stream=True, **settings)  # type: ignore
    text, reason = "", None
    for event in stream:
        for choice in event.choices:
            assert reason is None, "text after the finish reason"
            text += choice.text
            reason = choice.finish_reason
    return text, reason, event


def all_counted(server: Served) -> dict[str, float]:
    """Metrics after every journey is accounted for: a response may leave just before."""
    server.do(until(lambda: server.lab.service.num_inflight == 0, "all over"))
    return server.metrics()


def tokens_of(server: Served, prompt: str = PROMPT) -> list[int]:
    """The greedy answer's ids, from the journey."""
    journeys = server.lab.service
    answer = complete(server, prompt, **GREEDY)
    assert answer.id + "-0" in journeys.recent
    tokenizer = Tokenizer.load(server.lab.runtime.info.path)
    ids = tokenizer.encode(prompt)
    flight = server.do(server.lab.begin(ids, max_tokens=24, temperature=0.0))
    server.do(flight.land())
    return flight.output_ids


# --- chats


def test_chat(server: Served) -> None:
    answer = server.client.chat.completions.create(
        model="tiny",
        messages=HELLO,
        max_completion_tokens=12,
        seed=1,  # type: ignore[arg-type]
    )
    assert answer.object == "chat.completion"
    assert answer.id.startswith("chatcmpl-")
    assert answer.model == "tiny"
    (choice,) = answer.choices
    assert choice.message.role == "assistant"
    assert choice.message.content
    assert choice.finish_reason in ("stop", "length")
    assert answer.usage is not None
    assert 1 <= answer.usage.completion_tokens <= 12
    assert answer.usage.total_tokens == (
        answer.usage.prompt_tokens + answer.usage.completion_tokens
    )


def test_a_streamed_chat_is_the_whole_one_in_pieces(server: Served) -> None:
    def ask(**settings: object) -> object:
        return server.client.chat.completions.create(
            model="tiny",
            messages=HELLO,
            max_tokens=30,
            seed=7,
            **settings,  # type: ignore
        )

    whole = ask()
    events = list(ask(stream=True, stream_options={"include_usage": True}))  # type: ignore
    assert events[0].choices[0].delta.role == "assistant"
    assert {event.id for event in events} == {events[0].id}
    assert {event.object for event in events} == {"chat.completion.chunk"}
    *chunks, last = events
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == whole.choices[0].message.content  # type: ignore[attr-defined]
    assert [c.choices[0].finish_reason for c in chunks if c.choices[0].finish_reason] == [
        whole.choices[0].finish_reason  # type: ignore[attr-defined]
    ]
    assert all(chunk.usage is None for chunk in chunks)
    assert last.choices == []
    assert last.usage.completion_tokens == whole.usage.completion_tokens  # type: ignore
    assert last.usage.prompt_tokens == whole.usage.prompt_tokens  # type: ignore[attr-defined]


def test_without_stream_options_no_chunk_has_usage(server: Served) -> None:
    stream = server.client.chat.completions.create(
        model="tiny",
        messages=HELLO,
        max_tokens=4,
        stream=True,  # type: ignore[arg-type]
    )
    events = list(stream)
    assert all(event.usage is None and event.choices for event in events)


def test_a_conversation_goes_on_with_the_answer_as_the_client_has_it(server: Served) -> None:
    """`model_dump` of a message carries null fields, which are no request for anything."""
    first = server.client.chat.completions.create(
        model="tiny",
        messages=HELLO,
        max_tokens=8,
        temperature=0,  # type: ignore[arg-type]
    )
    messages = [*HELLO, first.choices[0].message.model_dump(), {"role": "user", "content": "More"}]
    second = server.client.chat.completions.create(
        model="tiny",
        messages=messages,
        max_tokens=8,
        temperature=0,  # type: ignore[arg-type]
    )
    assert second.usage is not None
    assert first.usage is not None
    assert second.usage.prompt_tokens > first.usage.prompt_tokens


def test_the_async_client(server: Served) -> None:
    async def main() -> None:
        url = f"{server.lab.runtime.url}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
            stream = await client.chat.completions.create(
                model="tiny",
                messages=HELLO,
                max_tokens=10,
                seed=3,
                stream=True,  # type: ignore
            )
            text = "".join([event.choices[0].delta.content or "" async for event in stream])
            whole = await client.chat.completions.create(
                model="tiny",
                messages=HELLO,
                max_tokens=10,
                seed=3,  # type: ignore[arg-type]
            )
            assert text == whole.choices[0].message.content

    asyncio.run(main())


# --- completions


def test_completion(server: Served) -> None:
    answer = complete(server, **GREEDY)
    assert answer.object == "text_completion"
    assert answer.id.startswith("cmpl-")
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 24
    text, reason, _ = pieces(server, **GREEDY)
    assert (text, reason) == (answer.choices[0].text, "length")


def test_max_tokens_is_16_if_not_said(server: Served) -> None:
    answer = complete(server, temperature=0, extra_body={"ignore_eos": True})
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 16


def test_text_and_token_ids_are_the_same_prompt(server: Served) -> None:
    ids = Tokenizer.load(server.lab.runtime.info.path).encode(PROMPT)
    assert complete(server, ids, **GREEDY).choices == complete(server, **GREEDY).choices


def test_both_servers_give_the_same_answers(split: Served, mixed: Served) -> None:
    for settings in (GREEDY, {"seed": 5, "max_tokens": 24}, {"seed": 6, "top_p": 0.5}):
        assert complete(split, **settings).choices == complete(mixed, **settings).choices


def test_several_prompts(server: Served) -> None:
    prompts = [PROMPT, "of the", "a", "what is it"]
    answer = complete(server, prompts, **GREEDY)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    singles = [complete(server, prompt, **GREEDY) for prompt in prompts]
    assert [x.text for x in answer.choices] == [single.choices[0].text for single in singles]
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 4 * 24
    assert answer.usage.prompt_tokens == sum(x.usage.prompt_tokens for x in singles if x.usage)
    texts = [""] * 4
    stream = server.client.completions.create(
        model="tiny",
        prompt=prompts,
        stream=True,
        stream_options={"include_usage": True},
        **GREEDY,  # type: ignore[call-overload]
    )
    for event in stream:
        for choice in event.choices:
            texts[choice.index] += choice.text
    assert texts == [choice.text for choice in answer.choices]
    assert event.usage.completion_tokens == 4 * 24


# --- sampling


def test_seeds_reproduce(server: Served) -> None:
    settings = {"max_tokens": 16, "temperature": 1.0, "extra_body": {"ignore_eos": True}}
    answers = [complete(server, seed=seed, **settings).choices for seed in (1, 1, 2, 3, -1)]
    assert answers[0] == answers[1]
    assert len({choices[0].text for choices in answers}) == 4
    assert complete(server, seed=2**64 - 1, **settings).choices == answers[4]


def test_without_a_seed_answers_differ(server: Served) -> None:
    settings = {"max_tokens": 16, "temperature": 1.5, "extra_body": {"ignore_eos": True}}
    assert len({complete(server, **settings).choices[0].text for _ in range(3)}) == 3


@pytest.mark.parametrize(
    "filters", [{"top_k": 1}, {"min_p": 1.0}, {"top_p": 1e-9}], ids=lambda x: next(iter(x))
)
def test_filters_that_leave_one_token_are_greedy(server: Served, filters: dict[str, float]) -> None:
    greedy = complete(server, **GREEDY).choices[0].text
    settings = {"seed": 1, "temperature": 2.0, "max_tokens": 24}
    extra = {"ignore_eos": True} | filters
    assert complete(server, **settings, extra_body=extra).choices[0].text == greedy
    free = complete(server, **settings, extra_body={"ignore_eos": True}).choices[0].text
    assert free != greedy


def test_defaults_are_the_models(server: Served) -> None:
    """generation_config.json says 0.8: a request that says nothing is sampled with it."""
    assert complete(server, seed=9).choices == complete(server, seed=9, temperature=0.8).choices
    assert complete(server, seed=9).choices != complete(server, seed=9, temperature=0.0).choices


# --- ends


def test_stop_strings_across_tokens(server: Served) -> None:
    """A stop string that begins inside one token and ends inside a later one."""
    whole = complete(server, **GREEDY).choices[0].text
    for first in range(1, 12, 3):
        stop = whole[first : first + 5]
        cut = whole[: whole.index(stop)]
        answer = complete(server, stop=stop, **GREEDY)
        assert (answer.choices[0].text, answer.choices[0].finish_reason) == (cut, "stop")
        text, reason, _ = pieces(server, stop=["never to be seen", stop], **GREEDY)
        assert (text, reason) == (cut, "stop")
        assert answer.usage is not None
        assert 0 < answer.usage.completion_tokens < 24


def test_an_answer_that_a_stop_string_ends_is_not_counted_as_cancelled(server: Served) -> None:
    stop = complete(server, **GREEDY).choices[0].text[4:8]
    before = all_counted(server)
    complete(server, stop=stop, **GREEDY | {"max_tokens": 600})
    after = all_counted(server)
    outcomes = ("stop", "cancelled")
    names = [f'splitserve_requests_total{{outcome="{outcome}"}}' for outcome in outcomes]
    assert [after.get(name, 0) - before.get(name, 0) for name in names] == [1, 0]


def test_a_stop_string_that_never_comes_changes_nothing(server: Served) -> None:
    whole = complete(server, **GREEDY).choices
    assert complete(server, stop=[whole[0].text[-1] + "never"], **GREEDY).choices == whole


def test_stop_token_ids(server: Served) -> None:
    """The answer ends with the token; its text is not shown; it counts as output."""
    ids = tokens_of(server)
    tokenizer = Tokenizer.load(server.lab.runtime.info.path)
    end = next(i for i in range(3, 24) if ids[i] not in ids[:i])
    extra = {"ignore_eos": True, "stop_token_ids": [ids[end], 511]}
    answer = complete(server, **GREEDY | {"extra_body": extra})
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].text == tokenizer.decode(ids[:end])
    assert answer.usage is not None
    assert answer.usage.completion_tokens == end + 1
    text, reason, _ = pieces(server, **GREEDY | {"extra_body": extra})
    assert (text, reason) == (answer.choices[0].text, "stop")


def test_eos_ends_an_answer_unless_ignored(server: Served) -> None:
    """Sampled hot, a vocabulary of 512 gives one of two EOS ids soon; seeds make it certain."""
    settings = {"max_tokens": 200, "temperature": 2.0}
    ends = [complete(server, seed=seed, **settings).choices[0] for seed in range(4)]
    assert "stop" in {choice.finish_reason for choice in ends}
    seed = next(i for i, choice in enumerate(ends) if choice.finish_reason == "stop")
    ignored = complete(server, seed=seed, **settings, extra_body={"ignore_eos": True})
    assert ignored.choices[0].finish_reason == "length"
    assert ignored.choices[0].text.startswith(ends[seed].text)


def test_n_choices_are_those_of_one_seed_and_share_the_prompt(server: Served) -> None:
    prompt = "a prompt of its own for n choices, " * 6
    settings = {"max_tokens": 10, "seed": 11, "temperature": 1.0}
    answer = complete(server, prompt, n=4, **settings)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    texts = [choice.text for choice in answer.choices]
    assert len(set(texts)) == 4, "each choice has its own draws"
    assert texts[0] == complete(server, prompt, **settings).choices[0].text
    assert answer.usage is not None
    num_prompt = len(Tokenizer.load(server.lab.runtime.info.path).encode(prompt))
    assert answer.usage.prompt_tokens == num_prompt
    for choice in (1, 2, 3):
        timeline = server.lab.service.recent[f"{answer.id}-{choice}"]
        assert timeline.cached_tokens is not None
        assert timeline.cached_tokens >= num_prompt - 16
    again = complete(server, [prompt, PROMPT], n=4, **settings)
    assert [choice.text for choice in again.choices[:4]] == texts
    assert len(again.choices) == 8


def test_n_choices_of_a_chat_in_one_stream(split: Served, mixed: Served) -> None:
    def ask(server: Served, **settings: object) -> object:
        return server.client.chat.completions.create(
            model="tiny",
            messages=HELLO,
            max_tokens=12,
            n=3,
            seed=5,
            **settings,  # type: ignore
        )

    whole = [choice.message.content for choice in ask(mixed).choices]  # type: ignore
    texts, roles, reasons = ["", "", ""], [0, 0, 0], [0, 0, 0]
    for event in ask(split, stream=True):  # type: ignore[attr-defined]
        for choice in event.choices:
            texts[choice.index] += choice.delta.content or ""
            roles[choice.index] += choice.delta.role == "assistant"
            reasons[choice.index] += choice.finish_reason is not None
    assert texts == whole
    assert roles == reasons == [1, 1, 1]


def test_min_tokens_keeps_an_answer_from_ending(server: Served) -> None:
    """Neither a stop id nor a stop string ends it before."""
    first = tokens_of(server)[0]
    extra = {"stop_token_ids": [first], "min_tokens": 6}
    answer = complete(server, temperature=0, max_tokens=12, extra_body=extra)
    assert answer.usage is not None
    assert answer.usage.completion_tokens > 6
    plain = complete(server, **GREEDY).choices[0].text
    held = complete(
        server, stop=plain[0], **GREEDY | {"extra_body": {"ignore_eos": True, "min_tokens": 6}}
    )
    assert held.choices[0].text.startswith(plain[:3])


def test_logit_bias_forces_and_forbids(server: Served) -> None:
    ids = tokens_of(server)
    tokenizer = Tokenizer.load(server.lab.runtime.info.path)
    wanted = next(i for i in range(300, 400) if tokenizer.decode([i]).isascii())
    forced = complete(server, logit_bias={str(wanted): 100}, **GREEDY)
    assert forced.choices[0].text == tokenizer.decode([wanted] * 24)
    forbidden = complete(server, logit_bias={str(ids[0]): -100}, **GREEDY)
    assert not forbidden.choices[0].text.startswith(tokenizer.decode(ids[:1]))


def test_penalties_change_answers_and_are_those_of_one_worker(split: Served, mixed: Served) -> None:
    """Rebuilt from the ids: the split answer, whose second token comes from elsewhere, is equal."""
    settings = GREEDY | {"max_tokens": 60, "frequency_penalty": 2.0, "presence_penalty": 2.0}
    settings["extra_body"] = {"ignore_eos": True, "repetition_penalty": 1.5}
    texts = [complete(server, **settings).choices[0].text for server in (split, mixed)]
    assert texts[0] == texts[1]
    assert texts[0] != complete(mixed, **GREEDY | {"max_tokens": 60}).choices[0].text


def test_logprobs_of_a_completion(server: Served) -> None:
    answer = complete(server, logprobs=3, **GREEDY).choices[0]
    told = answer.logprobs
    assert told is not None
    assert told.tokens is not None
    assert told.token_logprobs is not None
    assert told.top_logprobs is not None
    assert told.text_offset is not None
    assert len(told.tokens) == len(told.token_logprobs) == len(told.top_logprobs) == 24
    assert "".join(told.tokens) == answer.text or "\ufffd" in answer.text
    assert told.text_offset[0] == 0
    assert all(x <= 0 for x in told.token_logprobs)
    for drawn, value, top in zip(told.tokens, told.token_logprobs, told.top_logprobs, strict=True):
        assert top[drawn] == value == max(top.values()), "greedy: the likeliest was drawn"
    assert complete(server, logprobs=0, **GREEDY).choices[0].text == answer.text


def test_logprobs_of_a_chat_and_its_stream(split: Served, mixed: Served) -> None:
    """The first token's come from the prefill worker: the same as on one worker."""

    def ask(server: Served, **settings: object) -> object:
        return server.client.chat.completions.create(
            model="tiny",
            messages=HELLO,
            max_tokens=12,
            seed=3,
            logprobs=True,
            top_logprobs=2,
            **settings,  # type: ignore
        )

    whole = [ask(server).choices[0].logprobs for server in (split, mixed)]  # type: ignore
    assert whole[0] == whole[1]
    assert len(whole[0].content) == 12
    assert all(len(entry.top_logprobs) == 2 for entry in whole[0].content)
    assert all(bytes(entry.bytes) for entry in whole[0].content)
    streamed = []
    for event in ask(split, stream=True):  # type: ignore[attr-defined]
        for choice in event.choices:
            streamed += choice.logprobs.content if choice.logprobs else []
    assert [x.model_dump() for x in streamed] == [x.model_dump() for x in whole[0].content]


def test_logprobs_are_of_the_raw_logits(server: Served) -> None:
    """Neither the temperature nor a bias changes what is told of the first position."""
    plain = complete(server, logprobs=5, temperature=0, max_tokens=1).choices[0].logprobs
    biased = (
        complete(server, logprobs=5, temperature=0, max_tokens=1, logit_bias={"400": 100})
        .choices[0]
        .logprobs
    )
    assert plain is not None
    assert biased is not None
    assert plain.top_logprobs is not None
    assert biased.top_logprobs is not None
    assert plain.top_logprobs[0].items() <= biased.top_logprobs[0].items()


def test_an_answer_may_end_with_its_first_token(server: Served) -> None:
    assert complete(server, max_tokens=1).choices[0].finish_reason == "length"
    first = tokens_of(server)[0]
    extra = {"stop_token_ids": [first]}
    answer = complete(server, temperature=0, extra_body=extra)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("", "stop")
    text, reason, _ = pieces(server, temperature=0, extra_body=extra)
    assert (text, reason) == ("", "stop")


# --- many at once, and gone


def test_sixteen_streams_at_once(server: Served) -> None:
    """Each gets the answer that it gets alone."""
    prompts = [f"{PROMPT} {i}" for i in range(16)]
    expected = [complete(server, prompt, **GREEDY).choices[0].text for prompt in prompts]
    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda prompt: pieces(server, prompt=prompt, **GREEDY), prompts))
    assert [text for text, _, _ in answers] == expected
    assert {reason for _, reason, _ in answers} == {"length"}


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_the_workers(server: Served, stream: bool) -> None:
    """It leaves while its answer is held in the middle; `settle` then finds every block free."""
    is_split = server.lab.runtime.config.num_decode
    worker, num_seen = ("decode-0", 2) if is_split else ("mixed-0", 1)
    service = server.lab.service
    before = server.metrics().get('splitserve_requests_total{outcome="cancelled"}', 0.0)
    with server.lab.hold("step", worker):
        connection = server.connect()
        body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 900, "stream": stream}
        body |= {"ignore_eos": True}  # sampled hot, an EOS may come as the second token
        headers = {"content-type": "application/json"}
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
        server.do(until(lambda: service.num_inflight == 1, "in flight"))
        (journey,) = service._tasks.values()
        server.do(until(lambda: len(journey.output_ids) == num_seen, "decoding"))
        connection.close()
        server.do(until(lambda: service.num_inflight == 0, "given up"))
    server.settle()
    assert len(journey.output_ids) < 900
    assert server.metrics()['splitserve_requests_total{outcome="cancelled"}'] == before + 1


def test_closing_a_stream_with_the_client(server: Served) -> None:
    for _ in range(5):
        stream = server.client.completions.create(
            model="tiny", prompt=PROMPT, max_tokens=900, stream=True, temperature=0
        )
        next(iter(stream))
        stream.close()
    server.do(until(lambda: server.lab.service.num_inflight == 0, "given up"))


# --- what can be seen


def test_models(server: Served) -> None:
    (card,) = server.client.models.list().data
    assert (card.id, card.object, card.owned_by) == ("tiny", "model", "splitserve")
    assert server.client.models.retrieve("tiny") == card
    with pytest.raises(openai.NotFoundError) as caught:
        server.client.models.retrieve("gpt-4")
    assert caught.value.code == "model_not_found"


def test_health_and_ready(server: Served) -> None:
    assert server.request("GET", "/health").json() == {"status": "ok"}
    ready = server.request("GET", "/ready")
    assert ready.status == 200
    roles = {role.value for _, role in server.lab.runtime.config.roles}
    assert ready.json()["ready"] is True
    assert set(ready.json()["workers"].values()) == roles


def test_metrics_move(server: Served) -> None:
    before = all_counted(server)
    answer = complete(server, **GREEDY)
    after = all_counted(server)

    def moved(name: str) -> float:
        return after[name] - before.get(name, 0.0)

    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    assert moved('splitserve_requests_total{outcome="length"}') == 1
    assert moved("splitserve_prompt_tokens_total") == answer.usage.prompt_tokens
    assert moved("splitserve_output_tokens_total") == 24
    cached = answer.usage.prompt_tokens_details.cached_tokens
    assert moved("splitserve_cached_tokens_total") == cached
    assert moved("splitserve_time_to_first_token_seconds_count") == 1
    assert moved("splitserve_time_per_output_token_seconds_count") == 1
    is_split = server.lab.runtime.config.num_decode
    assert moved("splitserve_kv_transfers_total") == (1 if is_split else 0)
    assert after["splitserve_negative_spans_total"] == 0
    assert after["splitserve_frame_gaps_total"] == 0


def test_cached_tokens_are_whole_granules_of_what_was_there_before(server: Served) -> None:
    prompt = [9, 8, 7, 6, 5] * 14  # 70 tokens
    cached = []
    for _ in range(2):
        answer = complete(server, prompt, max_tokens=2)
        assert answer.usage is not None
        assert answer.usage.prompt_tokens_details is not None
        cached.append(answer.usage.prompt_tokens_details.cached_tokens)
    assert cached == [0, 64]


def test_every_answer_has_a_request_id_and_a_timeline(split: Served) -> None:
    raw = split.client.completions.with_raw_response.create(
        model="tiny", prompt=PROMPT, max_tokens=8, extra_headers={"x-request-id": "mine"}
    )
    request_id = raw.headers["x-request-id"]
    assert request_id == raw.parse().id != "mine"
    reply = split.request("GET", f"/debug/requests/{request_id}")
    assert reply.status == 200
    timeline = reply.json()
    assert {mark["moment"] for mark in timeline["moments"]} == {moment.value for moment in Moment}
    assert min(timeline["spans_ms"].values()) >= 0
    times = [mark["ms"] for mark in timeline["moments"]]
    assert times == sorted(times)
    assert timeline["attempts"] == 1
    assert timeline["transfer_proof"] == "digest"
    assert timeline["output_tokens"] == 8
    workers = {mark["moment"]: mark["worker"] for mark in timeline["moments"]}
    assert workers["prefill_ended"] == workers["first_token"] == "prefill-0"
    assert workers["transfer_ended"] == workers["second_token"] == "decode-0"


def test_the_timeline_of_each_prompt(server: Served) -> None:
    answer = complete(server, ["a b c", "d e f"], max_tokens=3)
    for i in range(2):
        timeline = server.request("GET", f"/debug/requests/{answer.id}-{i}").json()
        assert timeline["output_tokens"] in (1, 2, 3)
        assert min(timeline["spans_ms"].values()) >= 0
    assert server.request("GET", "/debug/requests/nobody").status == 404


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("HEAD", "/health", 200),
        ("HEAD", "/v1/models", 200),
        ("GET", "/v1/models/", 200),
        ("GET", "/v1/completions", 405),
        ("HEAD", "/v1/chat/completions", 405),
        ("PUT", "/v1/completions", 405),
        ("POST", "/v1/models", 405),
        ("DELETE", "/v1/models/tiny", 405),
        ("GET", "/", 404),
        ("GET", "/v1/engines", 404),
        ("POST", "/v1/embeddings", 404),
        ("GET", "/%00%ff/../etc", 404),
    ],
)
def test_routes_and_methods(server: Served, method: str, path: str, status: int) -> None:
    reply = server.request(method, path)
    assert reply.status == status
    if method == "HEAD":
        assert reply.body == b""
    elif status >= 400:
        assert reply.error["type"] == "invalid_request_error"
        assert reply.headers["x-request-id"]
    if status == 405:
        allowed = {"GET, HEAD"} if "models" in path else {"POST"}
        assert {reply.headers["allow"]} == allowed
