"""Answers that were recorded as text, as the tokens that the target would have written after exactly the prompt that
`encode_prompt` makes. Each is told by itself, so that a template which rewrites history (data/masks.py) disturbs none.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from data.chat import PLAIN, ChatFormat, Message, TemplateRejected, checked_text, render
from data.masks import NO_CLOSING, closing_token, message, same_text


@dataclass(frozen=True)
class Recorded:
    """An answer that somebody recorded as text, and what stood before it.

    Attributes:
        whole: it ended by itself; a cut one gets no closing token.
    """

    messages: list[Message]
    answer: str
    tools: list[dict] | None = None
    whole: bool = True


@dataclass(frozen=True)
class AnswerTokens:
    """Attributes: reason: why the answer cannot be told in tokens; then both lists are empty."""

    prompt_ids: list[int] = field(default_factory=list)
    answer_ids: list[int] = field(default_factory=list)
    reason: str = ""


def tokenise_answers(
    tokenizer, recorded: Sequence[Recorded], form: ChatFormat = PLAIN, eos_ids: Collection[int] = ()
) -> list[AnswerTokens]:
    """Recorded answers as the tokens that the target would have written after its prompt, closing token included.

    The prompt's tokens are those of `encode_prompt`. Arguments and errors as in `data.masks.mask_conversations`.
    """
    closing = closing_token(tokenizer, form, eos_ids)
    found: list[AnswerTokens | None] = [None] * len(recorded)
    asked: list[tuple[int, str, str]] = []  # (place, prompt, prompt with answer), both as text
    for place, row in enumerate(recorded):
        if not row.answer.strip():
            found[place] = AnswerTokens(reason="an empty answer")
        elif row.whole and closing is None:
            found[place] = AnswerTokens(reason=NO_CLOSING)
        else:
            try:
                prompt = render(tokenizer, row.messages, row.tools, form, asks=True)
                asked.append((place, prompt, checked_text(prompt + _continuation(tokenizer, row, prompt, form))))
            except TemplateRejected as error:
                found[place] = AnswerTokens(reason=str(error))
    texts = [text for _, prompt, whole in asked for text in (prompt, whole)]
    ids = tokenizer(texts, add_special_tokens=False)["input_ids"] if texts else []
    for (place, prompt, whole), prompt_ids, whole_ids in zip(asked, ids[::2], ids[1::2], strict=True):
        found[place] = _after_prompt(tokenizer, prompt_ids, whole_ids, whole[len(prompt) :])
    stops = set(eos_ids) | {closing}
    for place, row in enumerate(recorded):
        if not found[place].reason and stops.intersection(found[place].answer_ids):
            found[place] = AnswerTokens(reason="a token at which the target stops stands in the answer")
        elif row.whole and not found[place].reason:
            found[place].answer_ids.append(closing)
    return found


def _continuation(tokenizer, row: Recorded, prompt: str, form: ChatFormat) -> str:
    """The answer as the template writes it after its prompt (some cut white space), else as it was recorded."""
    try:
        whole = render(tokenizer, [*row.messages, message("assistant", row.answer)], row.tools, form)
    except TemplateRejected:
        return row.answer
    rest, bare = whole[len(prompt) :], row.answer.strip()
    if not whole.startswith(prompt) or rest.startswith(row.answer) or not rest.lstrip().startswith(bare):
        return row.answer
    return rest[: rest.index(bare) + len(bare)]


def _after_prompt(tokenizer, prompt_ids: list[int], whole_ids: list[int], answer: str) -> AnswerTokens:
    """What follows the prompt's tokens. A token that would join prompt and answer is what no generation gives: the
    answer is then tokenised by itself."""
    if whole_ids[: len(prompt_ids)] == prompt_ids:
        answer_ids = whole_ids[len(prompt_ids) :]
    else:
        answer_ids = tokenizer(answer, add_special_tokens=False)["input_ids"]
    if not prompt_ids:
        return AnswerTokens(reason="the chat template gives no token")
    if not same_text(tokenizer.decode(answer_ids), answer):
        return AnswerTokens(reason="the answer's tokens decode to another text")
    return AnswerTokens(list(prompt_ids), list(answer_ids))
