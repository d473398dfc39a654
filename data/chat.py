"""The one place that turns messages into prompt tokens: regeneration, training and evaluation all call `encode_prompt`.

A template applied in two ways (thinking on in training, off when decoding) costs a drafter most of its acceptance.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jinja2 import TemplateError

# role and content, with tool_calls, tool_call_id or name where a template takes them
Message = dict[str, Any]
# What stands before an answer of the target: a user's text, or messages (a system prompt, the user's text, an
# assistant's tool calls as they were recorded, the tools' results).
Turn = str | list[Message]


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

    @property
    def template_arguments(self) -> dict[str, Any]:
        return {"enable_thinking": self.thinking, **self.arguments}


PLAIN = ChatFormat()


def messages_of(turns_so_far: Sequence[Turn], answers_so_far: Sequence[str]) -> list[Message]:
    """The turns and the target's answers in alternation; there is one turn more than answers."""
    assert len(turns_so_far) == len(answers_so_far) + 1
    messages: list[Message] = []
    for index, turn in enumerate(turns_so_far):
        messages += [{"role": "user", "content": turn}] if isinstance(turn, str) else turn
        if index < len(answers_so_far):
            messages.append({"role": "assistant", "content": answers_so_far[index]})
    return messages


def encode_prompt(
    tokenizer, messages: list[Message], tools: list[dict] | None = None, form: ChatFormat = PLAIN
) -> list[int]:
    """Token ids of a conversation up to where the assistant begins to write; no system prompt of ours.

    Raises ValueError when the tokenizer has no chat template, TemplateRejected when the template refuses the messages.
    """
    require_template(tokenizer)
    try:
        ids = tokenizer.apply_chat_template(
            messages,
            tools=tools,
            add_generation_prompt=True,
            tokenize=True,
            return_dict=False,
            **form.template_arguments,
        )
    except (TemplateError, TypeError, KeyError) as error:
        raise TemplateRejected(f"the chat template rejects the messages: {' '.join(str(error).split())}") from error
    if not ids:
        raise TemplateRejected("the chat template gives no token")
    return list(ids)


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
