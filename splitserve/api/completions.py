"""The two generating endpoints: a parsed request to journeys, journeys to a response."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import TypeVar

from splitserve.api.answer import Answer
from splitserve.api.http import (
    ClientGone,
    EventWriter,
    Receive,
    Scope,
    Send,
    read_body,
    send_body,
    until_gone,
)
from splitserve.api.logprobs import LogprobWriter
from splitserve.api.resolve import check_token_ids, prompt_too_long, resolve
from splitserve.api.responses import Choice, ModelCard, Usage, chat_completion, text_completion
from splitserve.api.schemas import Kind, ParsedRequest, parse_chat, parse_completion
from splitserve.api.sse import DONE, ChatStream, CompletionStream, error_event
from splitserve.errors import ModelNotFound, SlowClient, SplitserveError
from splitserve.gateway.journey import Generation
from splitserve.gateway.service import GatewayService
from splitserve.sampling import Sampling
from splitserve.text.detokenizer import DetokenizerFactory
from splitserve.text.template import ChatTemplate
from splitserve.text.tokenizer import Tokenizer

T = TypeVar("T")

_TOKENIZE_ASIDE_CHARS = 20_000  # longer prompts are tokenized off the event loop


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What the API has to know of the model.

    max_model_len: the smaller of the model's context and what fits a worker's pool, in tokens.
    """

    names: tuple[str, ...]
    created: int
    tokenizer: Tokenizer
    template: ChatTemplate
    generation_defaults: Mapping[str, object]
    eos_ids: tuple[int, ...]
    vocab_size: int
    max_model_len: int


