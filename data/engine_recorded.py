"""The engine `recorded`: the data set's own answers as tokens, for data whose answers the target has written already.

Nothing is generated. Each answer is tokenised after exactly the prompt that the target would be given, with the token
that closes a turn in its template; one longer than max_answer_length is cut and marked so.
"""

from __future__ import annotations

from itertools import islice

from data.answer_store import SKIPPED, Outcome
from data.answer_tokens import AnswerTokens, Recorded, tokenise_answers
from data.answers import AnswerRow
from data.dialogues import Work
from data.engines import Question

# Conversations tokenised at once.
_WINDOW = 256


class RecordedEngine:
    """
    Args:
        eos_ids: tokens at which the target stops.
        max_length: tokens of an answer.
    """

    def __init__(self, tokenizer, eos_ids: tuple[int, ...], max_length: int):
        self.tokenizer, self.eos_ids, self.max_length = tokenizer, eos_ids, max_length

    def run(self, work: Work) -> None:
        dialogues = work.dialogues()
        while window := list(islice(dialogues, _WINDOW)):
            while questions := [q for q in map(work.question, window) if q is not None]:
                if work.spent():
                    return
                asked = [Recorded(q.messages, q.recorded or "", q.tools) for q in questions]
                tokens = tokenise_answers(self.tokenizer, asked, work.form, self.eos_ids)
                for question, answer in zip(questions, tokens, strict=True):
                    work.take(self._result(question, answer))
                work.flush()
            work.flush()

    def _result(self, question: Question, answer: AnswerTokens) -> AnswerRow | Outcome:
        if question.recorded is None:
            return Outcome(question.id, SKIPPED, "the data set has no answer")
        if answer.reason:
            reason, _, detail = answer.reason.partition(": ")
            return Outcome(question.id, SKIPPED, reason, detail)
        ids, stop = answer.answer_ids, "eos"
        if len(ids) > self.max_length:
            ids, stop = ids[: self.max_length], "length"
        return AnswerRow(question.id, question.domain, question.prompt_ids, ids, stop, exact=False)
