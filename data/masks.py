"""Conversations as tokens, with the spans that the model itself writes: what may be supervised, to the token.

A span ends with the token that closes an answer (`<|im_end|>`), not with the separator after it, and holds the
reasoning where the template writes it. Where the template marks what is generated (`{% generation %}`), the marks say
where spans lie. Otherwise an answer begins where the rendered prompt before it ends, so that prompts have to be what
the whole begins with. Either way the span must hold the recorded answer and decode to the rendered text; a template
that rewrites history (Qwen3 drops earlier reasoning) fails that, and the conversation comes back with the reason.

Whole conversations are rendered and tokenised, many at a time. A single answer after its prompt, which no rewriting
disturbs, is data/answer_tokens.py's.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from data.chat import PLAIN, ChatFormat, Message, TemplateRejected, encode_marked, render, text_of

_MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")
_PROBE = "Seventy-two"
NO_CLOSING = "the template closes an answer with no token at which the target stops"
_REASONING = ("reasoning_content", "thinking", "reasoning")  # the fields that transformers takes for one another


@dataclass(frozen=True)
class Masked:
    """A conversation in tokens.

    Attributes:
        ids: of the whole conversation, whatever the template writes after the last answer included.
        spans: (first token, token after the last) of each answer, in order. An assistant's message with tool calls is
            none: it was recorded, not asked of the target.
        reason: why the spans cannot be told; then both lists are empty.
    """

    ids: list[int] = field(default_factory=list)
    spans: list[tuple[int, int]] = field(default_factory=list)
    reason: str = ""

    @property
    def supervised(self) -> list[bool]:
        """For each token whether the model writes it."""
        mask = [False] * len(self.ids)
        for start, end in self.spans:
            mask[start:end] = [True] * (end - start)
        return mask


def closing_token(tokenizer, form: ChatFormat = PLAIN, eos_ids: Collection[int] = ()) -> int | None:
    """The token with which the model ends an answer, as the template writes it; None when it writes none.

    Args:
        eos_ids: tokens at which generation stops, where they are known; else any special token counts.
    """
    try:
        text = render(tokenizer, [message("user", "How many?"), message("assistant", _PROBE)], None, form)
    except TemplateRejected:
        return None
    after = text.rpartition(_PROBE)[2]
    if _PROBE not in text or not after:
        return None
    enders = set(eos_ids) or special_ids(tokenizer)
    for token in tokenizer(after, add_special_tokens=False)["input_ids"]:
        if token in enders:
            return token
        if tokenizer.decode([token]).strip():
            return None
    return None


def special_ids(tokenizer) -> set[int]:
    """Tokens that no text spells unless it names them."""
    added = tokenizer.added_tokens_decoder.items()
    return {index for index, token in added if token.special} | set(tokenizer.all_special_ids)


def mask_conversations(
    tokenizer,
    conversations: Sequence[list[Message]],
    form: ChatFormat = PLAIN,
    tools: Sequence[list[dict] | None] | None = None,
    eos_ids: Collection[int] = (),
) -> list[Masked]:
    """Tokens and spans of whole conversations, in their order; what cannot be told has a reason, and nothing raises.

    The tokenizer works on all of them at once: give some hundreds at a time.

    Args:
        tools: the functions offered in each conversation.
        eos_ids: as in `closing_token`.

    Raises ValueError for a tokenizer without a chat template, or one that cannot say which characters a token spells.
    """
    _require_offsets(tokenizer)
    closing = closing_token(tokenizer, form, eos_ids)
    marks = _has_marks(tokenizer)
    drafts: list[_Draft] = []
    for index, messages in enumerate(conversations):
        given = tools[index] if tools else None
        drafts.append((_marked if marks else _rendered)(tokenizer, messages, given, form))
    plain = [draft for draft in drafts if not draft.reason and draft.encoding is None]
    for draft, encoding in zip(plain, _encode(tokenizer, [draft.text for draft in plain]), strict=True):
        draft.encoding = encoding
    for draft in drafts:
        if not draft.reason:
            draft.find_spans(closing)
    _verify(tokenizer, drafts)
    return [Masked(reason=d.reason) if d.reason else Masked(d.encoding.ids, d.spans) for d in drafts]


@dataclass
class _Draft:
    """A conversation on its way: `starts` are characters where answers begin, `runs` the tokens that marks cover."""

    answers: list[Message] = field(default_factory=list)
    text: str = ""
    starts: list[int | None] = field(default_factory=list)
    runs: list[tuple[int, int]] | None = None
    encoding: object = None
    spans: list[tuple[int, int]] = field(default_factory=list)
    reason: str = ""

    def find_spans(self, closing: int | None) -> None:
        """Fills `spans`, or says why not."""
        ids = self.encoding.ids
        for number, start in enumerate(self.starts, 1):
            first = None if start is None else _token_at(self.encoding, start, len(self.text))
            if self.runs is not None:
                begin, end = self.runs[number - 1]
                # Marks may cover the header too, which the prompt holds: the answer begins behind it.
                first = max(begin, first) if first is not None and first < end else begin
            elif first is None:
                self.reason = f"a token joins answer {number} with what stands before it"
                return
            else:
                end = len(ids)
            try:
                last = ids.index(closing, first, end)
            except ValueError:
                self.reason = f"answer {number} has no closing token" if closing is not None else NO_CLOSING
                return
            self.spans.append((first, last + 1))

    def written(self, number: int) -> str:
        """The rendered text of a span but for its closing token."""
        first, last = self.spans[number][0], self.spans[number][1] - 1
        return self.text[self.encoding.token_to_chars(first)[0] : self.encoding.token_to_chars(last)[0]]


def _rendered(tokenizer, messages: list[Message], tools: list[dict] | None, form: ChatFormat) -> _Draft:
    """A conversation without marks: the prompt before each answer must be how the whole text begins."""
    places = _answers(messages)
    if not places:
        return _Draft(reason="no answer of the assistant")
    try:
        draft = _Draft([messages[i] for i in places], render(tokenizer, messages, tools, form))
        for number, place in enumerate(places, 1):
            prompt = render(tokenizer, messages[:place], tools, form, asks=True)
            if not draft.text.startswith(prompt):
                draft.reason = f"the template rewrites what stands before answer {number}"
                break
            draft.starts.append(len(prompt))
    except TemplateRejected as error:
        return _Draft(reason=str(error))
    return draft


def _marked(tokenizer, messages: list[Message], tools: list[dict] | None, form: ChatFormat) -> _Draft:
    """A conversation whose template marks what is generated: a run of marked tokens for each assistant's message."""
    places = _answers(messages)
    if not places:
        return _Draft(reason="no answer of the assistant")
    try:
        batch = encode_marked(tokenizer, messages, tools, form)
        draft = _Draft([messages[i] for i in places], render(tokenizer, messages, tools, form))
    except TemplateRejected as error:
        return _Draft(reason=str(error))
    draft.encoding, runs = batch.encodings[0], _runs(batch["assistant_masks"])
    written = [i for i, message in enumerate(messages) if message.get("role") == "assistant"]
    if len(runs) != len(written):
        draft.reason = f"the template marks {len(runs)} answers of {len(written)}"
        return draft
    draft.runs = [run for run, place in zip(runs, written, strict=True) if place in places]
    for place in places:
        try:
            prompt = render(tokenizer, messages[:place], tools, form, asks=True)
        except TemplateRejected:
            prompt = None
        draft.starts.append(len(prompt) if prompt is not None and draft.text.startswith(prompt) else None)
    return draft


