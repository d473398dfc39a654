"""A prompt, and the reason why a row is none."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any

from data.chat import Turn


class Unusable(ValueError):
    """A row that is skipped. Attributes: reason: what it is counted under; detail: what is special to this row."""

    def __init__(self, reason: str, detail: str = ""):
        super().__init__(f"{reason} ({detail})" if detail else reason)
        self.reason, self.detail = reason, detail


@dataclass(frozen=True)
class Prompt:
    """What the target is asked.

    Attributes:
        id: unique in a prompt set and stable over runs (a hash of the turns unless the source names one).
        turns: what stands before each answer that the target writes, in order; none is empty (`data.chat.Turn`).
        domain: maths, code or chat for built-in prompts, else what the source says or the file's name.
        tools: definitions of the functions that the target may call, as chat templates take them.
        answers: the data set's own answers where it holds them: one a turn, but for a last turn that has none.
    """

    id: str
    turns: list[Turn]
    domain: str
    tools: list[dict] | None = None
    answers: list[str] | None = None


def content_id(content: object) -> str:
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]


def told_apart(prompt: Prompt) -> str:
    """An id for a prompt whose own id another prompt has."""
    return f"{prompt.id}~{content_id([prompt.turns, prompt.tools])[:8]}"


def check_storable(content: object) -> None:
    try:
        json.dumps(content, ensure_ascii=False, allow_nan=False).encode()
    except UnicodeEncodeError:
        raise Unusable("text that is not Unicode", "half of a surrogate pair") from None
    except (TypeError, ValueError, RecursionError) as error:
        raise Unusable("a value that JSON cannot hold", str(error)) from None


def parsed(text: str, reason: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):  # a number of too many digits is no JSONDecodeError
        raise Unusable(reason) from None
