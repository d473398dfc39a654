"""Answered rows in memory-mapped Arrow: any number of them, of which Python holds none.

The columns are the fields of `AnswerRow`. Token ids are int32 lists, read as views of the mapped file; lengths come
from the lists' offsets. A worker that gets a copy (forked or pickled) maps the same file again.

Shape suffixes: R rows, K rows of the file.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields
from functools import cached_property

import numpy as np
from datasets import Dataset, Features, List, Value

from data.answers import AnswerRow

TOKENS = ("prompt_ids", "answer_ids")
_KINDS = {"str": Value("string"), "bool": Value("bool"), "list[int]": List(Value("int32"))}
FEATURES = Features({field.name: _KINDS[field.type] for field in fields(AnswerRow)})


class _Columns:
    """The table's chunks: token columns as numpy views, the others as Arrow arrays."""

    def __init__(self, dataset: Dataset):
        table = dataset.data
        self.names = [name for name in FEATURES if name in dataset.column_names]
        chunks = {name: table.column(name).chunks for name in self.names}
        self.plain = {name: chunks[name] for name in self.names if name not in TOKENS}
        self.offsets = {name: [chunk.offsets.to_numpy() for chunk in chunks[name]] for name in TOKENS}
        self.values = {name: [chunk.values.to_numpy() for chunk in chunks[name]] for name in TOKENS}
        self.starts = [0]
        for offsets in self.offsets[TOKENS[0]]:
            self.starts.append(self.starts[-1] + len(offsets) - 1)
        self.lengths = {
            name: np.concatenate([np.zeros(0, np.int32), *map(np.diff, self.offsets[name])]) for name in TOKENS
        }

    def tokens(self, name: str, chunk: int) -> np.ndarray:
        """All tokens of a chunk's rows, one after another."""
        offsets = self.offsets[name][chunk]
        return self.values[name][chunk][offsets[0] : offsets[-1]]


