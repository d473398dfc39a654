"""What a server sends back, and the answer row that it is worth.

A server's text is not the target's tokens. Where the server returns ids they are taken as they are; otherwise the text
is tokenised again, and counts only if it decodes to itself and has as many tokens as the server says it wrote.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from data.answers import AnswerRow
from data.engines import Question, cut_answer


class BadReply(Exception):
    """A reply that gives no row.

    Attributes:
        reason: one of few.
        again: whether the same request may well be answered better at once; else the next run tries.
    """

    def __init__(self, reason: str, detail: str = "", again: bool = False):
        super().__init__(reason)
        self.reason, self.detail, self.again = reason, detail, again


@dataclass(frozen=True)
class Reply:
    """The one answer of a reply, None for what the server does not say.

    Attributes:
        finish: "stop", "length", or another finish_reason.
        stop: where it stopped, where the server says so: a token's id, or a string.
        prompt_tokens, completion_tokens: as the server counts them.
        prompt_ids: what it read.
    """

    text: str | None
    token_ids: list[int] | None
    finish: str | None
    stop: int | str | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_ids: list[int] | None = None

    def other_prompt(self, question: Question) -> str:
        """How the prompt that the server read differs from the target's own; "" where it does not, or nobody knows."""
        asked = len(question.prompt_ids)
        if self.prompt_tokens is not None and self.prompt_tokens != asked:
            return f"{self.prompt_tokens} prompt tokens, the target's template gives {asked}"
        if self.prompt_ids is not None and self.prompt_ids != question.prompt_ids:
            return "other prompt tokens than those that the target's template gives"
        return ""


def parse_reply(content: bytes) -> Reply:
    """Reads a body of /v1/completions or /v1/chat/completions. Raises BadReply for anything else."""
    try:
        body = json.loads(content)
    except (ValueError, RecursionError) as error:  # the second: brackets in brackets, thousands deep
        raise BadReply("a reply that is not JSON", str(error), again=True) from None
    choices = body.get("choices") if isinstance(body, dict) else None
    if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict):
        count = len(choices) if isinstance(choices, list) else "no"
        raise BadReply("a reply without exactly one answer", f"{count} choices", again=True)
    choice = choices[0]
    message = choice.get("message") if isinstance(choice.get("message"), dict) else {}
    text = choice.get("text", message.get("content"))
    usage = body.get("usage") if isinstance(body.get("usage"), dict) else {}
    stop = choice.get("stop_reason", choice.get("matched_stop"))  # of vLLM, of SGLang
    return Reply(
        text if isinstance(text, str) else None,
        _ids(choice.get("token_ids")),
        choice.get("finish_reason"),
        stop or None if isinstance(stop, str) else _whole(stop),
        _whole(usage.get("prompt_tokens")),
        _whole(usage.get("completion_tokens")),
        _ids(choice.get("prompt_token_ids", body.get("prompt_token_ids"))),
    )


def printable(value: object, length: int | None = None) -> str:
    """As text that every output takes (JSON may hold half a surrogate pair, UTF-8 may not), cut to so many letters."""
    return str(value)[:length].encode("utf-8", "backslashreplace").decode()


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _ids(value: object) -> list[int] | None:
    return value if isinstance(value, list) and value and all(_whole(token) is not None for token in value) else None


@dataclass(frozen=True)
class AnswerReader:
    """Turns replies into rows.

    Attributes:
        eos_ids: tokens at which the target stops.
        closing: the one with which its template closes an answer.
        max_length: tokens that were asked for at most.
        vocab_size: ids lie below it.
    """

    tokenizer: object
    eos_ids: tuple[int, ...]
    closing: int
    max_length: int
    vocab_size: int

    def row(self, question: Question, reply: Reply) -> AnswerRow:
        """Raises BadReply for a reply whose tokens cannot be told for certain."""
        if reply.finish not in ("stop", "length"):
            raise BadReply(f"finish_reason {printable(reply.finish, 40)}")
        if difference := reply.other_prompt(question):
            raise BadReply("the server read another prompt", difference)
        ended = reply.finish == "stop"
        ids = self._encoded(reply, ended) if reply.token_ids is None else self._given(reply)
        ids, stop = cut_answer(ids, self.eos_ids)
        if stop == "length" and ended:
            ids, stop = [*ids, self._closing(reply)], "eos"
        if len(ids) > self.max_length + ended:  # some servers do not count the end
            raise BadReply("more tokens than max_answer_length", f"{len(ids)} tokens")
        return AnswerRow(question.id, question.domain, question.prompt_ids, ids, stop, reply.token_ids is not None)

    def _closing(self, reply: Reply) -> int:
        """The end that the server kept to itself. Raises BadReply where it stopped at something else."""
        if reply.stop is None:
            return self.closing
        for token in self.eos_ids:
            if reply.stop in (token, self.tokenizer.decode([token])):
                return token
        kind = "a stop string" if isinstance(reply.stop, str) else "a token that is no end of the target's"
        raise BadReply(f"stopped at {kind}", printable(reply.stop, 40))

    def _given(self, reply: Reply) -> list[int]:
        if any(not 0 <= token < self.vocab_size for token in reply.token_ids):
            raise BadReply("token ids outside the target's vocabulary")
        return reply.token_ids

    def _encoded(self, reply: Reply, ended: bool) -> list[int]:
        """The text's tokens; those that stand for the end are not among them unless the text spells them."""
        text, count = reply.text, reply.completion_tokens
        if text is None:
            raise BadReply("a reply without text", again=True)
        if not text and not (ended and count == 1):
            raise BadReply("an empty answer", again=True)
        if printable(text) != text:  # half a surrogate pair, which no tokenizer takes
            raise BadReply("the text does not survive tokenising", printable(text, 80))
        ids = self.tokenizer.encode(text, add_special_tokens=False)
        if "\ufffd" in text or self.tokenizer.decode(ids, clean_up_tokenization_spaces=False) != text:
            raise BadReply("the text does not survive tokenising", text[:80])
        # The token that ends an answer may be counted though no text shows it: at the limit, too, where transformers
        # serve says "length".
        hidden = (0, 1) if ended or count == self.max_length else (0,)
        if count is not None and count - len(ids) not in hidden:
            raise BadReply("the text has another number of tokens", f"{len(ids)}, the server wrote {count}")
        return ids
