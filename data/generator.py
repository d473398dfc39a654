"""The project's own prompts: grade-school word problems, small Python tasks and everyday chat, in turn.

The first n prompts of a seed are the same for every n. Evaluation prompts use templates, numbers, tasks and topics that
training never sees.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator

from data.prompt import Prompt, content_id
from data.templates import CODE_FRAMES, CODE_TASKS, MATHS, MATHS_ENDINGS, NUMBERS, WORDS
from data.topics import CHAT, ENDINGS

DOMAINS = ("maths", "code", "chat")
SPLITS = ("train", "eval")
_BLANK = re.compile(r"{([a-z]+)(\d?)}")


def generated_prompts(seed: int, split: str) -> Iterator[Prompt]:
    """Distinct prompts, domains in turn. Raises ValueError when the templates cannot give another one."""
    rng = random.Random(f"{split}-{seed}")
    seen: set[str] = set()
    while True:
        domain = DOMAINS[len(seen) % len(DOMAINS)]
        text = _new_text(domain, rng, split, seen)
        if text is None:
            raise ValueError(
                f"prompts: the generator (builtin) has only {len(seen)} distinct {split} prompts: ask for fewer, or "
                "give other sources"
            )
        yield Prompt(content_id([text]), [text], domain)


def _new_text(domain: str, rng: random.Random, split: str, seen: set[str]) -> str | None:
    for _ in range(2000):
        text = _WRITERS[domain](rng, split)
        if text not in seen:
            seen.add(text)
            return text
    return None


def _maths(rng: random.Random, split: str) -> str:
    return f"{_fill(rng.choice(MATHS[split]), rng, split)} {rng.choice(MATHS_ENDINGS[split])}"


def _code(rng: random.Random, split: str) -> str:
    return rng.choice(CODE_FRAMES[split]).replace("{task}", _fill(rng.choice(CODE_TASKS[split]), rng, split))


def _chat(rng: random.Random, split: str) -> str:
    kind = rng.choices(CHAT, weights=[len(k.topics) for k in CHAT])[0]
    topics = [t for i, t in enumerate(kind.topics) if (i % 6 == 5) == (split == "eval")]
    request = rng.choice(getattr(kind, split)).replace("{topic}", rng.choice(topics))
    return f"{request} {rng.choice(ENDINGS[split])}" if rng.random() < 0.5 else request


_WRITERS = {"maths": _maths, "code": _code, "chat": _chat}


def _fill(template: str, rng: random.Random, split: str) -> str:
    """Fills the blanks; the same blank gets the same value, two blanks of one pool get different ones."""
    values: dict[str, str] = {}

    def value(match: re.Match) -> str:
        key, pool = match.group(0), match.group(1)
        if key not in values:
            choices = numbers(pool, split) if pool in NUMBERS else WORDS[pool]
            values[key] = str(rng.choice([c for c in choices if str(c) not in values.values()]))
        return values[key]

    return _BLANK.sub(value, template)


def numbers(pool: str, split: str) -> list[int]:
    """The numbers of a pool: those that leave 3 when divided by 5 belong to evaluation, all others to training."""
    low, high = NUMBERS[pool]
    return [n for n in range(low, high + 1) if (n % 5 == 3) == (split == "eval")]
