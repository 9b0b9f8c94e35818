"""`LLM`: the engine in this process, without a server, for scripts and notebooks.

    from splitserve.offline import LLM, Settings

    llm = LLM("smollm2-135m-q4")
    for answer in llm.chat(["Why is the sky blue?"], Settings(max_tokens=64, temperature=0)):
        print(answer.text)

The same scheduler, pool, model and sampler as in a worker: continuous batching, prefix cache and,
with exact=True, answers that equal a server's bit for bit.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence
from typing import Any

import msgspec

from splitserve import wire
from splitserve.api.messages import read_messages
from splitserve.api.resolve import check_token_ids, resolve
from splitserve.api.schemas import ParsedRequest, parse_settings
from splitserve.api.values import wrong
from splitserve.clock import MonotonicClock
from splitserve.config import require_computable
from splitserve.connector.local import make_local
from splitserve.engine.engine import Engine
from splitserve.engine.scheduler import Scheduler, SchedulerConfig
from splitserve.errors import ConfigError, InvalidValue, WorkerFault
from splitserve.kv.lease import LeaseTable
from splitserve.kv.pool import BlockPool
from splitserve.model.device import require_device
from splitserve.model.fetch import resolve_model
from splitserve.sampling import Logprobs, Sampling
from splitserve.text.detokenizer import Detokenizer, DetokenizerFactory
from splitserve.text.stops import StopScanner
from splitserve.text.template import ChatTemplate
from splitserve.text.tokenizer import Tokenizer
from splitserve.transport.segment import Segment

BLOCK_SIZE = 16


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How to answer; meanings as in `splitserve.sampling.Sampling`, ranges as over HTTP.

    What is None is the model's own default. stop: strings that end an answer and are not part of
    it. seed: the same seed, the same answer.
    """

    max_tokens: int = 16
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    min_tokens: int = 0
    logit_bias: dict[int, float] = {}
    logprobs: int | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False


class Completion(msgspec.Struct, frozen=True):
    """One answer. finish_reason: stop or length. logprobs: one per token, if asked for."""

    text: str
    prompt_ids: list[int]
    token_ids: list[int]
    finish_reason: str
    cached_tokens: int
    logprobs: list[Logprobs]


