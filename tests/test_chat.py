from pathlib import Path

import pytest

from data.chat import TemplateRejected, encode_prompt, messages_of, template_fingerprint
from tiny_tokenizer import TEMPLATE, tiny_tokenizer

ROOT = Path(__file__).resolve().parents[1]


def test_prompt_tokens_are_the_template_with_thinking_off():
    tokenizer = tiny_tokenizer()
    ids = encode_prompt(tokenizer, messages_of(["hi", "more"], ["yes"]))
    assert tokenizer.decode(ids) == "u:hi/a:yes/u:more/a:"
    assert ids == tokenizer("u:hi/a:yes/u:more/a:")["input_ids"]


def test_one_place_formats_prompts():
    """TRAPS 28: any second caller of the template is a second format. The card of an export only prints an example."""
    callers = [
        path
        for package in ("models", "data", "eval", "training")
        for path in (ROOT / package).rglob("*.py")
        if "apply_chat_template" in path.read_text() and path != ROOT / "eval" / "serving.py"
    ]
    assert callers == [ROOT / "data" / "chat.py"]


def test_a_tokenizer_without_template_is_an_error():
    for call in (lambda t: encode_prompt(t, messages_of(["hi"], [])), template_fingerprint):
        with pytest.raises(ValueError, match="no chat_template"):
            call(tiny_tokenizer(template=None))


@pytest.mark.parametrize("role, content", [("tool", "x"), ("user", "forbidden")])
def test_rejected_rows_have_their_own_error(role, content):
    with pytest.raises(TemplateRejected):
        encode_prompt(tiny_tokenizer(), [{"role": role, "content": content}])


def test_tools_that_are_nested_too_deeply_cost_their_row():
    deep: dict = {}
    for _ in range(2000):
        deep = {"properties": deep}
    tools = [{"type": "function", "function": {"name": "f", "parameters": deep}}]
    with pytest.raises(TemplateRejected, match="recursion"):
        encode_prompt(tiny_tokenizer(TEMPLATE + "{{ tools | tojson }}"), [{"role": "user", "content": "hi"}], tools)


def test_the_fingerprint_follows_template_and_tokenizer():
    first = template_fingerprint(tiny_tokenizer())
    assert first == template_fingerprint(tiny_tokenizer())
    assert first != template_fingerprint(tiny_tokenizer(TEMPLATE + " "))
    other = tiny_tokenizer()
    other.add_tokens(["because"])
    assert first != template_fingerprint(other)
