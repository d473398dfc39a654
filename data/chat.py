"""The one place that turns messages into prompt tokens: regeneration, training and evaluation all call `encode_prompt`.

A template applied in two ways (thinking on in training, off when decoding) costs a drafter most of its acceptance.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import yaml
from jinja2 import TemplateError

if TYPE_CHECKING:
    from data.options import RunConfig

# role and content, with tool_calls, tool_call_id or name where a template takes them
Message = dict[str, Any]
# What stands before an answer of the target: a user's text, or messages (a system prompt, the user's text, an
# assistant's tool calls as they were recorded, the tools' results).
Turn = str | list[Message]
# What a template, or the tokenizer after it, raises for messages that it does not take: a role, a missing or null
# content, tool calls of another shape, half a surrogate pair in a text, values nested too deeply.
_REFUSALS = (TemplateError, TypeError, KeyError, ValueError, AttributeError, IndexError, RecursionError)
# Arguments of apply_chat_template that are ours.
_OURS = (
    "messages", "tools", "documents", "conversation", "chat_template", "add_generation_prompt",
    "continue_final_message", "tokenize", "padding", "truncation", "max_length", "return_tensors", "return_dict",
    "return_assistant_tokens_mask", "tokenizer_kwargs", "sanitize_control_tokens",
)  # fmt: skip


class TemplateRejected(ValueError):
    """The chat template refuses these messages: the caller skips the row, counts it and names it."""


@dataclass(frozen=True)
class ChatFormat:
    """What shapes a prompt beside the messages and the template.

    Attributes:
        thinking: whether a template that knows `enable_thinking` lets the target reason before it answers.
        arguments: further arguments of the template.
    """

    thinking: bool = False
    arguments: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, config: RunConfig) -> ChatFormat:
        """The format of a run's options `thinking` and `template_args`."""
        return cls(config.thinking, parse_arguments(config.template_args))

    @property
    def template_arguments(self) -> dict[str, Any]:
        return {"enable_thinking": self.thinking, **self.arguments}

    @property
    def recorded(self) -> dict[str, Any]:
        """What is written beside data and weights that were made in this format."""
        return {"thinking": self.thinking, "template_args": dict(sorted(self.arguments.items()))}


PLAIN = ChatFormat()


def parse_arguments(words: Sequence[str]) -> dict[str, Any]:
    """KEY=VALUE words as template arguments; a value is what YAML makes of it where that is a number, true or false.

    Anything else stays text: a date would be no JSON. Raises ValueError naming the option.
    """
    arguments: dict[str, Any] = {}
    for word in words:
        key, equals, text = word.partition("=")
        if not equals or not key.isidentifier():
            raise ValueError(f"template_args must be KEY=VALUE, got {word!r}")
        if key in _OURS:
            raise ValueError(f"template_args: {key} is not for the user to set")
        if key == "enable_thinking":
            raise ValueError("template_args: enable_thinking is the option thinking (--thinking true)")
        if key in arguments:
            raise ValueError(f"template_args: {key} is given twice")
        arguments[key] = _scalar(text)
    return arguments


def _scalar(text: str) -> Any:
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        return text
    if isinstance(value, float) and not math.isfinite(value):
        return text
    quoted = isinstance(value, str) and text.strip()[:1] in ("'", '"')
    return value if quoted or value is None and text.strip() or isinstance(value, (bool, int, float)) else text


def messages_of(turns_so_far: Sequence[Turn], answers_so_far: Sequence[str]) -> list[Message]:
    """The turns and the target's answers in alternation; there is one turn more than answers."""
    assert len(turns_so_far) == len(answers_so_far) + 1
    messages: list[Message] = []
    for index, turn in enumerate(turns_so_far):
        messages += [{"role": "user", "content": turn}] if isinstance(turn, str) else turn
        if index < len(answers_so_far):
            messages.append({"role": "assistant", "content": answers_so_far[index]})
    return messages


