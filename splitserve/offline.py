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

import msgspec

from splitserve import wire
from splitserve.clock import MonotonicClock
from splitserve.config import require_computable
from splitserve.connector.local import make_local
from splitserve.engine.engine import Engine
from splitserve.engine.scheduler import Scheduler, SchedulerConfig
from splitserve.errors import ContextLengthExceeded, InvalidValue, WorkerFault
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
    """How to answer; meanings and ranges as in `splitserve.sampling.Sampling`.

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
        settings = settings or Settings()
        encoded = [
            self._tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
            for prompt in prompts
        ]
        return self._run(encoded, settings)

    def chat(
        self,
        conversations: Sequence[str | Sequence[dict[str, str]]],
        settings: Settings | None = None,
    ) -> list[Completion]:
        """Answer each conversation: a list of {"role", "content"}, or one user's question."""
        encoded = []
        for one in conversations:
            messages = [{"role": "user", "content": one}] if isinstance(one, str) else list(one)
            text = self._template.render(messages)
            encoded.append(self._tokenizer.encode(text, add_special_tokens=False))
        return self._run(encoded, settings or Settings())

    def close(self) -> None:
        """Give the pool's memory back."""
        self._segment.close()

    # --- inside

    def _run(self, prompts: list[list[int]], settings: Settings) -> list[Completion]:
        samplings = [self._sampling(prompt, settings, i) for i, prompt in enumerate(prompts)]
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

    def _sampling(self, prompt: list[int], settings: Settings, choice: int) -> Sampling:
        vocab_size = self._info.vocab_size
        if not prompt or not all(0 <= one < vocab_size for one in prompt):
            raise InvalidValue(f"A prompt needs token ids in [0, {vocab_size}).", param="prompts")
        if settings.max_tokens < 1:
            raise InvalidValue("max_tokens must be at least 1.", param="max_tokens")
        if len(prompt) + settings.max_tokens > self.max_model_len:
            raise ContextLengthExceeded(
                f"{len(prompt)} prompt tokens and max_tokens = {settings.max_tokens} are more "
                f"than the {self.max_model_len} that fit."
            )
        defaults = self._info.defaults
        eos_ids = () if settings.ignore_eos else self._info.eos_ids
        return Sampling(
            seed=secrets.randbits(64) if settings.seed is None else settings.seed % 2**64,
            max_tokens=settings.max_tokens,
            choice=choice if settings.seed is None else 0,
            stop_ids=tuple(sorted({*settings.stop_token_ids, *eos_ids})),
            min_tokens=settings.min_tokens,
            logit_bias=tuple(sorted(settings.logit_bias.items())),
            frequency_penalty=settings.frequency_penalty,
            presence_penalty=settings.presence_penalty,
            logprobs=settings.logprobs,
            temperature=_first(settings.temperature, defaults.temperature, 1.0),
            top_k=max(0, int(_first(settings.top_k, defaults.top_k, 0))),
            top_p=_first(settings.top_p, defaults.top_p, 1.0),
            min_p=_first(settings.min_p, defaults.min_p, 0.0),
            repetition_penalty=_first(
                settings.repetition_penalty, defaults.repetition_penalty, 1.0
            ),
        )


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


def _first(*values: float | None) -> float:
    return next(value for value in values if value is not None)
