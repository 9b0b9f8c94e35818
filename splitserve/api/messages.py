"""The messages of a chat, checked and brought into the form that chat templates take."""

from __future__ import annotations

from typing import Any

from splitserve.api.fields import unknown_field
from splitserve.api.values import show, wrong
from splitserve.errors import InvalidValue, UnsupportedField

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
_UNSUPPORTED_ROLES = ("tool", "function")
_OWN = frozenset({"role", "content", "name"})
# what an OpenAI client sends back when it appends an answer to the conversation
_NULL_ONLY = frozenset(
    [
        "refusal",
        "audio",
        "function_call",
        "tool_calls",
        "annotations",
        "reasoning",
        "reasoning_content",
        "tool_call_id",
    ]
)
MAX_MESSAGES = 10_000


def read_messages(value: object) -> tuple[dict[str, str], ...]:
    """Messages as {"role", "content"[, "name"]} with the content as one string.

    `developer` is OpenAI's newer word for `system`, and becomes it. The text parts of a content
    list are joined by newlines, as vLLM does.
    """
    if value is None:
        raise InvalidValue("messages is required.", param="messages")
    if not isinstance(value, list):
        raise wrong("messages", "a list of messages", value)
    if not value:
        raise InvalidValue("messages must hold at least one message.", param="messages")
    if len(value) > MAX_MESSAGES:
        raise wrong("messages", f"a list of at most {MAX_MESSAGES} messages", value)
    return tuple(_message(item, f"messages[{i}]") for i, item in enumerate(value))


def _message(value: object, param: str) -> dict[str, str]:
    if not isinstance(value, dict):
        raise wrong(param, "an object with role and content", value)
    role = value.get("role")
    if role in _UNSUPPORTED_ROLES:
        raise UnsupportedField(
            f'{param}.role = "{role}" is not supported.',
            param=f"{param}.role",
            advice="This server calls no tools; send their results as a user message.",
        )
    if not isinstance(role, str) or role not in _ROLES:
        raise wrong(f"{param}.role", "one of system, developer, user, assistant", role)
    _check_message_fields(value, param)
    message = {"role": _ROLES[role], "content": _content(value.get("content"), f"{param}.content")}
    name = value.get("name")
    if name is not None:
        if not isinstance(name, str):
            raise wrong(f"{param}.name", "a string", name)
        message["name"] = name
    return message


def _check_message_fields(message: dict[str, Any], param: str) -> None:
    for name, value in message.items():
        if name in _OWN:
            continue
        if name not in _NULL_ONLY:
            raise unknown_field(name, _OWN | _NULL_ONLY, "chat", where=f"{param}.")
        if value is not None and value != []:
            raise UnsupportedField(f"{param}.{name} is not supported.", param=f"{param}.{name}")


def _content(value: object, param: str) -> str:
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise wrong(param, "a string or a list of text parts", value)
    if not value:
        raise InvalidValue(f"{param} must hold at least one part.", param=param)
    return "\n".join(_part(item, f"{param}[{i}]") for i, item in enumerate(value))


def _part(value: object, param: str) -> str:
    if not isinstance(value, dict):
        raise wrong(param, 'an object like {"type": "text", "text": …}', value)
    kind = value.get("type")
    if not isinstance(kind, str):
        raise wrong(f"{param}.type", "a string", kind)
    if kind != "text":
        raise UnsupportedField(
            f"{param}.type = {show(kind)} is not supported; this model reads text only.",
            param=f"{param}.type",
        )
    for name in value:
        if name not in ("type", "text"):
            raise unknown_field(name, frozenset({"type", "text"}), "chat", where=f"{param}.")
    text = value.get("text")
    if not isinstance(text, str):
        raise wrong(f"{param}.text", "a string", text)
    return text