class Completions:
    """Serves POST /v1/chat/completions and /v1/completions."""

    def __init__(
        self,
        model: ServedModel,
        service: GatewayService,
        seed_source: Callable[[], int] = lambda: secrets.randbits(64),
    ) -> None:
        self._model = model
        self._service = service
        self._seed_source = seed_source
        self._detokenizers = DetokenizerFactory(model.tokenizer)

    def cards(self) -> list[ModelCard]:
        model = self._model
        return [ModelCard(name, model.created, model.max_model_len) for name in model.names]

    async def handle(
        self, kind: Kind, request_id: str, scope: Scope, receive: Receive, send: Send
    ) -> None:
        """One request, to its end; raise SplitserveError if nothing was sent yet."""
        config = self._service.config
        body = await read_body(scope, receive, config.max_body_bytes, config.deadlines.body_s)
        parsed = parse_chat(body) if kind == "chat" else parse_completion(body)
        if parsed.model not in self._model.names:
            raise ModelNotFound(f"There is no model {parsed.model[:200]!r} here.", param="model")
        vocab_size = self._model.vocab_size
        check_token_ids(parsed.stop_token_ids, vocab_size, "stop_token_ids")
        check_token_ids([token_id for token_id, _ in parsed.logit_bias], vocab_size, "logit_bias")
        prompts = await self._prompts(parsed)
        samplings = self._samplings(parsed, prompts)
        call = _Call(parsed, self._model.names[0], request_id)
        gone = asyncio.create_task(until_gone(receive))
        work = asyncio.create_task(self._answer(call, prompts, samplings, send))
        try:
            await asyncio.wait([gone, work], return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                await work
        finally:
            gone.cancel()
            work.cancel()
            await asyncio.gather(gone, work, return_exceptions=True)

    async def _answer(
        self, call: _Call, prompts: list[list[int]], samplings: list[Sampling], send: Send
    ) -> None:
        answers: list[Answer] = []
        try:
            for choice, sampling in enumerate(samplings):
                first = choice - choice % call.parsed.n
                generation = Generation(
                    f"{call.request_id}-{choice}",
                    prompts[choice // call.parsed.n],
                    sampling,
                    leader=answers[first].journey if choice > first else None,
                )
                journey, task = await self._service.start(generation)
                detokenizer = self._detokenizers.new()
                writer = self._logprob_writer(call.parsed)
                answers.append(Answer(journey, task, detokenizer, call.parsed.stop, writer))
            if call.parsed.stream:
                limit_s = self._service.config.deadlines.slow_client_s
                await call.stream(answers, EventWriter(send, limit_s, call.headers))
            else:
                await call.send_whole(answers, send)
        finally:
            for answer in answers:
                answer.cancel()

    def _logprob_writer(self, parsed: ParsedRequest) -> LogprobWriter | None:
        if parsed.logprobs is None:
            return None
        bytes_of = self._detokenizers.token_bytes
        return LogprobWriter(parsed.kind, self._model.tokenizer, bytes_of)

    async def _prompts(self, parsed: ParsedRequest) -> list[list[int]]:
        """Token ids of each prompt, checked against the vocabulary."""
        if parsed.kind == "chat":
            text = self._model.template.render(parsed.messages)
            self._check_size(text, "messages")
            return [await self._encode(text, add_special_tokens=False)]
        prompts = []
        for prompt in parsed.prompts:
            if isinstance(prompt, str):
                self._check_size(prompt, "prompt")
                prompts.append(await self._encode(prompt, add_special_tokens=True))
            else:
                check_token_ids(prompt, self._model.vocab_size, "prompt")
                prompts.append(list(prompt))
        return prompts

    def _check_size(self, text: str, param: str) -> None:
        """Refuse what is too long by any measure before time is spent on it."""
        least = self._model.tokenizer.min_tokens(text)
        if least >= self._model.max_model_len:
            raise prompt_too_long(f"at least {least}", self._model.max_model_len, param)

    async def _encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        tokenizer = self._model.tokenizer
        if len(text) <= _TOKENIZE_ASIDE_CHARS:
            return tokenizer.encode(text, add_special_tokens)
        return await asyncio.to_thread(tokenizer.encode, text, add_special_tokens)

    def _samplings(self, parsed: ParsedRequest, prompts: list[list[int]]) -> list[Sampling]:
        """Of each choice. One seed for the request: a draw is keyed by (seed, choice, index)."""
        model = self._model
        seed = self._seed_source()
        return [
            resolve(
                parsed,
                model.generation_defaults,
                model.eos_ids,
                lambda: seed,
                len(prompts[choice // parsed.n]),
                model.max_model_len,
                choice,
            )
            for choice in range(len(prompts) * parsed.n)
        ]


class _Call:
    """One request's identity and how its answers are written."""

    def __init__(self, parsed: ParsedRequest, model_name: str, request_id: str) -> None:
        self.parsed = parsed
        self.request_id = request_id
        self.headers = ((b"x-request-id", request_id.encode()),)
        self._created = int(time.time())
        self._model = model_name

    async def send_whole(self, answers: list[Answer], send: Send) -> None:
        async def collect(answer: Answer) -> Choice:
            text = "".join([piece async for piece in answer.texts()])
            return Choice(text, answer.finish_reason, answer.take_logprobs())

        choices = await _all([collect(answer) for answer in answers])
        build = chat_completion if self.parsed.kind == "chat" else text_completion
        body = build(self.request_id, self._created, self._model, choices, self._usage(answers))
        await send_body(send, 200, body, headers=self.headers)

    async def stream(self, answers: list[Answer], writer: EventWriter) -> None:
        """Events as they come. An error after the first byte becomes an event."""
        try:
            await self._stream(answers, writer)
        except SlowClient as error:
            for answer in answers:
                answer.give_up(error)
            raise ClientGone from None
        except SplitserveError as error:
            if not writer.is_started:
                raise
            await writer.write(error_event(error))
        await writer.end()

    async def _stream(self, answers: list[Answer], writer: EventWriter) -> None:
        kind = ChatStream if self.parsed.kind == "chat" else CompletionStream
        include_usage = self.parsed.include_usage
        events = kind(self.request_id, self._created, self._model, include_usage, len(answers))
        turn = asyncio.Lock()

        async def follow(index: int, answer: Answer) -> None:
            opening = events.first(index)
            async for text in answer.texts():
                async with turn:
                    delta = events.delta(text, index, answer.take_logprobs())
                    await writer.write(opening + delta)
                opening = b""
            async with turn:
                last = events.last(answer.finish_reason, index, answer.take_logprobs())
                await writer.write(opening + last)

        await _all([follow(i, answer) for i, answer in enumerate(answers)])
        usage = events.usage(self._usage(answers)) if include_usage else b""
        await writer.write(usage + DONE)

    def _usage(self, answers: list[Answer]) -> Usage:
        """A prompt counts once, however many choices it has."""
        firsts = [answer.journey for answer in answers[:: self.parsed.n]]
        return Usage(
            prompt_tokens=sum(len(journey.request.prompt_ids) for journey in firsts),
            completion_tokens=sum(answer.num_tokens for answer in answers),
            cached_tokens=sum(journey.timeline.cached_tokens or 0 for journey in firsts),
        )


async def _all(coroutines: list[Coroutine[object, object, T]]) -> list[T]:
    """Run them together; the first error ends them all and is raised as itself."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
