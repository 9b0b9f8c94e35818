"""The gateway over real vLLM servers (`make test-vllm`). The tests run in the order of the file: a
server takes a minute to start, so those that kill one come last."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from splitserve.model.fetch import resolve_model
from tests.support import vllm_replies as recorded
from tests.vllm.servers import (
    LEASE_S,
    MODEL,
    Process,
    ask,
    get,
    joined,
    metric,
    post,
    start_gateway,
    start_vllm,
    texts,
)

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]

STORY = (
    "Once upon a time there was a little fox who lived in a big forest with many other animals, "
    "and they were all very happy until one day the fox found a golden key under an old oak tree."
)
DEATH_TRIES = (1, 2)  # vLLM's front may outlive its engine for a moment, and be asked once more
BLOCK = 128  # tokens of a KV block of vLLM on a CPU


class Pair:
    def __init__(self, model_dir: Path, logs: Path) -> None:
        self.logs = logs
        self.between_legs: Process | None = None
        self._model_dir = model_dir
        self.a = start_vllm(model_dir, logs / "a.log", 0)
        self.b = start_vllm(model_dir, logs / "b.log", 1)
        self.processes = [self.a, self.b]
        for server in self.processes:
            server.wait_ready("/health")

    def restart_a(self) -> None:
        self.a = start_vllm(self._model_dir, self.logs / "a.log", 0)
        self.processes.append(self.a)
        self.a.wait_ready("/health")

    def splitting(self) -> tuple[str, ...]:
        """A prefills, B decodes, always."""
        return ("--adopt-prefill", self.a.url, "--adopt-decode", self.b.url, "--split", "always")

    def gateway(self, *options: str) -> Process:
        lease = ("--adopt-lease", str(LEASE_S))
        process = start_gateway(self.logs / "gateway.log", *options, *lease)
        self.processes.append(process)
        process.wait_ready("/ready")
        return process

    def close(self) -> None:
        for process in self.processes:
            process.kill()


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    resolved = resolve_model(None, print)
    found = Pair(resolved.path, tmp_path_factory.mktemp("vllm"))
    yield found
    found.close()


@pytest.fixture(scope="module")
def split(pair: Pair) -> Process:
    return pair.gateway(*pair.splitting())


def handoffs(gateway: Process) -> float:
    return metric(gateway.port, "splitserve_adopted_handoffs_total")


def test_what_was_recorded_is_what_it_answers(pair: Pair) -> None:
    """The scripted servers of the quick suite speak as vLLM does."""

    def shape(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: shape(x) for name, x in value.items()}
        if isinstance(value, list) and value and isinstance(value[0], dict):
            return [shape(value[0])]
        return type(value) if isinstance(value, bool | str | list) else None

    def events(**fields: Any) -> list[dict[str, Any]]:
        options = {"include_usage": True}
        response = post(
            pair.b.port, stream=True, stream_options=options, return_token_ids=True, **fields
        )
        raw = [x.removeprefix(b"data: ") for x in response.read().split(b"\n\n") if x]
        return [json.loads(event) for event in raw[:-1]]

    messages = [{"role": "user", "content": "Hi"}]
    whole: dict[str, Any] = {"max_tokens": 2, "return_token_ids": True}
    completion = ask(pair.b.port, "completion", prompt="Hi there", **whole)
    assert shape(completion) == shape(recorded.COMPLETION)
    chat = ask(pair.b.port, "chat", messages=messages, **whole)
    assert shape(chat) == {**shape(recorded.CHAT), "usage": shape(chat["usage"])}
    _, middle, _, usage = events(kind="completion", prompt="Hi there", max_tokens=3)
    assert shape(middle) == shape(recorded.COMPLETION_CHUNK)
    assert shape(usage) == shape(recorded.USAGE_CHUNK)
    role, middle, *_ = events(kind="chat", messages=messages, max_tokens=3)
    assert shape(role) == shape(recorded.CHAT_ROLE_CHUNK)
    assert shape(middle) == shape(recorded.CHAT_CHUNK)
    wanted = {"do_remote_decode": True, "do_remote_prefill": False}
    # of an offer that nobody takes only expiry frees the blocks: this one is small
    leg_one = ask(
        pair.a.port, "completion", prompt="Hi there", max_tokens=1, kv_transfer_params=wanted
    )
    assert shape(leg_one["kv_transfer_params"]) == shape(recorded.OFFER)
    refused = post(pair.b.port, "completion", prompt="Hi", max_tokens=2, temperature=-1)
    assert refused.status == 400
    assert shape(json.loads(refused.read())) == shape(recorded.ERROR)


@pytest.mark.parametrize(
    "num_tokens", [40, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK], ids=lambda n: f"{n}_tokens"
)
def test_split_is_as_whole(pair: Pair, split: Process, num_tokens: int) -> None:
    """Greedy, at the edges of a KV block too; the second time the decode server has the blocks."""
    prompt = [500 + (37 * i + 11 * num_tokens) % 9000 for i in range(num_tokens)]
    fields: dict[str, Any] = {"prompt": prompt, "max_tokens": 8}
    before = handoffs(split)
    answer = ask(split.port, "completion", **fields)
    assert handoffs(split) == before + 1
    assert answer["usage"]["prompt_tokens"] == num_tokens
    assert texts(answer) == texts(ask(pair.b.port, "completion", **fields))
    again = ask(split.port, "completion", **fields, stream=True)
    assert texts(again) == texts(answer)


@pytest.mark.parametrize("stream", [False, True])
def test_chat(pair: Pair, split: Process, stream: bool) -> None:
    fields: dict[str, Any] = {
        "messages": [{"role": "user", "content": STORY}],
        "max_tokens": 10,
        "logprobs": True,
        "top_logprobs": 2,
    }
    if stream:
        fields |= {"stream": True, "stream_options": {"include_usage": True}}
    before = handoffs(split)
    ours = ask(split.port, "chat", **fields)
    assert handoffs(split) == before + 1
    theirs = ask(pair.b.port, "chat", **fields)
    assert texts(ours) == texts(theirs)
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert ours["usage"][name] == theirs["usage"][name]
    if stream:
        (choice,), (other,) = ours["choices"], theirs["choices"]
        assert [x["token"] for x in choice["tokens"]] == [x["token"] for x in other["tokens"]]
    else:
        content = ours["choices"][0]["logprobs"]["content"]
        other_content = theirs["choices"][0]["logprobs"]["content"]
        assert [x["token"] for x in content] == [x["token"] for x in other_content]
        for mine, his in zip(content, other_content, strict=True):
            assert mine["logprob"] == pytest.approx(his["logprob"], abs=1e-3)


@pytest.mark.parametrize("stream", [False, True])
def test_a_list_of_prompts(pair: Pair, split: Process, stream: bool) -> None:
    prompts = [STORY, "The capital of France is a city that", STORY[:80]]
    before = handoffs(split)
    ours = ask(split.port, "completion", prompt=prompts, max_tokens=6, stream=stream)
    assert handoffs(split) == before + 3
    theirs = ask(pair.b.port, "completion", prompt=prompts, max_tokens=6)
    assert texts(ours) == texts(theirs)


def test_several_choices(pair: Pair, split: Process) -> None:
    before = handoffs(split)
    fields: dict[str, Any] = {"prompt": STORY, "max_tokens": 4, "n": 2, "temperature": 0.7}
    answer = ask(split.port, "completion", **fields, seed=5)
    assert len(answer["choices"]) == 2
    assert texts(answer) == texts(ask(pair.b.port, "completion", **fields, seed=5))
    streamed = ask(split.port, "completion", **fields, seed=5, stream=True)
    assert texts(streamed) == texts(answer)
    assert handoffs(split) == before


def test_logprobs_and_echo(pair: Pair, split: Process) -> None:
    for extra in ({"logprobs": 2}, {"logprobs": 1, "echo": True}, {"echo": True}):
        fields: dict[str, Any] = {"prompt": STORY, "max_tokens": 4, **extra}
        ours, theirs = (
            ask(split.port, "completion", **fields),
            ask(pair.b.port, "completion", **fields),
        )
        assert texts(ours) == texts(theirs)
        if "logprobs" in extra:
            mine, his = ours["choices"][0]["logprobs"], theirs["choices"][0]["logprobs"]
            assert mine["tokens"] == his["tokens"]
            assert mine["text_offset"] == his["text_offset"]


def test_stops_and_sampling(pair: Pair, split: Process) -> None:
    whole = texts(ask(pair.b.port, "completion", prompt=STORY, max_tokens=8))[0]
    stop = whole[len(whole) // 2 :][:3]
    fields: dict[str, Any] = {"prompt": STORY, "max_tokens": 8, "stop": [stop]}
    ours = ask(split.port, "completion", **fields, stream=True)
    theirs = ask(pair.b.port, "completion", **fields)
    assert texts(ours) == texts(theirs)
    assert ours["choices"][0]["finish_reason"] == "stop"
    seeded: dict[str, Any] = {"prompt": STORY, "max_tokens": 8, "temperature": 0.8, "seed": 7}
    assert texts(ask(split.port, "completion", **seeded)) == texts(
        ask(pair.b.port, "completion", **seeded)
    )


def test_the_openai_client(split: Process) -> None:
    client = openai.OpenAI(base_url=f"{split.url}/v1", api_key="none", max_retries=0, timeout=60)
    assert [model.id for model in client.models.list()] == [MODEL]
    stream = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": STORY}],
        max_tokens=6,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 6
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model=MODEL, prompt=STORY, logit_bias={"99999999": 1})
    assert refused.value.code == "refused_by_engine"


def test_the_engines_refusals_free_what_was_prefilled(pair: Pair, split: Process) -> None:
    """By their status, though vLLM says some only inside a stream of status 200."""
    for fields in ({"logit_bias": {"99999999": 1}}, {"max_tokens": 5000}, {"temperature": -1}):
        response = post(split.port, "completion", prompt=STORY, stream=True, **fields)
        body = json.loads(response.read())
        assert response.status == 400, body
    until_idle(pair)


def test_a_client_that_goes_away_ends_the_work(pair: Pair, split: Process) -> None:
    response = post(split.port, "completion", prompt=STORY, max_tokens=600, stream=True)
    assert response.read(100)
    assert metric(pair.b.port, "vllm:num_requests_running") == 1
    response.close()
    until_idle(pair)


def test_a_client_that_goes_away_in_leg_one(pair: Pair, split: Process) -> None:
    """Before its end vLLM frees the blocks at once; after it only expiry does."""
    prompt = [700 + (53 * i) % 9000 for i in range(800)]
    before = handoffs(split)
    connection = post_only(split.port, {"prompt": prompt, "max_tokens": 600})
    in_leg_one(split)
    connection.close()
    until_idle(pair)
    assert handoffs(split) == before
    assert metric(split.port, "splitserve_adopted_legs") == 0


# --- from here on servers are killed


def test_prefill_is_killed_in_leg_one(pair: Pair) -> None:
    gateway = pair.gateway("--adopt-prefill", pair.a.url, "--adopt-decode", pair.b.url)
    prompt = [900 + (71 * i) % 9000 for i in range(800)]  # seconds of prefill
    connection = post_only(gateway.port, {"prompt": prompt, "max_tokens": 4})
    in_leg_one(gateway)
    pair.a.kill()
    answer = json.loads(connection.getresponse().read())
    connection.close()
    assert texts(answer) == texts(ask(pair.b.port, "completion", prompt=prompt, max_tokens=4))
    assert metric(gateway.port, "splitserve_retries_total") in DEATH_TRIES
    status, ready = get(gateway.port, "/ready")
    assert (status, json.loads(ready)["workers"]) == (200, {"decode-0": "decode"})
    gateway.kill()


def test_a_stream_goes_on_on_another_server(pair: Pair) -> None:
    """B is killed in the middle; A, started again, goes on from the tokens so far."""
    fields: dict[str, Any] = {"prompt": STORY, "max_tokens": 48}
    expected = texts(ask(pair.b.port, "completion", **fields))
    pair.restart_a()
    pair.between_legs = pair.gateway(*pair.splitting())
    gateway = pair.gateway("--adopt-mixed", pair.b.url, "--adopt-decode", pair.a.url)
    options = {"stream": True, "stream_options": {"include_usage": True}}
    response = post(gateway.port, "completion", **fields, **options)
    assert response.headers["x-splitserve-guarantee"] == "restartable"
    raw = response.readline() + response.readline()
    pair.b.kill()
    raw += response.read()
    *events, done = [x.removeprefix(b"data: ") for x in raw.split(b"\n\n") if x]
    assert done == b"[DONE]"
    chunks = [json.loads(event) for event in events]
    assert texts(joined(chunks)) == expected
    assert chunks[-1]["usage"]["completion_tokens"] == 48
    assert metric(gateway.port, "splitserve_adopted_resumes_total") in DEATH_TRIES
    gateway.kill()


def test_kv_that_nobody_fetches_is_freed_by_expiry_only(pair: Pair) -> None:
    """B is dead: leg 1 ends, and the client goes away before there is a leg 2."""
    gateway = pair.between_legs
    assert gateway is not None
    connection = post_only(gateway.port, {"prompt": STORY, "max_tokens": 4})
    name = "vllm:request_success_total"
    before = metric(pair.a.port, name)
    wait_for(lambda: metric(pair.a.port, name) > before, "leg 1 is over")
    connection.close()
    assert metric(pair.a.port, "vllm:kv_cache_usage_perc") > 0
    wait_for(lambda: metric(pair.a.port, "vllm:kv_cache_usage_perc") == 0, "freed", 3 * LEASE_S)
    assert metric(pair.a.port, "vllm:nixl_num_kv_expired_reqs_total") >= 1
    assert metric(gateway.port, "splitserve_adopted_handoffs_total") == 0
    wait_for(lambda: metric(gateway.port, "splitserve_adopted_kv_expired_total"), "told")
    gateway.kill()


def test_a_stream_without_a_server_ends_in_an_error(pair: Pair) -> None:
    gateway = pair.gateway("--adopt-decode", pair.a.url, "--deadline", "token_gap=2")
    response = post(gateway.port, "completion", prompt=STORY, max_tokens=200, stream=True)
    assert response.readline()
    pair.a.kill()
    rest = response.read()
    assert b'"code":"no_worker"' in rest
    assert b"[DONE]" not in rest
    gateway.kill()


def in_leg_one(gateway: Process) -> None:
    """vLLM tells what runs when a step has ended, and this prompt is one step of seconds: so the
    gateway is asked, and the server given the time to begin."""
    wait_for(lambda: metric(gateway.port, "splitserve_adopted_legs"), "leg 1")
    time.sleep(0.5)


def wait_for(condition: Callable[[], object], what: str, limit_s: float = 30.0) -> None:
    until_s = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < until_s, f"in vain: {what}"
        time.sleep(0.05)


def post_only(port: int, fields: dict[str, Any]) -> http.client.HTTPConnection:
    """A request whose answer nobody reads yet."""
    connection = http.client.HTTPConnection("127.0.0.1", port)
    body = json.dumps({"model": MODEL, "temperature": 0, **fields})
    connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
    return connection


def until_idle(pair: Pair) -> None:
    name = "vllm:num_requests_running"
    wait_for(lambda: not any(metric(x.port, name) for x in (pair.a, pair.b)), "idle")
