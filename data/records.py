"""The rows of a data set: an answer, the conversation before it as text, and where the prompt came from.

    answered(rows, prompts, tokenizer)      # from RUN/answers and RUN/prompts
    read_shards(paths)                      # from the Parquet files of a data set

One row at a time, in the order of the prompts: memory does not grow with their number.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow
import pyarrow.parquet

from data.answers import AnswerRow
from data.chat import Message, messages_of, text_of
from data.conversations import Prompt
from data.dialogues import turn_id
from data.hub import without_paths
from data.prompt_store import Prepared
from data.row_table import Rows

_TEXT = pyarrow.string()
_MESSAGE = {name: _TEXT for name in ("role", "content", "tool_calls", "tool_call_id", "name")}
SCHEMA = pyarrow.schema(
    {
        "id": _TEXT,
        "domain": _TEXT,
        "source": _TEXT,
        "language": _TEXT,
        "messages": pyarrow.list_(pyarrow.struct(_MESSAGE)),
        "tools": _TEXT,
        "prompt_ids": pyarrow.list_(pyarrow.int32()),
        "answer_ids": pyarrow.list_(pyarrow.int32()),
        "stop": _TEXT,
        "exact": pyarrow.bool_(),
    }
)


@dataclass(frozen=True)
class Record:
    """A row of a data set.

    Attributes:
        messages: the conversation up to and with the answer: role and content as text, tool_calls as JSON, tool_call_id
            and name where a message has them.
        tools: the offered functions as JSON, or None.
        source: of the prompt, as `prompts` names it, without folders of this machine.
        language: of the prompt, "" where the preparation detected none.
    """

    row: AnswerRow
    messages: list[dict[str, str | None]]
    tools: str | None = None
    source: str = ""
    language: str = ""

    @property
    def opens(self) -> bool:
        """Whether the answer is the first of its conversation."""
        return not any(m["role"] == "assistant" and not m["tool_calls"] for m in self.messages[:-1])

    @property
    def question(self) -> str:
        """The user's words that the answer is to; those of tools where the user said nothing since the last answer."""
        last: list[dict] = []
        for message in reversed(self.messages[:-1]):
            if message["role"] == "assistant" and not message["tool_calls"]:
                break
            last.insert(0, message)
        asked = [m for m in last if m["role"] == "user"] or last
        return "\n\n".join(m["content"] or "" for m in asked)

    @property
    def answer(self) -> str:
        return self.messages[-1]["content"] or ""

    def columns(self) -> dict:
        """The values of SCHEMA."""
        row = self.row
        return {
            "id": row.id, "domain": row.domain, "source": self.source, "language": self.language,
            "messages": self.messages, "tools": self.tools, "prompt_ids": row.prompt_ids,
            "answer_ids": row.answer_ids, "stop": row.stop, "exact": row.exact,
        }  # fmt: skip


def answered(rows: Rows, prompts: Prepared, tokenizer, start: int = 0) -> Iterator[Record]:
    """The answered turns of the prompts in order, but for the first `start` of them.

    Raises ValueError when answers are left that belong to none of the prompts.
    """
    found = 0
    for prompt, source, language in zip(prompts, _column(prompts, "source"), _column(prompts, "language"), strict=True):
        places = list(_places(rows, prompt))
        found += len(places)
        if found > start:
            new = len(places) - (found - start)
            yield from _of_prompt(
                rows, prompt, places, tokenizer, without_paths(source or ""), language or "", max(0, new)
            )
    if found < len(rows):
        raise ValueError(
            f"{len(rows) - found} of {len(rows)} answers belong to no prompt of {prompts.folder}: prepare the prompts "
            "that they were asked with, or delete both folders and run: bash launch.sh regenerate CONFIG"
        )


def _places(rows: Rows, prompt: Prompt) -> Iterator[int]:
    """Where the prompt's answers are; a turn without one ends the conversation."""
    for turn in range(len(prompt.turns)):
        try:
            yield rows.find(turn_id(prompt.id, turn))
        except KeyError:
            return


def _of_prompt(
    rows: Rows, prompt: Prompt, places: list[int], tokenizer, source: str, language: str, start: int
) -> Iterator[Record]:
    answers: list[str] = []
    tools = None if prompt.tools is None else json.dumps(prompt.tools, ensure_ascii=False)
    for turn, place in enumerate(places):
        row = rows[place]
        messages = messages_of(prompt.turns[: turn + 1], answers)
        # As regeneration puts an answer into the history of the next turn.
        answers.append(tokenizer.decode(row.answer_ids, skip_special_tokens=True))
        if turn >= start:
            messages.append({"role": "assistant", "content": answers[-1]})
            yield Record(row, [_as_text(m) for m in messages], tools, source, language)


def _as_text(message: Message) -> dict[str, str | None]:
    calls = message.get("tool_calls")
    return {
        "role": str(message.get("role")),
        "content": text_of(message.get("content")),
        "tool_calls": json.dumps(calls, ensure_ascii=False) if calls else None,
        **{key: None if message.get(key) is None else str(message[key]) for key in ("tool_call_id", "name")},
    }


def _column(prompts: Prepared, name: str) -> Iterator[str | None]:
    chunks: Iterable[pyarrow.Array] = prompts.column(name).chunks
    return itertools.chain.from_iterable(chunk.to_pylist() for chunk in chunks)


def read_shards(paths: Sequence[Path]) -> Iterator[Record]:
    """The rows of Parquet files that `data.shards` wrote."""
    names = AnswerRow.__dataclass_fields__
    for path in paths:
        with pyarrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=256):
                for values in batch.to_pylist():
                    row = AnswerRow(**{name: values[name] for name in names})
                    yield Record(row, values["messages"], values["tools"], values["source"], values["language"])
