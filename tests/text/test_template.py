from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path

import pytest

from splitserve.errors import InvalidValue, ModelUnavailable, UnsupportedField
from splitserve.text import template as template_module
from splitserve.text.template import ChatTemplate

CHATML = (
    "{% for message in messages %}\n"
    "    {{- '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' -}}\n"
    "{% endfor %}\n"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
HELLO = [{"role": "user", "content": "<b>Hi</b>"}]


def render(source: str, **special: str) -> str:
    return ChatTemplate(source, special).render(HELLO)


def test_renders_with_and_without_the_generation_prompt() -> None:
    template = ChatTemplate(CHATML)
    turn = "<|im_start|>user\n<b>Hi</b><|im_end|>\n"
    assert template.render(HELLO) == turn + "<|im_start|>assistant\n"
    assert template.render(HELLO, add_generation_prompt=False) == turn


def test_helpers_that_templates_expect() -> None:
    assert render("{{ messages[0] | tojson }}") == json.dumps(HELLO[0])
    assert render("{{ messages | tojson(indent=2) }}") == json.dumps(HELLO, indent=2)
    assert render("{{ strftime_now('%Y') }}") == str(datetime.now().year)
    assert render("{{ bos_token }}|{{ eos_token }}", bos_token="<s>", eos_token="</s>") == (
        "<s>|</s>"
    )
    assert render("{% for m in [1,2,3] %}{% if m == 2 %}{% break %}{% endif %}{{ m }}{% endfor %}")
    assert render("{% generation %}kept{% endgeneration %}") == "kept"
    assert render("{% set ns = namespace(n=0) %}{% set ns.n = 3 %}{{ ns.n }}") == "3"
    assert render("{{ tools is none }}{{ dict(a=1) }}") == "True{'a': 1}"


def test_the_templates_own_words_reach_the_client() -> None:
    with pytest.raises(InvalidValue, match="Roles must alternate") as caught:
        render("{{ raise_exception('Roles must alternate') }}")
    assert caught.value.param == "messages"
    with pytest.raises(InvalidValue, match="refused the messages"):
        render("{{ messages[0].content + 1 }}")


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ namespace(__init__=1) }}",
        "{{ raise_exception.__globals__ }}{{ raise_exception.__globals__['json'] }}",
        "{% for i in range(1000000000) %}x{% endfor %}",
    ],
)
def test_the_sandbox_holds(source: str) -> None:
    with pytest.raises(InvalidValue):
        render(source)


def test_a_growing_prompt_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_module, "MAX_PROMPT_CHARS", 1000)
    with pytest.raises(InvalidValue, match="too long"):
        render("{% for i in range(90000) %}xxxxxxxxxx{% endfor %}")


def test_the_messages_given_are_not_changed() -> None:
    messages = [{"role": "user", "content": "Hi"}]
    source = "{% for m in messages %}{% set m = dict(m, role='x') %}{{ m.role }}{% endfor %}"
    assert ChatTemplate(source).render(messages) == "x"
    assert messages == [{"role": "user", "content": "Hi"}]


def test_a_model_without_a_template(model_dir: Path) -> None:
    with pytest.raises(UnsupportedField, match="no chat template"):
        ChatTemplate.load(model_dir).render(HELLO)


def test_where_templates_are_found(model_dir: Path) -> None:
    config_path = model_dir / "tokenizer_config.json"
    config = json.loads(config_path.read_text())
    config["chat_template"] = "from config {{ eos_token }}"
    config_path.write_text(json.dumps(config))
    assert ChatTemplate.load(model_dir).render(HELLO) == "from config <|im_end|>"

    config["chat_template"] = [
        {"name": "tool_use", "template": "tools"},
        {"name": "default", "template": "named default"},
    ]
    config_path.write_text(json.dumps(config))
    assert ChatTemplate.load(model_dir).render(HELLO) == "named default"

    config["chat_template"] = [{"name": n, "template": n} for n in ("rag", "tool_use")]
    config_path.write_text(json.dumps(config))
    with pytest.raises(ModelUnavailable, match="rag, tool_use"):
        ChatTemplate.load(model_dir)

    (model_dir / "chat_template.jinja").write_text("from file")
    assert ChatTemplate.load(model_dir).render(HELLO) == "from file"


def test_a_template_that_does_not_parse() -> None:
    with pytest.raises(ModelUnavailable, match="line 2"):
        ChatTemplate("one\n{% if %}")
