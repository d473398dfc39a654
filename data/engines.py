"""Who answers the prompts: one interface, three engines.

- local (data/engine_local.py): the target in this process, in batches; each rank of torchrun or DeepSpeed's launcher
  answers its share of the conversations.
- server (data/engine_server.py): any OpenAI-compatible servers, several at once.
- recorded (data/engine_recorded.py): the data set's own answers, where the target wrote them already.

An engine takes conversations from a `data.dialogues.Work`, asks their turns one after another, each after the target's
own answers to those before it, and gives the answers back to it. What it may not change is the text: the same sampling,
and for each row a seed of its own that neither batches, endpoints nor ranks have a part in.
"""

from __future__ import annotations

import os
import zlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from data.chat import Message
from data.settings import RunConfig

if TYPE_CHECKING:
    from data.dialogues import Work

LOCAL, SERVER, RECORDED = "local", "server", "recorded"


@dataclass(frozen=True)
class Question:
    """One turn to answer.

    Attributes:
        id, domain: of the row.
        prompt_ids: tokens up to where the assistant begins.
        messages, tools: what they were made from.
        recorded: the data set's own answer, where there is one.
    """

    id: str
    domain: str
    prompt_ids: list[int]
    messages: list[Message] = field(default_factory=list)
    tools: list[dict] | None = None
    recorded: str | None = None


class Engine(Protocol):
    def run(self, work: Work) -> None:
        """Answers what is open until nothing is, or the time budget is spent. StageError when it cannot go on."""


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen: from softmax(logits / temperature), cut by top_k, then top_p, then min_p; 0 is greedy."""

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    max_length: int
    seed: int

    @classmethod
    def of(cls, config: RunConfig) -> Sampling:
        knobs = (config.answer_temperature, config.top_p, config.top_k, config.min_p)
        return cls(*knobs, config.max_answer_length, config.seed)

    @property
    def plain(self) -> bool:
        """Whether the temperature says everything."""
        return self.temperature == 0 or (self.top_p, self.top_k, self.min_p) == (1.0, 0, 0.0)

    def seed_of(self, row: str) -> int:
        """A row's own seed, of 31 bits (some servers take no more)."""
        return zlib.crc32(f"{self.seed} {row}".encode("utf-8", "backslashreplace")) & 0x7FFFFFFF


def engine_name(config: RunConfig) -> str:
    """local, server or recorded."""
    if config.engine != "auto":
        return config.engine
    return SERVER if config.endpoints else LOCAL


def place_in_run() -> tuple[int, int]:
    """(rank, number of ranks) as a launcher says in the environment."""
    return int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


def cut_answer(tokens: list[int], eos_ids: tuple[int, ...]) -> tuple[list[int], str]:
    """The tokens up to the first eos of any kind, that one included, and why the answer stopped."""
    for index, token in enumerate(tokens):
        if token in eos_ids:
            return tokens[: index + 1], "eos"
    return tokens, "length"
