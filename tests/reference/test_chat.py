"""Chat templates: where they are found, what transformers makes of them, and what they may do."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFWriter
from transformers.utils.chat_template_utils import render_jinja_template

from reference.chat import ChatTemplate
from reference.errors import ConfigError, RequestError, WeightsError

MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "Be <brief> & kind."},
    {"role": "user", "content": "  Größe?\n"},
    {"role": "assistant", "content": "42", "extra": None},
    {"role": "user", "content": "Why?"},
]

TEMPLATES = {
    "chatml": """
{%- for m in messages %}
    {{- '<|im_start|>' + m.role + '\\n' + m['content'] + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
""",
    "blocks": """{{ bos_token }}
{% for m in messages %}
    {% if m.role == 'system' %}
        {% continue %}
    {% endif %}
    {% if loop.index > 3 %}
        {% break %}
    {% endif %}
    {{ m.content | trim }} {{ eos_token }}
{% endfor %}
""",
    "tojson": "{{ messages | tojson }} {{ messages | tojson(indent=2) }}",
    "namespace": "{% set ns = namespace(n=0) %}{% for m in messages %}"
    "{% set ns.n = ns.n + m.content | length %}{% endfor %}{{ ns.n }}",
    "generation": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}\n"
    "{% endfor %}",
    "macro": "{% macro show(m) %}[{{ m.role }}]{% endmacro %}"
    "{% for m in messages[::-1] %}{{ show(m) }}{% endfor %}",
    "undefined": "{{ nothing }}{% if tools is none %}no tools{% endif %}"
    "{{ messages[2].extra is defined }}{{ enable_thinking | default('unset') }}",
    "strings": "{{ messages[0].content.split(' ')[0].startswith('Be') }}{{ '%s' | format(1) }}"
    "{{ messages[0].content.upper() }}{{ messages | map(attribute='role') | join(',') }}",
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_gives_what_transformers_gives(name: str) -> None:
    render: Any = render_jinja_template  # its types do not allow what its documentation does
    tokens = {"bos_token": "<s>", "eos_token": "</s>"}
    messages = [{k: v for k, v in m.items() if v is not None} for m in MESSAGES]
    for generation in (True, False):
        (expected,), _ = render(
            [messages], chat_template=TEMPLATES[name], add_generation_prompt=generation, **tokens
        )
        given = ChatTemplate(TEMPLATES[name], "test", tokens).render(
            MESSAGES, {"add_generation_prompt": generation}
        )
        assert given == expected
    assert given


def test_the_date_is_todays() -> None:
    template = ChatTemplate("{{ strftime_now('%Y') }}", "test", {})
    assert template.render(MESSAGES) in {str(datetime.now().year + d) for d in (-1, 0)}


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('roles\nmust alternate') }}",
        "{{ messages.append(1) }}",
        "{{ ().__class__.__bases__ }}",
        "{{ messages[0].__init__.__globals__ }}",
        "{{ ''.__class__.mro() }}",
        "{% for i in range(10 ** 9) %}{% endfor %}",
        "{{ 1 / 0 }}",
        "{{ nothing.at.all }}",
        "{{ messages[0].content + 1 }}",
        "{% include 'other' %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    ],
)
def test_a_template_that_refuses_fails_or_breaks_out(source: str) -> None:
    with pytest.raises(RequestError, match=r"^messages: ") as error:
        print(ChatTemplate(source, "test", {}).render(MESSAGES))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("source", ["{% if %}", "{{", "{% for m in messages %}", "{% nope %}"])
def test_what_is_no_template_is_refused_by_line(source: str) -> None:
    with pytest.raises(ConfigError, match=r"^my file: line 2: ") as error:
        ChatTemplate("\n" + source, "my file", {})
    assert "\n" not in str(error.value)


IF, FOR = "{% if a %}", "{% for a in b %}"


@pytest.mark.parametrize(
    ("source", "what"),
    [
        (FOR * 30 + "{% endfor %}" * 30, "too many statically nested blocks"),
        (IF * 120 + "{% endif %}" * 120, "too many levels of indentation"),
        (IF * 3000 + "{% endif %}" * 3000, "it is nested too deeply"),
        ("{% break %}", "'break' outside loop"),
        ("{{ f(a=1, a=2) }}", "keyword argument repeated: a"),
        ("{% macro f(a, a) %}{% endmacro %}", "duplicate argument"),
        ("{{ " + "1" * 5000 + " }}", "Exceeds the limit"),
    ],
)
def test_what_jinja_takes_and_python_does_not_is_refused(source: str, what: str) -> None:
    with pytest.raises(ConfigError, match=rf"^my file: {what}.*; correct the chat template$"):
        ChatTemplate(source, "my file", {})


# where it is found


def folder(path: Path, config: Any = None, file: str | None = None) -> Path:
    if config is not None:
        (path / "tokenizer_config.json").write_text(json.dumps(config))
    if file is not None:
        (path / "chat_template.jinja").write_text(file)
    return path


def rendered(path: Path, given: Path | None = None) -> str | None:
    template = ChatTemplate.load(path, given)
    return None if template is None else template.render(MESSAGES)


def test_a_template_is_found_where_hugging_face_keeps_it(tmp_path: Path) -> None:
    assert rendered(tmp_path) is None
    assert rendered(folder(tmp_path, {"eos_token": "</s>"})) is None
    config: dict[str, Any] = {
        "bos_token": {"content": "<s>", "special": True},
        "eos_token": "</s>",
        "pad_token": None,
        "chat_template": "key {{ bos_token }}{{ eos_token }}{{ pad_token }}",
    }
    assert rendered(folder(tmp_path, config)) == "key <s></s>"
    config["chat_template"] = [
        {"name": "tool_use", "template": "tools"},
        {"name": "default", "template": "the default"},
    ]
    assert rendered(folder(tmp_path, config)) == "the default"
    assert rendered(folder(tmp_path, config, "file {{ bos_token }}")) == "file <s>"
    given = tmp_path / "given"
    given.write_text("given {{ eos_token }}")
    assert rendered(tmp_path, given) == "given </s>"


@pytest.mark.parametrize(
    "template",
    [
        5,
        {},
        [],
        [{"name": "tool_use", "template": "x"}],
        [3],
        [{"name": []}],
        [{"name": "default", "template": None}],
    ],
)
def test_a_key_that_holds_no_template(tmp_path: Path, template: Any) -> None:
    with pytest.raises(ConfigError, match=r"tokenizer_config\.json: chat_template"):
        ChatTemplate.load(folder(tmp_path, {"chat_template": template}))


@pytest.mark.parametrize("token", [5, ["a"], {}, {"content": 5}])
def test_a_special_token_that_is_no_text(tmp_path: Path, token: Any) -> None:
    config = {"chat_template": "x", "eos_token": token}
    with pytest.raises(ConfigError, match=r"tokenizer_config\.json: eos_token is .*; give a text"):
        ChatTemplate.load(folder(tmp_path, config))


def test_no_template_may_be_said(tmp_path: Path) -> None:
    assert rendered(folder(tmp_path, {"chat_template": None, "eos_token": None})) is None


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nothing: it cannot be read") as error:
        ChatTemplate.load(tmp_path, tmp_path / "nothing")
    assert "\n" not in str(error.value)
    (tmp_path / "bytes").write_bytes(b"\xff")
    with pytest.raises(ConfigError, match="bytes: it cannot be read"):
        ChatTemplate.load(tmp_path, tmp_path / "bytes")


# in a GGUF file


def gguf_file(path: Path, template: Any = None, **more: Any) -> Path:
    """A file of five tokens, four of them special, and of further keys."""
    out = GGUFWriter(path / "m.gguf", "llama")
    out.add_token_list(["<unk>", "<s>", "</s>", "<pad>", "a"])
    out.add_unk_token_id(0)
    out.add_bos_token_id(1)
    out.add_eos_token_id(2)
    out.add_pad_token_id(3)
    if template is not None:
        out.add_chat_template(template)
    for key, value in more.items():
        out.add_uint32(key.replace("__", "."), value)
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.close()
    return path / "m.gguf"


def test_a_gguf_file_holds_a_template_and_its_special_tokens(tmp_path: Path) -> None:
    source = "{{ bos_token }}{{ eos_token }}{{ unk_token }}{{ pad_token }}[{{ sep_token }}]"
    assert rendered(gguf_file(tmp_path, source)) == "<s></s><unk><pad>[]"
    assert rendered(gguf_file(tmp_path)) is None
    folder(tmp_path, {"chat_template": "the folder's"}, "the folder's")
    assert rendered(gguf_file(tmp_path)) is None
    given = tmp_path / "given"
    given.write_text("given {{ bos_token }}")
    for template in (source, None):
        assert rendered(gguf_file(tmp_path, template), given) == "given <s>"


def test_of_named_templates_a_gguf_file_has_the_default(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "the default"}, {"name": "tools", "template": "t"}]
    assert rendered(gguf_file(tmp_path, named)) == "the default"
    assert rendered(gguf_file(tmp_path, named[1:])) is None


def test_what_a_gguf_file_has_wrong_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"m\.gguf: tokenizer\.chat_template: line 2: "):
        rendered(gguf_file(tmp_path, "\n{% if %}"))
    with pytest.raises(ConfigError, match=r"m\.gguf: tokenizer\.chat_template is no text; convert"):
        rendered(gguf_file(tmp_path, tokenizer__chat_template=5))
    with pytest.raises(ConfigError, match=r"m\.gguf: 'tokenizer\.ggml\.mask_token_id' is 5"):
        rendered(gguf_file(tmp_path, "{{ mask_token }}", tokenizer__ggml__mask_token_id=5))
    (tmp_path / "m.gguf").write_bytes(b"not GGUF")
    with pytest.raises(WeightsError, match="it is no GGUF file"):
        rendered(tmp_path / "m.gguf")
