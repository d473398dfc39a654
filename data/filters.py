"""What a usable prompt must also be to be kept: of some length, in some language, new, and none that evaluation asks.

All filters but the one for exact duplicates are off by default. Duplicates are sought among all kept prompts of all
sources; what a filter refuses is not kept, and so nothing is a duplicate of it.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache

from data.chat import messages_of, turn_text
from data.contamination import Contamination
from data.near_duplicates import NearDuplicates
from data.prompt import Prompt, Unusable, told_apart
from data.words import Seen, hash_of, normalised

UNKNOWN = "und"  # the language of texts that do not say (ISO 639-2: undetermined)
_ENOUGH = 2000  # characters that tell a language
_SURE = 0.5  # probability under which the language is unknown


@dataclass
class Filters:
    """The filters of one pass over the prompts, with what they have seen so far.

    Attributes:
        shortest, longest: limits of all turns' characters together; 0 for none.
        languages: codes (ISO 639-1, or `und` for undetermined) of what is kept; empty keeps all and detects none.
        duplicates: whether exact duplicates are left out: the same turns and tools but for case and white space.
        near: None, or the index of near duplicates.
        contamination: None, or the index of evaluation prompts; `contaminated` counts by benchmark (a prompt may hold
            prompts of several).
    """

    shortest: int = 0
    longest: int = 0
    languages: tuple[str, ...] = ()
    duplicates: bool = True
    near: NearDuplicates | None = None
    contamination: Contamination | None = None
    contaminated: Counter = field(default_factory=Counter)

    def __post_init__(self):
        self._ids, self._texts = Seen(), Seen()
        self._identify = language_identifier(self.languages) if self.languages else None

    def keep(self, prompt: Prompt) -> tuple[Prompt, str]:
        """The prompt, from now on counted as kept, and its language ("" where none is detected).

        Its id is another one when a different prompt has it already. Raises Unusable with the reason to leave it out.
        """
        texts = ["\n".join(m["content"] for m in messages_of([turn], [])) for turn in prompt.turns]
        self._check_length(sum(map(len, texts)))
        language = self._language(prompt)
        other_id = told_apart(prompt)
        content, own, other = hash_of(_identity(prompt)), hash_of(prompt.id), hash_of(other_id)
        # A repeated prompt, id and all, can only be the same one, whether or not other duplicates are kept.
        if other in self._ids or self.duplicates and content in self._texts:
            raise Unusable("a duplicate", prompt.id)
        if self.contamination is not None and (names := self.contamination.found_in(texts)):
            self.contaminated.update(names)
            raise Unusable("asked by evaluation", " ".join(names))
        if self.near is not None:
            keys = self.near.keys("\n".join(texts))
            if self.near.has(keys):
                raise Unusable("a near duplicate", prompt.id)
            self.near.add(keys)
        if self.duplicates:
            self._texts.add(content)
        # Two files that both count their rows from 0 hold different prompts of one id.
        kept = replace(prompt, id=other_id) if own in self._ids else prompt
        self._ids.add(own, other)
        return kept, language

    def _check_length(self, length: int) -> None:
        if length < self.shortest:
            raise Unusable("too short", f"{length} characters, min_prompt_characters is {self.shortest}")
        if self.longest and length > self.longest:
            raise Unusable("too long", f"{length} characters, max_prompt_characters is {self.longest}")

    def _language(self, prompt: Prompt) -> str:
        if self._identify is None:
            return ""
        language = self._identify("\n".join(map(turn_text, prompt.turns)))
        if language not in self.languages:
            raise Unusable("another language", language)
        return language


def language_identifier(languages: tuple[str, ...] = ()) -> Callable[[str], str]:
    """A function from text to its language's code, or `und`, by py3langid.

    Raises ValueError when `languages` holds a code that it does not know.
    """
    identifier = _identifier()
    known = {str(label) for label in identifier.labels}
    for language in languages:
        if language not in known | {UNKNOWN}:
            raise ValueError(f"languages: {language!r} is unknown: choose from {' '.join(sorted(known))} {UNKNOWN}")
    return lambda text: identifier.classify(text[:_ENOUGH])[0]


@cache
def _identifier():
    from py3langid.langid import MODEL_FILE, LanguageIdentifier  # imported late: its model takes a second to load

    return LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True, min_confidence=_SURE)


def _identity(prompt: Prompt) -> str:
    """What exact duplicates share: roles and texts of all turns, tool calls and tools."""
    parts = ["" if prompt.tools is None else json.dumps(prompt.tools, sort_keys=True)]
    for turn in prompt.turns:
        parts.append("\x00turn")
        for message in messages_of([turn], []):
            calls = json.dumps(message["tool_calls"], sort_keys=True) if "tool_calls" in message else ""
            parts.append(f"{message['role']}\x00{normalised(message['content'])}\x00{calls}")
    return "\x01".join(parts)
