"""Prompts: the project's own generator, a JSONL file of {"turns": [...]}, or a datasets id.

The generator writes grade-school word problems, small Python tasks and everyday chat in equal parts. The first n
prompts of a seed are the same for every count, so that a longer run continues a shorter one. Evaluation prompts use
templates, numbers, tasks and topics that training never sees.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import random
import re
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from data.chat import Turn
from data.templates import CODE_FRAMES, CODE_TASKS, MATHS, MATHS_ENDINGS, NUMBERS, WORDS
from data.topics import CHAT, ENDINGS

DOMAINS = ("maths", "code", "chat")
SPLITS = ("train", "eval")
_BLANK = re.compile(r"{([a-z]+)(\d?)}")
_USER_ROLES = {"user": True, "human": True, "assistant": False, "gpt": False, "system": False}


@dataclass(frozen=True)
class Prompt:
    """What the target is asked.

    Attributes:
        id: unique in a prompt set and stable over runs (a hash of the turns unless the source names one).
        turns: what stands before each answer that the target writes, in order; none is empty (`data.chat.Turn`).
        domain: maths, code or chat for built-in prompts, else what the source says or the file's name.
        tools: definitions of the functions that the target may call, as chat templates take them.
        answers: the data set's own answers, one a turn, where it holds them.
    """

    id: str
    turns: list[Turn]
    domain: str
    tools: list[dict] | None = None
    answers: list[str] | None = None


def load_prompts(source: str, count: int | None, seed: int = 0, split: str = "train") -> list[Prompt]:
    """At most `count` prompts of a source; None takes all of a file or data set.

    Args:
        source: "builtin", the path of a JSONL file whose rows hold "turns" (a list of strings; optional "id" and
            "domain"), or a datasets id whose rows hold "turns", "messages" or "conversations".
        seed: seed of the generator; files and data sets keep their own order.
        split: "train" or "eval": the generator's templates and numbers, or the split of a datasets id (evaluation takes
            "test"). A JSONL file has one split.

    Rows that cannot be used are skipped, counted and named in a warning. Raises ValueError when none is left.
    """
    if split not in SPLITS:
        raise ValueError(f"split must be one of {', '.join(SPLITS)}, got {split!r}")
    if source == "builtin":
        return generate_prompts(count, seed, split)
    if os.path.isfile(source):
        name = os.path.splitext(os.path.basename(source))[0]
        return usable_prompts(source, name, _read_jsonl(source), count)
    if source.endswith((".jsonl", ".json")) or source.startswith((".", "/", "~")):
        raise ValueError(f"prompts: no such file: {source}")
    return usable_prompts(source, source.rsplit("/", 1)[-1], _read_dataset(source, split), count)


def load_mixture(sources: Sequence[str], count: int, seed: int = 0, split: str = "train") -> list[Prompt]:
    """At most `count` prompts from several sources, in equal parts and in turn; see `load_prompts`.

    The order is the same for every count, so that a longer run continues a shorter one; ids repeated by a later source
    are left out.
    """
    share = -(-count // len(sources))
    parts = [load_prompts(source, share, seed, split) for source in sources]
    prompts: dict[str, Prompt] = {}
    for in_turn in itertools.zip_longest(*parts):
        for prompt in in_turn:
            if prompt is not None:
                prompts.setdefault(prompt.id, prompt)
    return list(prompts.values())[:count]


def generate_prompts(count: int, seed: int, split: str) -> list[Prompt]:
    """`count` distinct prompts, domains in turn. Raises ValueError when the templates cannot give that many."""
    rng = random.Random(f"{split}-{seed}")
    seen: set[str] = set()
    prompts = []
    for index in range(count):
        domain = DOMAINS[index % len(DOMAINS)]
        text = _new_text(domain, rng, split, seen)
        if text is None:
            raise ValueError(f"the generator has only {index} distinct {split} prompts, num_prompts asks for {count}")
        prompts.append(Prompt(_content_id([text]), [text], domain))
    return prompts


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


def _content_id(turns: list[str]) -> str:
    return hashlib.sha256(json.dumps(turns).encode()).hexdigest()[:16]


def _read_jsonl(path: str) -> Iterator[tuple[str, object]]:
    """(where, parsed row) for each line that is not blank; a line that is not JSON comes as its own error."""
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                try:
                    yield f"line {number}", json.loads(line)
                except json.JSONDecodeError as error:
                    yield f"line {number}", ValueError(f"not JSON ({error.msg})")


def _read_dataset(name: str, split: str) -> Iterator[tuple[str, object]]:
    from datasets import load_dataset  # imported late: the built-in prompts do not need it

    wanted = "train" if split == "train" else "test"
    try:
        rows = load_dataset(name, split=wanted, streaming=True)
    except Exception as error:  # the library raises its own types for network, names and splits alike
        reason = " ".join(str(error).split())
        raise ValueError(f"prompts: {name!r} is no file and no data set with a split {wanted!r}: {reason}") from error
    for number, row in enumerate(rows):
        yield f"row {number}", row


def usable_prompts(
    source: str, default_domain: str, rows: Iterable[tuple[str, object]], count: int | None = None
) -> list[Prompt]:
    """The first `count` usable prompts of (where, row) pairs; see `load_prompts` for what happens to the others."""
    prompts: dict[str, Prompt] = {}
    skipped: list[str] = []
    for where, row in rows:
        try:
            prompt = _prompt_of(row, default_domain)
            if prompt.id in prompts:
                raise ValueError(f"repeats {prompt.id}")
        except ValueError as error:
            skipped.append(f"{where}: {error}")
            continue
        prompts[prompt.id] = prompt
        if len(prompts) == count:
            break
    if skipped:
        more = f" and {len(skipped) - 5} more" if len(skipped) > 5 else ""
        warnings.warn(f"{source}: {len(skipped)} rows skipped: {'; '.join(skipped[:5])}{more}", stacklevel=3)
    if not prompts:
        raise ValueError(f"prompts: {source} holds no usable row ({len(skipped)} skipped)")
    return list(prompts.values())


def _prompt_of(row: object, default_domain: str) -> Prompt:
    """Raises ValueError with the reason why a row cannot be used."""
    if isinstance(row, ValueError):
        raise row
    if not isinstance(row, dict):
        raise ValueError("not an object")
    turns = _turns_of(row)
    if not isinstance(turns, list) or not turns:
        raise ValueError("no turns")
    if any(not isinstance(turn, str) for turn in turns):
        raise ValueError("a turn is not text")
    if any(not turn.strip() for turn in turns):
        raise ValueError("an empty turn")
    given = row.get("id")
    return Prompt(_content_id(turns) if given is None else str(given), turns, str(row.get("domain") or default_domain))


def _turns_of(row: dict) -> object:
    for key, role_key, text_key in (("messages", "role", "content"), ("conversations", "from", "value")):
        messages = row.get(key)
        if "turns" in row or not isinstance(messages, list):
            continue
        if any(not isinstance(m, dict) or m.get(role_key) not in _USER_ROLES for m in messages):
            raise ValueError("a message whose role is not user, assistant or system")
        return [m.get(text_key) for m in messages if _USER_ROLES[m[role_key]]]
    return row.get("turns")