def turn_text(turn: Turn) -> str:
    """What a person reads of a turn, and what two equal questions share: the user's words, else all contents."""
    if isinstance(turn, str):
        return turn
    asked = [message for message in turn if message.get("role") == "user"] or turn
    return "\n\n".join(text_of(message.get("content")) for message in asked)


def text_of(content: Any) -> str:
    """A message's content as text: itself, or the text parts of a list of parts."""
    if isinstance(content, list):
        return "".join(part.get("text") or "" for part in content if isinstance(part, dict))
    return content if isinstance(content, str) else ""


def encode_prompt(
    tokenizer, messages: list[Message], tools: list[dict] | None = None, form: ChatFormat = PLAIN
) -> list[int]:
    """Token ids of a conversation up to where the assistant begins to write; no system prompt of ours.

    Raises ValueError when the tokenizer has no chat template, TemplateRejected when the template refuses the messages.
    """
    ids = _apply(tokenizer, messages, tools, form, add_generation_prompt=True, tokenize=True, return_dict=False)
    if not ids:
        raise TemplateRejected("the chat template gives no token")
    return list(ids)


def render(
    tokenizer,
    messages: list[Message],
    tools: list[dict] | None = None,
    form: ChatFormat = PLAIN,
    asks: bool = False,
) -> str:
    """The text whose tokens `encode_prompt` gives (`asks`), or that of a finished conversation. Raises as that does."""
    text = _apply(tokenizer, messages, tools, form, add_generation_prompt=asks, tokenize=False)
    return checked_text(text)


def checked_text(text: str) -> str:
    """The text. Raises TemplateRejected for one that is no Unicode: a tokenizer would refuse all that come with it."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise TemplateRejected("half a surrogate pair in a text") from None
    return text


def encode_marked(tokenizer, messages: list[Message], tools: list[dict] | None = None, form: ChatFormat = PLAIN):
    """A finished conversation as transformers encodes it, with `assistant_masks`: for templates with generation marks.

    Raises as `encode_prompt` does.
    """
    options = {"tokenize": True, "return_dict": True, "return_assistant_tokens_mask": True}
    return _apply(tokenizer, messages, tools, form, add_generation_prompt=False, **options)


def _apply(tokenizer, messages: list[Message], tools: list[dict] | None, form: ChatFormat, **options):
    require_template(tokenizer)
    try:
        return tokenizer.apply_chat_template(messages, tools=tools, **options, **form.template_arguments)
    except _REFUSALS as error:
        raise TemplateRejected(f"the chat template rejects the messages: {' '.join(str(error).split())}") from error


def date_warning(tokenizer, form: ChatFormat = PLAIN) -> str | None:
    """One line about a template that writes today's date (Llama 3's): tomorrow the same prompt has other tokens."""
    template = getattr(tokenizer, "chat_template", None)
    words = template if isinstance(template, str) else json.dumps(template)
    if "strftime_now" not in words or "date_string" in form.arguments:
        return None
    return (
        "warning: the chat template writes today's date into prompts, so that answers, training and evaluation of "
        "different days differ: give --template_args 'date_string=26 Jul 2024', or the argument that it takes"
    )


def require_template(tokenizer) -> None:
    """Raises ValueError for a tokenizer without a chat template: a made-up format would not be the target's own."""
    if tokenizer is None or not getattr(tokenizer, "chat_template", None):
        name = getattr(tokenizer, "name_or_path", "") or "the target"
        raise ValueError(f"target: the tokenizer of {name} has no chat_template; choose an instruction-tuned target")


def template_fingerprint(tokenizer, form: ChatFormat = PLAIN) -> str:
    """A hash that changes with the chat template, its arguments or the tokenizer: it keys what is stored as tokens."""
    require_template(tokenizer)
    probe = tokenizer("Why 3 x 14? Because: naïve \n\tπ.", add_special_tokens=False)["input_ids"]
    parts: list = [tokenizer.chat_template, list(probe), len(tokenizer)]
    if form != PLAIN:
        parts.append(form.template_arguments)
    content = json.dumps(parts, sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()[:16]
