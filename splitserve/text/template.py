"""A model's chat template: messages to the prompt's text.

A template comes with the model and is foreign code, so it runs in Jinja2's immutable sandbox. The
environment is the one that templates on the hub are written for (transformers'
`apply_chat_template`): trimmed blocks, `break` and `continue`, `{% generation %}`, and the helpers
raise_exception, strftime_now and a tojson that does not escape HTML.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import jinja2.utils

from splitserve.errors import InvalidValue, ModelUnavailable, UnsupportedField
from splitserve.text.tokenizer import read_json, special_tokens

MAX_PROMPT_CHARS = 32 * 1024 * 1024
"""A template may loop; a prompt longer than this is refused while it grows."""


class ChatTemplate:
    """The compiled template of one model. `source` None: the model has none."""

    def __init__(self, source: str | None, special: Mapping[str, str] | None = None) -> None:
        self.source = source
        self._special = dict(special or {})
        self._compiled: jinja2.Template | None = None
        if source is not None:
            try:
                self._compiled = _environment().from_string(source)
            except jinja2.TemplateSyntaxError as error:
                raise ModelUnavailable(
                    f"The model's chat template has an error in line {error.lineno}: "
                    f"{error.message}."
                ) from error

    @classmethod
    def load(cls, model_dir: str | Path) -> ChatTemplate:
        """Read chat_template.jinja, else tokenizer_config.json's "chat_template".

        The latter is a string, or a list of {"name", "template"}, of which "default" is taken.
        """
        directory = Path(model_dir)
        special = special_tokens(directory)
        config = read_json(directory / "tokenizer_config.json")
        try:
            source: str | None = (directory / "chat_template.jinja").read_text("utf-8")
        except FileNotFoundError:
            source = _from_config(config.get("chat_template"))
        except (OSError, ValueError) as error:
            raise ModelUnavailable(f"The chat template can't be read: {error}") from error
        return cls(source, special)

    @staticmethod
    def missing() -> UnsupportedField:
        """The error for a chat with a model that has no template."""
        return UnsupportedField(
            "This model has no chat template, so it can't hold a chat.",
            param="messages",
            advice="Use /v1/completions, or a model tuned for chat.",
        )

    def render(
        self, messages: Sequence[Mapping[str, object]], add_generation_prompt: bool = True
    ) -> str:
        """The prompt's text, to be encoded with add_special_tokens=False.

        Raises UnsupportedField if the model has no template, InvalidValue with the template's own
        words if it refuses these messages.
        """
        if self._compiled is None:
            raise self.missing()
        pieces: list[str] = []
        num_chars = 0
        try:
            for piece in self._compiled.generate(
                messages=[dict(m) for m in messages],
                tools=None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._special,
            ):
                num_chars += len(piece)
                if num_chars > MAX_PROMPT_CHARS:
                    raise InvalidValue("The rendered chat is too long.", param="messages")
                pieces.append(piece)
        except InvalidValue:
            raise
        except Exception as error:  # a template is foreign code and may raise anything
            said = str(error) or type(error).__name__
            raise InvalidValue(
                f"The model's chat template refused the messages: {said}", param="messages"
            ) from error
        return "".join(pieces)


def _from_config(value: object) -> str | None:
    if isinstance(value, str) or value is None:
        return value
    if isinstance(value, list):
        named = {
            entry["name"]: entry["template"]
            for entry in value
            if isinstance(entry, dict) and {"name", "template"} <= entry.keys()
        }
        chosen = named.get("default")
        if chosen is None and len(named) == 1:
            chosen = next(iter(named.values()))
        if isinstance(chosen, str):
            return chosen
        raise ModelUnavailable(
            f'None of the model\'s chat templates is named "default"; there are: '
            f"{', '.join(sorted(map(str, named))) or 'none'}."
        )
    raise ModelUnavailable("tokenizer_config.json's chat_template is neither text nor a list.")


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}…{% endgeneration %}` marks the assistant's turns for training; here it
    renders what it holds."""

    tags = {"generation"}  # noqa: RUF012 (Jinja2 reads this name)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Namespace(jinja2.utils.Namespace):
    """Refuses names with a leading underscore: they would reach CPython's internals."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        # `self` stays positional-only, so that a template may write namespace(self=…)
        own, *rest = args
        attrs = dict(*rest, **kwargs)
        for name in attrs:
            _refuse_underscore(name)
        jinja2.utils.Namespace.__init__(own, attrs)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_underscore(name)
        super().__setitem__(name, value)


class _Dict:
    """`dict` for templates, without the attributes of the type."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


def _refuse_underscore(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"{name!r} can't be set on a namespace.")


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    environment.globals["namespace"] = _Namespace
    environment.globals["dict"] = _Dict()
    return environment