class LLM:
    """One model and one engine. Not thread-safe."""

    def __init__(
        self,
        model: str | None = None,
        *,
        exact: bool = False,
        device: str = "cpu",
        dtype: str = "float32",
        kv_memory_bytes: int = 1 << 30,
        num_threads: int | None = None,
        max_batched_tokens: int = 256,
        max_sequences: int = 64,
    ) -> None:
        """model: alias, directory or hub id. device: cpu, cuda or mps. dtype: float32, bfloat16
        or float16. Raises ModelUnavailable, UnsupportedModel, ConfigError."""
        from splitserve.model import loader
        from splitserve.model.runner import TorchRunner

        require_computable(device, dtype, exact)
        for name, number in (("kv_memory_bytes", kv_memory_bytes), ("num_threads", num_threads)):
            if number is not None and (not isinstance(number, int) or number < 1):
                raise ConfigError(f"{name} must be a positive number, not {number!r}.")
        if not 1 <= max_sequences <= max_batched_tokens:
            raise ConfigError("1 <= max_sequences <= max_batched_tokens must hold.")
        self._is_closed = False
        require_device(device)
        path = resolve_model(model, lambda line: None).path
        loaded = loader.load(path, dtype, by_torch=device != "cpu").on(device)
        self._info = loaded.info
        self._tokenizer = Tokenizer.load(path)
        self._template = ChatTemplate.load(path)
        self._detokenizers = DetokenizerFactory(self._tokenizer)
        num_blocks = max(2, kv_memory_bytes // loaded.kv_format(BLOCK_SIZE).block_bytes)
        self.max_model_len = min(self._info.max_model_len, num_blocks * BLOCK_SIZE)
        self._segment = Segment.create(num_blocks, loaded.kv_format(BLOCK_SIZE).block_bytes)
        threads = num_threads or len(os.sched_getaffinity(0))
        runner = TorchRunner(loaded, self._segment.blocks, BLOCK_SIZE, exact, threads)
        config = SchedulerConfig(max_batched_tokens=max_batched_tokens, max_sequences=max_sequences)
        scheduler = Scheduler(
            config, BlockPool(num_blocks, BLOCK_SIZE), LeaseTable("offline", term_s=1.0)
        )
        identity = loaded.identity.digest()
        self._engine = Engine(scheduler, runner, make_local(), MonotonicClock(), identity)
        self._num_requests = 0

    def generate(
        self, prompts: Sequence[str | Sequence[int]], settings: Settings | None = None
    ) -> list[Completion]:
        """Complete each prompt, text or token ids, in their order.

        Raises InvalidValue and ContextLengthExceeded before anything is computed, WorkerFault if
        the model fails on one of them.
        """
        self._require_open()
        if isinstance(prompts, str | bytes) or not isinstance(prompts, Sequence):
            raise InvalidValue("prompts must be a list, of one prompt too.", param="prompts")
        encoded = [self._encode(prompt, f"prompts[{i}]") for i, prompt in enumerate(prompts)]
        return self._run(encoded, settings or Settings())

    def chat(
        self,
        conversations: Sequence[str | Sequence[dict[str, str]]],
        settings: Settings | None = None,
    ) -> list[Completion]:
        """Answer each conversation: a list of {"role", "content"}, or one user's question."""
        self._require_open()
        if isinstance(conversations, str | bytes) or not isinstance(conversations, Sequence):
            raise InvalidValue("conversations must be a list.", param="conversations")
        encoded = []
        for one in conversations:
            asked = [{"role": "user", "content": one}] if isinstance(one, str) else one
            messages = read_messages(list(asked) if isinstance(asked, list | tuple) else asked)
            text = self._template.render(messages)
            encoded.append(self._tokens(text, "conversations", add_special_tokens=False))
        return self._run(encoded, settings or Settings())

    def close(self) -> None:
        """Give the pool's memory back. The LLM can't be used any more."""
        self._is_closed = True
        self._segment.close()

    # --- inside

    def _require_open(self) -> None:
        if self._is_closed:
            raise ConfigError("This LLM was closed.")

    def _encode(self, prompt: object, param: str) -> list[int]:
        if isinstance(prompt, str):
            return self._tokens(prompt, param)
        if not isinstance(prompt, Sequence) or isinstance(prompt, bytes):
            raise wrong(param, "a string or a list of token ids", prompt)
        if not all(isinstance(one, int) and not isinstance(one, bool) for one in prompt):
            raise wrong(param, "a string or a list of token ids", prompt)
        return list(prompt)

    def _tokens(self, text: str, param: str, *, add_special_tokens: bool = True) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidValue(f"{param} is not Unicode: {error.reason}.", param=param) from None
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def _run(self, prompts: list[list[int]], settings: Settings) -> list[Completion]:
        parsed = parse_settings(_as_body(settings))
        vocab_size = self._info.vocab_size
        check_token_ids(parsed.stop_token_ids, vocab_size, "stop_token_ids")
        check_token_ids([token_id for token_id, _ in parsed.logit_bias], vocab_size, "logit_bias")
        samplings = [self._sampling(prompt, parsed, i) for i, prompt in enumerate(prompts)]
        tracks: dict[str, _Track] = {}
        for prompt, sampling in zip(prompts, samplings, strict=True):
            request_id = f"offline-{self._num_requests}"
            self._num_requests += 1
            tracks[request_id] = _Track(prompt, sampling, settings.stop, self._detokenizers.new())
            self._engine.submit(wire.Submit(request_id, wire.Leg.WHOLE, prompt, [], sampling))
        try:
            while any(track.reason is None for track in tracks.values()):
                self._turn(tracks)
        finally:
            for request_id in tracks:
                self._engine.abort(request_id)
        return [track.completion() for track in tracks.values()]

    def _turn(self, tracks: dict[str, _Track]) -> None:
        self._engine.pump()
        self._engine.step()
        outbox = self._engine.take_outbox()
        for token in outbox.tokens:
            track = tracks[token.request_id]
            track.take(token)
            if track.reason is not None:
                self._engine.abort(token.request_id)
        for notice in outbox.notices:
            if isinstance(notice, wire.Started):
                tracks[notice.request_id].cached_tokens = notice.cached_tokens
            elif isinstance(notice, wire.End):
                if notice.reason == "error":
                    raise WorkerFault(notice.message)
                tracks[notice.request_id].end(notice.reason)

    def _sampling(self, prompt: list[int], parsed: ParsedRequest, choice: int) -> Sampling:
        check_token_ids(prompt, self._info.vocab_size, "prompts")
        defaults = msgspec.structs.asdict(self._info.defaults)
        return resolve(
            parsed,
            {name: value for name, value in defaults.items() if value is not None},
            self._info.eos_ids,
            lambda: secrets.randbits(64),
            len(prompt),
            self.max_model_len,
            choice if parsed.seed is None else 0,
        )


def _as_body(settings: Settings) -> dict[str, Any]:
    """As a client's JSON would say it."""
    body = {name: x for name, x in msgspec.structs.asdict(settings).items() if x is not None}
    if isinstance(settings.logit_bias, dict):
        for token_id in settings.logit_bias:
            if type(token_id) is not int:
                raise wrong("logit_bias", "token ids as its keys", token_id)
        body["logit_bias"] = {str(name): bias for name, bias in settings.logit_bias.items()}
    for name in ("stop", "stop_token_ids"):
        if isinstance(body[name], tuple):
            body[name] = list(body[name])
    return body


class _Track:
    """One answer as it grows."""

    def __init__(
        self,
        prompt_ids: list[int],
        sampling: Sampling,
        stop: tuple[str, ...],
        detokenizer: Detokenizer,
    ) -> None:
        self.reason: str | None = None
        self.cached_tokens = 0
        self._prompt_ids = prompt_ids
        self._sampling = sampling
        self._token_ids: list[int] = []
        self._logprobs: list[Logprobs] = []
        self._detokenizer = detokenizer
        self._stops = StopScanner(stop)
        self._text = ""

    def take(self, token: wire.Token) -> None:
        self._token_ids.append(token.token_id)
        if token.logprobs is not None:
            self._logprobs.append(token.logprobs)
        if token.token_id in self._sampling.stop_ids:
            return
        piece = self._detokenizer.push(token.token_id)
        if len(self._token_ids) > self._sampling.min_tokens:
            piece, stopped = self._stops.push(piece)
            if stopped:
                self.reason = "stop"
        self._text += piece

    def end(self, reason: str) -> None:
        if self.reason is not None:
            return
        piece, stopped = self._stops.push(self._detokenizer.finish())
        self._text += piece + self._stops.flush()
        self.reason = "stop" if stopped else reason

    def completion(self) -> Completion:
        assert self.reason is not None
        return Completion(
            self._text,
            self._prompt_ids,
            self._token_ids,
            self.reason,
            self.cached_tokens,
            self._logprobs,
        )
