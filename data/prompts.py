"""Prompts in the order in which a run asks them: sources read in turn, each usable row a `Prompt`, the others counted.

One pass (`Reading`) serves the stage `prepare`, which writes millions to disk, and evaluation, which takes a few.
"""

from __future__ import annotations

import itertools
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from data.chat import turn_text
from data.conversations import BY_CONVENTION, NO_COLUMN, Columns, prompt_of
from data.filters import Filters
from data.local_files import Row
from data.prompt import Prompt, Unusable
from data.sources import Source, open_source, shuffled

# Rows without a known column at the beginning of a source, after which the options are wrong and not the rows.
_ENOUGH_UNKNOWN = 100
_ENOUGH_UNNAMED = 1000
_EXCERPT = 200  # characters of a skipped row that are kept


@dataclass(frozen=True)
class Kept:
    """A prompt with the name of its source, and its language ("" where none was detected)."""

    prompt: Prompt
    source: str
    language: str


@dataclass(frozen=True)
class Skipped:
    """A row that is not kept. Attributes: where: its place in the source; id: "" without one; text: its beginning."""

    source: str
    where: str
    id: str
    reason: str
    detail: str
    text: str


class Reading:
    """One pass over sources, in turn: each gives its next prompt that is kept; one that has ended leaves the others.

    The order is the same however far it is read, so that a longer run continues a shorter one.

    Args:
        on_skip: gets every row that is not kept.
        buffer: size of the shuffle buffer of each source; 0 keeps its order.

    Attributes:
        read, kept, skipped: rows so far; read == kept + the sum of skipped, which counts by reason.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        columns: Columns = BY_CONVENTION,
        filters: Filters | None = None,
        on_skip: Callable[[Skipped], None] = lambda skipped: None,
        buffer: int = 0,
        seed: int = 0,
    ):
        self.sources, self.columns, self.filters = sources, columns, filters or Filters()
        self.on_skip, self.buffer, self.seed = on_skip, buffer, seed
        self.read, self.kept, self.skipped = 0, 0, Counter()
        self._unnamed = {f"{kind}_column": getattr(columns, kind) for kind in ("messages", "prompt")}
        self._unnamed = {option: name for option, name in self._unnamed.items() if name}

    def __iter__(self) -> Iterator[Kept]:
        streams = [self._kept_of(source) for source in self.sources]
        while streams:
            ended = []
            for stream in streams:
                kept = next(stream, None)
                if kept is None:
                    ended.append(stream)
                    continue
                self.kept += 1
                yield kept
            streams = [stream for stream in streams if stream not in ended]
        self._refuse_unnamed()

    def _kept_of(self, source: Source) -> Iterator[Kept]:
        unknown = number = 0
        detail = ""
        for where, row in shuffled(source.rows(), self.buffer, f"{self.seed} {source.domain}"):
            self.read, number = self.read + 1, number + 1
            self._look_for_named(row)
            try:
                prompt, language = self.filters.keep(prompt_of(row, source.domain, self.columns))
            except Unusable as error:
                self._skip(source, where, row, error)
                if error.reason == NO_COLUMN:
                    unknown, detail = unknown + 1, error.detail
                    if unknown == number == _ENOUGH_UNKNOWN:
                        break
                continue
            yield Kept(prompt, source.name, language)
        if unknown and unknown == number:
            self._refuse_unnamed()
            raise ValueError(
                f"prompts: no column of {source.name} is known to hold a conversation (it has {detail}): name one with "
                "--messages_column or --prompt_column"
            )

    def _skip(self, source: Source, where: str, row: object, error: Unusable) -> None:
        self.skipped[error.reason] += 1
        given = row.id if isinstance(row, Prompt) else row.get("id") if isinstance(row, dict) else None
        text = "" if isinstance(row, Unusable) else _excerpt(row)
        shown = "" if given is None else str(given)[:_EXCERPT]
        self.on_skip(Skipped(source.name, where, shown, error.reason, error.detail[:_EXCERPT], text))

    def _look_for_named(self, row: object) -> None:
        """A named column that no row has is a mistake in the option; some rows may go without."""
        if not self._unnamed or not isinstance(row, dict):
            return
        self._unnamed = {option: name for option, name in self._unnamed.items() if name not in row}
        if self.read >= _ENOUGH_UNNAMED:
            self._refuse_unnamed()

    def _refuse_unnamed(self) -> None:
        for option, name in self._unnamed.items():
            if self.read:
                raise ValueError(f"{option}: no row of {' '.join(s.name for s in self.sources)} has a column {name!r}")


def _excerpt(row: object) -> str:
    """The first texts in a row."""
    if isinstance(row, Prompt):
        return turn_text(row.turns[0])[:_EXCERPT]
    text, rest = "", [row]
    while rest and len(text) < _EXCERPT:
        value = rest.pop()
        if isinstance(value, str):
            text += f"{' ' if text else ''}{value[:_EXCERPT]}"
        elif isinstance(value, dict | list):
            rest.extend(reversed(list(value.values() if isinstance(value, dict) else value)))
    return text[:_EXCERPT]


def load_prompts(source: str, count: int | None, seed: int = 0, split: str = "train") -> list[Prompt]:
    """At most `count` prompts of a source, in memory; None takes all of a file or data set.

    Args:
        source: "builtin", files, or a Hub id (data/sources.py).
        seed: seed of the generator; files and data sets keep their own order.
        split: "train" or "eval": the generator's templates and numbers, or the split of a Hub id that names none.

    Rows that cannot be used are skipped, counted and named in a warning. Raises ValueError when none is left.
    """
    return _first([open_source(source, split, seed)], count)


def load_mixture(
    sources: Sequence[str], count: int, seed: int = 0, split: str = "train", columns: Columns = BY_CONVENTION
) -> list[Prompt]:
    """The first `count` prompts of several sources in turn, in memory and without filters; see `load_prompts`."""
    return _first([open_source(source, split, seed) for source in sources], count, columns)


def usable_prompts(source: str, default_domain: str, rows: Iterable[Row], count: int | None = None) -> list[Prompt]:
    """The first `count` usable prompts of (where, row) pairs; see `load_prompts` for what happens to the others."""
    return _first([Source(source, default_domain, lambda: iter(rows))], count)


def _first(sources: Sequence[Source], count: int | None, columns: Columns = BY_CONVENTION) -> list[Prompt]:
    named: list[str] = []

    def name(skipped: Skipped) -> None:
        if len(named) < 5:
            detail = f" ({skipped.detail})" if skipped.detail else ""
            named.append(f"{skipped.where}: {skipped.reason}{detail}")

    reading = Reading(sources, columns, Filters(duplicates=False), name)
    prompts = [kept.prompt for kept in itertools.islice(reading, count)]
    source, skipped = " ".join(source.name for source in sources), reading.skipped.total()
    if skipped:
        more = f" and {skipped - len(named)} more" if skipped > len(named) else ""
        warnings.warn(f"{source}: {skipped} rows skipped: {'; '.join(named)}{more}", stacklevel=3)
    if not prompts:
        raise ValueError(f"prompts: {source} holds no usable row ({skipped} skipped)")
    return prompts