def _answers(messages: list[Message]) -> list[int]:
    """Places of the messages that the target is asked for."""
    return [i for i, m in enumerate(messages) if i and m.get("role") == "assistant" and not m.get("tool_calls")]


def _runs(mask: Sequence[int]) -> list[tuple[int, int]]:
    """(First, after the last) of each stretch of ones."""
    runs, start = [], None
    for place, on in enumerate([*mask, 0]):
        if on and start is None:
            start = place
        elif not on and start is not None:
            runs.append((start, place))
            start = None
    return runs


def _token_at(encoding, place: int, length: int) -> int | None:
    """The token that begins at a character; None when one lies across it. Some tokenizers leave spaces out of their
    tokens' places: a token of nothing else is found by its end, walking back from the next one."""
    for character in range(place, length):
        token = encoding.char_to_token(character)
        if token is not None:
            while token and encoding.token_to_chars(token - 1)[1] > place:
                token -= 1
            return token if encoding.token_to_chars(token)[0] >= place else None
    return None


def _verify(tokenizer, drafts: Sequence[_Draft]) -> None:
    """Every span must hold its recorded answer and decode to the text that was rendered."""
    checked = [(d, number) for d in drafts if not d.reason for number in range(len(d.spans))]
    tokens = [d.encoding.ids[d.spans[n][0] : d.spans[n][1] - 1] for d, n in checked]
    # transformers' own looks at the type of every token first, which costs a quarter of the whole.
    decoded = tokenizer.backend_tokenizer.decode_batch(tokens, skip_special_tokens=False)
    for (draft, number), text in zip(checked, decoded, strict=True):
        if draft.reason:
            continue
        written = draft.written(number)
        if not _holds(written, draft.answers[number]):
            draft.reason = f"the template rewrites answer {number + 1}"
        elif not same_text(text, written):
            draft.reason = f"the tokens of answer {number + 1} decode to another text"


def _holds(written: str, message: Message) -> bool:
    """Whether a span's text is the recorded answer, white space around it aside, after its reasoning if it has one."""
    content = text_of(message.get("content")).strip()
    reasoning = next((message[name] for name in _REASONING if message.get(name)), None)
    if not content and not reasoning:
        return False
    if reasoning is None:
        return written.strip() == content
    head, found, _ = written.partition(reasoning.strip())
    return bool(found) and written.rstrip().endswith(content) and len(head) < len(written) - len(content)


def same_text(decoded: str, text: str) -> bool:
    """Equal but for a leading space, which some tokenizers drop, and for how accents are composed (Qwen's composes)."""
    if decoded == text or decoded.lstrip(" ") == text.lstrip(" "):
        return True
    return unicodedata.normalize("NFC", decoded).lstrip(" ") == unicodedata.normalize("NFC", text).lstrip(" ")


def _has_marks(tokenizer) -> bool:
    template = tokenizer.chat_template
    return isinstance(template, str) and _MARKS.search(template) is not None


def _encode(tokenizer, texts: list[str]) -> list:
    if not texts:
        return []
    options = {"return_attention_mask": False, "return_token_type_ids": False}
    return tokenizer(texts, add_special_tokens=False, **options).encodings


def _require_offsets(tokenizer) -> None:
    if not getattr(tokenizer, "is_fast", False):
        raise ValueError(
            f"target: the tokenizer of {tokenizer.name_or_path or 'the target'} does not say which characters a token "
            "spells; answers can only be masked with a fast tokenizer (tokenizer.json)"
        )


def message(role: str, content: str) -> Message:
    return {"role": role, "content": content}