class Rows(Sequence[AnswerRow]):
    """Rows of an Arrow table in some order; a slice or a selection is a view of the same table.

    Args:
        dataset: a table with the columns of `FEATURES`, those with a default may be missing; mapped from a file, or a
            small one in memory.
        order_R: places of the rows in the table; None for all of them as they lie.
        digest: of `content_digest`, where it is known.
    """

    def __init__(self, dataset: Dataset, order_R: np.ndarray | None = None, digest: str | None = None):
        self._dataset, self._columns = dataset, _Columns(dataset)
        self._order_R, self._digest = order_R, digest

    @classmethod
    def of(cls, rows: Sequence[AnswerRow]) -> Rows:
        """A few rows, copied to a table in memory."""
        return cls(Dataset.from_dict({name: [getattr(row, name) for row in rows] for name in FEATURES}, FEATURES))

    def __getstate__(self) -> dict:
        return {"_dataset": self._dataset, "_order_R": self._order_R, "_digest": self._digest}

    def __setstate__(self, state: dict) -> None:
        self.__dict__ |= state
        self._columns = _Columns(self._dataset)

    def __len__(self) -> int:
        return self._columns.starts[-1] if self._order_R is None else len(self._order_R)

    def __getitem__(self, index):
        if isinstance(index, slice):
            return self.select(np.arange(len(self), dtype=np.int64)[index])
        columns, (chunk, row) = self._columns, self._place(index)
        found = {name: arrays[chunk][row].as_py() for name, arrays in columns.plain.items()}
        for name in TOKENS:
            start, end = columns.offsets[name][chunk][row : row + 2]
            found[name] = columns.values[name][chunk][start:end].tolist()
        return AnswerRow(**found)

    def _place(self, index: int) -> tuple[int, int]:
        if not -len(self) <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        place = range(len(self))[index] if self._order_R is None else int(self._order_R[index])
        chunk = bisect_right(self._columns.starts, place) - 1
        return chunk, place - self._columns.starts[chunk]

    def select(self, rows_R: np.ndarray) -> Rows:
        """A view of the rows at these places of this one."""
        view = object.__new__(Rows)
        view._dataset, view._columns, view._digest = self._dataset, self._columns, None
        smallest = np.int32 if self._columns.starts[-1] < 2**31 else np.int64
        view._order_R = np.asarray(rows_R if self._order_R is None else self._order_R[rows_R], smallest)
        return view

    def id_of(self, index: int) -> str:
        chunk, row = self._place(index)
        return self._columns.plain["id"][chunk][row].as_py()

    def ids(self) -> Iterator[str]:
        return map(self.id_of, range(len(self)))

    def find(self, row_id: str) -> int:
        """Place of the row with this id. Raises KeyError. The first call makes an index of 16 bytes a row."""
        hashes_R, rows_R = self._by_hash
        first = np.searchsorted(hashes_R, hash(row_id))
        for index in rows_R[first : np.searchsorted(hashes_R, hash(row_id), side="right")].tolist():
            if self.id_of(index) == row_id:
                return index
        raise KeyError(row_id)

    @cached_property
    def _by_hash(self) -> tuple[np.ndarray, np.ndarray]:
        hashes_R = np.frombuffer(array("q", map(hash, self.ids())), np.int64)
        rows_R = np.argsort(hashes_R, kind="stable")
        return hashes_R[rows_R], rows_R

    @cached_property
    def prompt_lengths(self) -> np.ndarray:
        """Tokens of each prompt, int32 [R]."""
        return self._lengths("prompt_ids")

    @cached_property
    def answer_lengths(self) -> np.ndarray:
        """Tokens of each answer, int32 [R]."""
        return self._lengths("answer_ids")

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each row, int32 [R]."""
        return self.prompt_lengths + self.answer_lengths

    def _lengths(self, name: str) -> np.ndarray:
        lengths_K = self._columns.lengths[name]
        return lengths_K if self._order_R is None else lengths_K[self._order_R]

    def token_counts(self, size: int) -> np.ndarray:
        """How often each token below `size` occurs in the answers, int64 [size]; a row in a view counts once."""
        counts_V = np.zeros(size, np.int64)
        for tokens in self._token_chunks("answer_ids"):
            counts_V += np.bincount(tokens, minlength=size)[:size]
        return counts_V

    @cached_property
    def largest_id(self) -> int:
        """The largest token id of prompts and answers, -1 without any."""
        found = (int(tokens.max()) for name in TOKENS for tokens in self._token_chunks(name) if len(tokens))
        return max(found, default=-1)

    def _token_chunks(self, name: str) -> Iterator[np.ndarray]:
        """The tokens of all rows, in pieces of the file's chunks and in its order."""
        starts, taken_K = self._columns.starts, None
        if self._order_R is not None:
            taken_K = np.zeros(starts[-1], bool)
            taken_K[self._order_R] = True
        for chunk in range(len(starts) - 1):
            tokens = self._columns.tokens(name, chunk)
            mine = slice(starts[chunk], starts[chunk + 1])
            if taken_K is not None and not taken_K[mine].all():
                tokens = tokens[np.repeat(taken_K[mine], self._columns.lengths[name][mine])]
            yield tokens

    @property
    def digest(self) -> str:
        """`content_digest` of the rows in their order."""
        if self._digest is None:
            self._digest = content_digest(self)
        return self._digest


def as_rows(rows: Sequence[AnswerRow]) -> Rows:
    """The rows as a table, made in memory where they come as a list."""
    return rows if isinstance(rows, Rows) else Rows.of(rows)


def content_digest(rows: Iterable[AnswerRow]) -> str:
    """sha256 over ids and tokens: what a training run depends on."""
    digest = hashlib.sha256()
    for row in rows:
        digest.update(json.dumps([row.id, row.prompt_ids, row.answer_ids]).encode())
    return digest.hexdigest()
