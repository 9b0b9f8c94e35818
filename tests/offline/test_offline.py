"""The engine in this process: the same answers as transformers, batched, stopped, seeded."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from splitserve.errors import ConfigError, ContextLengthExceeded, InvalidValue
from splitserve.model.tiny import make_tiny
from splitserve.offline import LLM, Settings
from splitserve.text.tokenizer import Tokenizer
from tests.support import gguf_files

GREEDY = Settings(max_tokens=20, temperature=0, ignore_eos=True)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def llm(tiny: Path) -> Iterator[LLM]:
    llm = LLM(str(tiny), exact=True, kv_memory_bytes=1 << 22, num_threads=1)
    yield llm
    llm._engine.check()
    assert llm._engine.is_idle
    llm.close()


def test_greedy_is_that_of_transformers(llm: LLM, tiny: Path) -> None:
    prompts = ["hello world", "another prompt that is longer", "x"]
    model = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)
    for prompt, answer in zip(prompts, llm.generate(prompts, GREEDY), strict=True):
        ids = torch.tensor([Tokenizer.load(tiny).encode(prompt)])
        expected = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=20,
            do_sample=False,
            eos_token_id=None,
        )
        assert answer.prompt_ids == ids[0].tolist()
        assert answer.token_ids == expected[0, ids.shape[1] :].tolist()
        assert answer.finish_reason == "length"


def test_a_batch_gives_what_each_alone_gives(llm: LLM) -> None:
    settings = Settings(max_tokens=12, seed=7, temperature=1.0, top_k=50)
    prompts = [f"prompt number {i} " * (i + 1) for i in range(12)]
    together = llm.generate(prompts, settings)
    assert [x.text for x in together] == [llm.generate([p], settings)[0].text for p in prompts]
    assert llm.generate(prompts[-1:], settings)[0].cached_tokens > 0


def test_stops_and_logprobs(llm: LLM) -> None:
    plain = llm.generate(["hello"], GREEDY)[0]
    stop = plain.text[4:6]
    settings = Settings(max_tokens=20, temperature=0, ignore_eos=True, stop=(stop,), logprobs=2)
    answer = llm.generate(["hello"], settings)[0]
    assert answer.finish_reason == "stop"
    assert answer.text == plain.text[: plain.text.index(stop)]
    assert len(answer.logprobs) == len(answer.token_ids) < 20
    by_id = Settings(max_tokens=20, temperature=0, stop_token_ids=(plain.token_ids[0],))
    assert llm.generate(["hello"], by_id)[0].text == ""


def test_chats(llm: LLM) -> None:
    question = llm.chat(["hi"], GREEDY)[0]
    messages = llm.chat([[{"role": "user", "content": "hi"}]], GREEDY)[0]
    assert question == messages or question.token_ids == messages.token_ids


def test_bad_prompts_are_told_before_anything_is_computed(llm: LLM) -> None:
    for prompt in ([], [10**6], [-1]):
        with pytest.raises(InvalidValue):
            llm.generate(["fine", prompt], GREEDY)
    with pytest.raises(ContextLengthExceeded, match="fit"):
        llm.generate([[5] * llm.max_model_len], GREEDY)
    with pytest.raises(InvalidValue):
        llm.generate(["x"], Settings(max_tokens=0))


NAN, INF = float("nan"), float("inf")
BAD: list[dict[str, object]] = [
    *({"temperature": x} for x in (NAN, -1, INF, "hot", 2.1)),
    *({"top_p": x} for x in (0, NAN, -3, 2)),
    *({"top_k": x} for x in (2.7, -5)),
    *({"min_p": x} for x in (2, NAN, -0.1)),
    *({"repetition_penalty": x} for x in (-1, 0, NAN)),
    *({"frequency_penalty": x} for x in (50, NAN)),
    *({"presence_penalty": x} for x in (-3, INF)),
    *(
        {"logit_bias": x}
        for x in ({99999: 1}, {-1: 1}, {70: INF}, {70: NAN}, {"a": 1}, {"5": 1}, {True: 1}, [1])
    ),
    *({"min_tokens": x} for x in (100, -1, 1.5)),
    *({"max_tokens": x} for x in (0, 1.5, "5", True)),
    *({"logprobs": x} for x in (-1, 10**6)),
    *({"stop_token_ids": x} for x in ((99999,), (-1,), (1.5,), 3)),
    *({"seed": x} for x in ("x", 1.5)),
    *({"stop": x} for x in (("",), (3,), 7)),
    {"ignore_eos": 1},
]


@pytest.mark.parametrize("settings", BAD, ids=str)
def test_settings_are_checked_as_those_of_a_request(llm: LLM, settings: dict[str, object]) -> None:
    (name,) = settings
    with pytest.raises(InvalidValue) as caught:
        llm.generate(["hello"], Settings(**({"max_tokens": 8} | settings)))  # type: ignore[arg-type]
    assert str(caught.value.param).startswith(name)


@pytest.mark.parametrize(
    "prompts",
    [
        "hello",
        b"hello",
        None,
        7,
        [[1.5, 2.0]],
        [b"abc"],
        [None],
        [1, 2, 3],
        ["\ud83d"],
        [[True]],
        [[]],
    ],
    ids=repr,
)
def test_prompts_of_another_kind_are_refused(llm: LLM, prompts: object) -> None:
    with pytest.raises(InvalidValue):
        llm.generate(prompts, GREEDY)  # type: ignore[arg-type]


@pytest.mark.parametrize("messages", [[{"role": "x"}], [{"role": "user"}], [], None, [3]], ids=repr)
def test_conversations_of_another_kind_are_refused(llm: LLM, messages: object) -> None:
    with pytest.raises(InvalidValue):
        llm.chat([messages], GREEDY)  # type: ignore[list-item]


@pytest.mark.parametrize(
    "bad", [{"kv_memory_bytes": -5}, {"num_threads": -3}, {"max_sequences": 0}]
)
def test_sizes_that_are_none_are_refused(tiny: Path, bad: dict[str, int]) -> None:
    with pytest.raises(ConfigError):
        LLM(str(tiny), **bad)  # type: ignore[arg-type]


def test_a_closed_one_says_so(tiny: Path) -> None:
    llm = LLM(str(tiny), kv_memory_bytes=1 << 20, num_threads=1)
    llm.close()
    with pytest.raises(ConfigError, match="closed"):
        llm.generate(["hello"], GREEDY)


def test_a_gguf_file_is_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    model = AutoModelForCausalLM.from_pretrained(make_tiny(tmp_path / "tiny", vocab=360)).eval()
    gguf_files.write_gguf(
        tmp_path / "own.gguf", model, lambda writer: gguf_files.add_sentencepiece(writer, "llama")
    )
    own = LLM(str(tmp_path / "own.gguf"), kv_memory_bytes=1 << 22, num_threads=1)
    answer = own.generate(["hello world"], GREEDY)[0]
    own.close()
    ids = torch.tensor([answer.prompt_ids])
    assert answer.prompt_ids == [1, 305, 316]
    expected = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=20,
        do_sample=False,
        eos_token_id=None,
    )
    assert answer.token_ids == expected[0, 3:].tolist()
