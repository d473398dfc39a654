"""The one place that turns messages into prompt tokens: regeneration, training and evaluation all call `encode_prompt`.

A template applied in two ways (thinking on in training, off when decoding) costs a drafter most of its acceptance.
"""

from __future__ import annotations

import hashlib
import json

from jinja2 import TemplateError


class TemplateRejected(ValueError):
    """The chat template refuses these messages: the caller skips the row, counts it and names it."""


def messages_of(turns_so_far: list[str], answers_so_far: list[str]) -> list[dict[str, str]]:
    """User turns and the assistant's answers in alternation; there is one turn more than answers."""
    assert len(turns_so_far) == len(answers_so_far) + 1
    messages = []
    for index, turn in enumerate(turns_so_far):
        messages.append({"role": "user", "content": turn})
        if index < len(answers_so_far):
            messages.append({"role": "assistant", "content": answers_so_far[index]})
    return messages


def encode_prompt(tokenizer, messages: list[dict[str, str]]) -> list[int]:
    """Token ids of a conversation up to where the assistant begins to write; no system prompt of ours, thinking off.

    Raises ValueError when the tokenizer has no chat template, TemplateRejected when the template refuses the messages.
    """
    require_template(tokenizer)
    try:
        ids = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=True, return_dict=False, enable_thinking=False
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


def template_fingerprint(tokenizer) -> str:
    """A hash that changes with the chat template or the tokenizer, to key whatever is stored as tokens."""
    require_template(tokenizer)
    probe = tokenizer("Why 3 x 14? Because: naïve \n\tπ.", add_special_tokens=False)["input_ids"]
    content = json.dumps([tokenizer.chat_template, list(probe), len(tokenizer)], sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()[:16]
