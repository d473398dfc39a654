"""The forms in which servers take a question, and the requests that are made of it."""

from __future__ import annotations

import json
from dataclasses import dataclass

from data.chat import ChatFormat, encode_prompt, render
from data.engines import Question, Sampling

IDS, TEXT, MESSAGES = "token ids", "text", "messages"
FULL, TRANSFORMERS = "all knobs", "a generation config"
TEMPLATE_ARGUMENTS, PLAIN_FIELDS = "the template's arguments", "plain fields"


@dataclass(frozen=True)
class Form:
    """How a server is asked.

    Attributes:
        prompt: `IDS`, `TEXT` or `MESSAGES`.
        fields: `FULL`, `TRANSFORMERS`, `TEMPLATE_ARGUMENTS` (of messages alone) or `PLAIN_FIELDS`.
        without_bos: the text's first token is left to the server, which adds it.
    """

    prompt: str
    fields: str
    without_bos: bool = False


@dataclass(frozen=True)
class Asking:
    """What requests to all endpoints are made of: the target's tokenizer, format, end tokens and sampling."""

    tokenizer: object
    chat_format: ChatFormat
    eos_ids: tuple[int, ...]
    sampling: Sampling

    def body(self, form: Form, question: Question, limit: int) -> dict:
        """The fields of a request for one question."""
        sampling, seed = self.sampling, self.sampling.seed_of(question.id)
        fields = {"max_tokens": limit, "temperature": sampling.temperature, "top_p": sampling.top_p, "seed": seed}
        if form.prompt == MESSAGES:
            fields["messages"] = question.messages
            fields |= {"tools": question.tools} if question.tools else {}
        else:
            fields["prompt"] = question.prompt_ids if form.prompt == IDS else self._text(question, form)
        if form.fields == FULL:
            fields |= {"top_k": sampling.top_k or -1, "min_p": sampling.min_p, "repetition_penalty": 1.0}
            fields |= {"stop_token_ids": list(self.eos_ids), "skip_special_tokens": False, "return_token_ids": True}
        elif form.fields == TRANSFORMERS:
            fields["generation_config"] = json.dumps(self._generation_config(limit))
        if form.prompt == MESSAGES and form.fields != PLAIN_FIELDS:
            fields["chat_template_kwargs"] = self.chat_format.template_arguments
        return fields

    def _text(self, question: Question, form: Form) -> str:
        text = render(self.tokenizer, question.messages, question.tools, self.chat_format, asks=True)
        return text.removeprefix(self.tokenizer.bos_token or "") if form.without_bos else text

    def _generation_config(self, limit: int) -> dict:
        sampling = self.sampling
        drawn = {"do_sample": True, "temperature": sampling.temperature, "top_p": sampling.top_p}
        drawn |= {"top_k": sampling.top_k, "min_p": sampling.min_p or None}
        pad = self.tokenizer.pad_token_id
        ends = {"eos_token_id": list(self.eos_ids), "pad_token_id": self.eos_ids[0] if pad is None else pad}
        return {"max_new_tokens": limit, **ends, **(drawn if sampling.temperature else {"do_sample": False})}

    def probe(self) -> Question:
        messages = [{"role": "user", "content": "How many legs has a spider?"}]
        return Question("probe", "", encode_prompt(self.tokenizer, messages, None, self.chat_format), messages)
