"""The open turns of a run, whoever answers them: what to ask next, and what to do with the answer.

A conversation is asked turn by turn, each turn after the target's own answers to the turns before it. Conversations are
read one at a time from the prompts, so that memory holds those under way and the ids of all.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from tqdm import tqdm

from data.answer_store import FAILED, SKIPPED, AnswerStore, Outcome
from data.answers import AnswerRow
from data.chat import ChatFormat, TemplateRejected, encode_prompt, messages_of
from data.conversations import Prompt
from data.engines import RECORDED, Question, engine_name
from data.prompt_store import Prepared
from data.settings import RunConfig

EARLIER_SKIPPED, EARLIER_FAILED = "an earlier turn has no answer", "an earlier turn failed"


@dataclass
class Dialogue:
    """A conversation under way: the target's answers so far, and whether nothing more of it can be asked.

    Attributes:
        again: one of its turns failed in an earlier run.
    """

    prompt: Prompt
    answers: list[str] = field(default_factory=list)
    closed: bool = False
    again: bool = False

    @property
    def turn(self) -> int:
        """Of the next question, from 0."""
        return len(self.answers)

    @property
    def recorded(self) -> str | None:
        """The data set's own answer to the next question, where there is one."""
        answers = self.prompt.answers or []
        return answers[self.turn] if self.turn < len(answers) else None

    @property
    def finished(self) -> bool:
        return self.closed or self.turn == len(self.prompt.turns)


def turn_id(prompt: str, turn: int) -> str:
    """The row id of a turn, counted from 0, of the prompt with this id."""
    return prompt if turn == 0 else f"{prompt}.turn{turn + 1}"


def turn_ids(prompts: Prepared) -> Iterator[str]:
    """Row ids of all turns, conversation by conversation; the texts stay on disk."""
    for prompt, count in _conversations(prompts):
        yield from (turn_id(prompt, turn) for turn in range(count))


def _conversations(prompts: Prepared) -> Iterator[tuple[str, int]]:
    """(id, number of turns) of each prompt."""
    counts = iter(prompts.turn_counts.tolist())
    for chunk in prompts.column("id").chunks:
        yield from zip(chunk.to_pylist(), counts, strict=False)


