"""The kept prompts on disk: RUN/prompts/prompts.arrow, a memory-mapped Arrow file, and manifest.json about them.

The manifest is written last and removed first: without it there is no store. Turns, tools and the data set's own
answers stand as JSON text, so that tool calls come back as they were.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import overload

import numpy as np
import pyarrow

from data.answers import read_manifest
from data.prompt import Prompt
from data.prompts import Kept

PROMPTS, SKIPPED = "prompts.arrow", "skipped.jsonl"
NEEDED = ("turns", "counts", "fingerprint")  # of a manifest, to read the prompts
SCHEMA = pyarrow.schema(
    {
        "id": pyarrow.string(),
        "turns": pyarrow.string(),
        "domain": pyarrow.string(),
        "tools": pyarrow.string(),
        "answers": pyarrow.string(),
        "source": pyarrow.string(),
        "language": pyarrow.string(),
        "turn_count": pyarrow.int32(),
    }
)
_BATCH_ROWS, _BATCH_BYTES = 1000, 16 << 20


class Prepared(Sequence[Prompt]):
    """The prompts of RUN/prompts, read from disk when they are asked for.

    Attributes:
        turns: turns of all prompts together: what there is to answer.
        counts: {"read", "kept", "skipped": {reason: rows}}; read == kept + the sum of skipped.
        fingerprint: of the sources, columns, filters and seed, whatever num_prompts is: a store with more prompts of
            the same fingerprint begins with the prompts of a smaller one.
        manifest: all that is known of the store.
    """

    def __init__(self, folder: str):
        """Raises ValueError, naming the command to run, where there is no finished store or a damaged one."""
        self.folder = folder
        self.manifest = read_manifest(folder, *NEEDED)
        path = Path(folder, PROMPTS)
        if not self.manifest or not path.is_file():
            raise ValueError(f"there are no prepared prompts in {folder}; run: bash launch.sh prepare CONFIG")
        self.turns: int = self.manifest["turns"]
        self.counts: dict = self.manifest["counts"]
        self.fingerprint: str = self.manifest["fingerprint"]
        try:
            file = pyarrow.ipc.open_file(pyarrow.memory_map(str(path)))
            self._batches = [file.get_batch(n) for n in range(file.num_record_batches)]
        except (OSError, pyarrow.ArrowInvalid) as error:
            raise ValueError(
                f"{path} is damaged ({error}): delete it and run: bash launch.sh prepare CONFIG"
            ) from error
        self._ends = np.cumsum([batch.num_rows for batch in self._batches])

    def __len__(self) -> int:
        return int(self._ends[-1]) if self._batches else 0

    @overload
    def __getitem__(self, index: int) -> Prompt: ...
    @overload
    def __getitem__(self, index: slice) -> list[Prompt]: ...
    def __getitem__(self, index):
        if isinstance(index, slice):
            return [self[n] for n in range(*index.indices(len(self)))]
        place = index + len(self) if index < 0 else index
        if not 0 <= place < len(self):
            raise IndexError(f"prompt {index} of {len(self)}")
        number = int(np.searchsorted(self._ends, place, side="right"))
        batch = self._batches[number]
        return next(_prompts(batch.slice(place - int(self._ends[number]) + batch.num_rows, 1)))

    def __iter__(self) -> Iterator[Prompt]:
        for batch in self._batches:
            yield from _prompts(batch)

    @cached_property
    def turn_counts(self) -> np.ndarray:
        """Turns of each prompt: int32 [prompts]."""
        return self.column("turn_count").to_numpy()

    def column(self, name: str) -> pyarrow.ChunkedArray:
        """A column of all prompts without the others: id, domain, source, language ("" where none was detected)."""
        return pyarrow.chunked_array([batch.column(name) for batch in self._batches], SCHEMA.field(name).type)


def _prompts(batch: pyarrow.RecordBatch) -> Iterator[Prompt]:
    for row in batch.to_pylist():
        tools, answers = (None if row[name] is None else json.loads(row[name]) for name in ("tools", "answers"))
        yield Prompt(row["id"], json.loads(row["turns"]), row["domain"], tools, answers)


class Writer:
    """Writes prompts into a file that `Prepared` reads. Attributes: turns, domains, languages, sources: counts."""

    def __init__(self, path: str):
        self._sink = open(path, "wb")
        self._file = pyarrow.ipc.new_file(self._sink, SCHEMA)
        self._rows: list[dict] = []
        self._bytes = self.turns = 0
        self.domains, self.languages, self.sources = Counter(), Counter(), Counter()
        self._content = hashlib.sha256()

    def add(self, kept: Kept) -> None:
        prompt = kept.prompt
        turns = json.dumps(prompt.turns, ensure_ascii=False)
        tools, answers = (
            None if value is None else json.dumps(value, ensure_ascii=False) for value in (prompt.tools, prompt.answers)
        )
        row = (prompt.id, turns, prompt.domain, tools, answers, kept.source, kept.language, len(prompt.turns))
        self._rows.append(dict(zip(SCHEMA.names, row, strict=True)))
        self._content.update(f"{prompt.id}\0{turns}\0{tools}\0".encode())
        self._bytes += len(turns) + len(tools or "") + len(answers or "")
        self.turns += len(prompt.turns)
        self.domains[prompt.domain] += 1
        self.languages[kept.language] += 1
        self.sources[kept.source] += 1
        if len(self._rows) >= _BATCH_ROWS or self._bytes >= _BATCH_BYTES:
            self._flush()

    def _flush(self) -> None:
        self._file.write_batch(pyarrow.RecordBatch.from_pylist(self._rows, SCHEMA))
        self._rows, self._bytes = [], 0

    def close(self) -> str:
        """Waits until all is on disk. Returns a hash of the prompts."""
        if self._rows:
            self._flush()
        self._file.close()
        self._sink.flush()
        os.fsync(self._sink.fileno())
        self._sink.close()
        return self._content.hexdigest()[:16]