class Work:
    """This process's share of the turns.

    Attributes:
        new_tokens, new_rows: what was answered since the start.
        out_of_time: the time budget ended the run.
    """

    def __init__(
        self, config: RunConfig, tokenizer, prompts: Prepared, store: AnswerStore, rank: int = 0, ranks: int = 1
    ):
        self.config, self.tokenizer, self.prompts, self.store = config, tokenizer, prompts, store
        self.rank, self.ranks, self.form = rank, ranks, ChatFormat.of(config)
        self._recorded = engine_name(config) == RECORDED
        self.local_rank = int(os.environ.get("LOCAL_RANK", rank))
        self.started, self.new_tokens, self.new_rows = time.monotonic(), 0, 0
        self.out_of_time = False
        self._asked: dict[str, Dialogue] = {}
        self._rows: list[AnswerRow] = []
        self._outcomes: list[Outcome] = []
        self._bar: tqdm | None = None

    @contextlib.contextmanager
    def shown(self) -> Iterator[None]:
        """A progress bar while an engine is at work; `dialogues` may be read to its end long before."""
        total, others = self.store.open_turns(self.prompts.turns) // self.ranks, self.rank > 0
        with tqdm(total=total, desc="answers", unit="row", disable=others) as self._bar:
            yield
        self._bar = None

    def dialogues(self) -> Iterator[Dialogue]:
        """The share's conversations with an open turn, in order; those that failed in an earlier run come last."""
        again = []
        for index, (prompt, count) in enumerate(_conversations(self.prompts)):
            if index % self.ranks != self.rank:
                continue
            statuses = {self.store.status(turn_id(prompt, turn)) for turn in range(count)}
            if FAILED in statuses:
                again.append(index)
            elif not statuses <= {"done", SKIPPED}:
                yield Dialogue(self.prompts[index])
        for index in again:
            yield Dialogue(self.prompts[index], again=True)

    def question(self, dialogue: Dialogue) -> Question | None:
        """The next open turn of a conversation; None when there is none. What cannot be asked is recorded."""
        prompt = dialogue.prompt
        while not dialogue.finished:
            key = turn_id(prompt.id, dialogue.turn)
            status = self.store.status(key)
            if status == "done":
                dialogue.answers.append(self._said(dialogue, key))
            elif status == SKIPPED:
                self._close(dialogue, EARLIER_SKIPPED, SKIPPED)
            else:
                question = self._ask(dialogue, key)
                if question is not None:
                    self._asked[key] = dialogue
                    return question
        return None

    def _ask(self, dialogue: Dialogue, key: str) -> Question | None:
        prompt, turn = dialogue.prompt, dialogue.turn
        try:
            messages = messages_of(prompt.turns[: turn + 1], dialogue.answers)
            ids = encode_prompt(self.tokenizer, messages, prompt.tools, self.form)
        except TemplateRejected as error:
            reason, _, detail = str(error).partition(": ")
            self._drop(dialogue, Outcome(key, SKIPPED, reason, detail))
            return None
        limit = self.config.max_prompt_length
        if len(ids) > limit:
            detail = f"{len(ids)} prompt tokens, max_prompt_length is {limit}"
            self._drop(dialogue, Outcome(key, SKIPPED, "longer than max_prompt_length", detail))
            return None
        return Question(key, prompt.domain, ids, messages, prompt.tools, dialogue.recorded)

    def take(self, result: AnswerRow | Outcome) -> Dialogue:
        """Accounts for an asked question and returns its conversation. `flush` writes."""
        dialogue = self._asked.pop(result.id)
        if isinstance(result, Outcome):
            self._drop(dialogue, result)
        else:
            self._rows.append(result)
            dialogue.answers.append(self._said(dialogue, result))
            self.new_tokens += len(result.answer_ids)
            self.new_rows += 1
            self._advance(1)
        return dialogue

    def flush(self) -> None:
        """Writes what was taken, in one go, and waits until it is on disk."""
        rows, outcomes = self._rows, self._outcomes
        self._rows, self._outcomes = [], []
        self.store.add(rows, outcomes)

    @property
    def waiting(self) -> int:
        """Results that are not on disk yet."""
        return len(self._rows) + len(self._outcomes)

    def spent(self) -> bool:
        """Whether the time budget is used up, which at least one answer must have been."""
        budget = self.config.time_budget
        self.out_of_time |= bool(budget and self.new_rows and time.monotonic() - self.started > budget)
        return self.out_of_time

    def say(self, text: str) -> None:
        """A line for the user, above the progress bar."""
        tqdm.write(text)

    def _drop(self, dialogue: Dialogue, outcome: Outcome) -> None:
        """Records a turn without answer; those after it cannot be asked, and share its fate."""
        self._outcomes.append(outcome)
        self._advance(1)
        dialogue.answers.append("")  # the turns after it begin here
        failed = outcome.status == FAILED
        self._close(dialogue, EARLIER_FAILED if failed else EARLIER_SKIPPED, outcome.status)

    def _close(self, dialogue: Dialogue, reason: str, status: str) -> None:
        dialogue.closed = True
        for turn in range(dialogue.turn, len(dialogue.prompt.turns)):
            key = turn_id(dialogue.prompt.id, turn)
            if self.store.status(key) not in ("done", SKIPPED):
                self._outcomes.append(Outcome(key, status, reason))
                self._advance(1)

    def _said(self, dialogue: Dialogue, answer: AnswerRow | str) -> str:
        """The text of a turn's answer, given or by its id, as later turns have it before them."""
        if self._recorded and dialogue.recorded is not None:  # a row may be cut, what follows it came after the whole
            return dialogue.recorded
        row = self.store.row(answer) if isinstance(answer, str) else answer
        return self.tokenizer.decode(row.answer_ids, skip_special_tokens=True)

    def _advance(self, turns: int) -> None:
        if self._bar is not None:
            self._bar.update(turns)
            seconds = time.monotonic() - self.started
            self._bar.set_postfix_str(f"{self.new_tokens / max(seconds, 1e-9):.0f} tokens/s", refresh=False)
