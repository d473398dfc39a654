"""The Arrow file behind `data.rows`: made once from answers of any number, and found again by their content.

Rows are read one by one and written in pieces, so that no more than a piece of them is in memory; only their ids are
held while the file is made. Of several rows with one id the first counts.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from datasets import Dataset
from datasets.arrow_writer import ArrowWriter
from huggingface_hub.utils import WeakFileLock
from tqdm import tqdm

from data.answers import AnswerRow
from data.disk import written
from data.row_table import FEATURES, TOKENS, Rows

TABLE, ORDER, ABOUT = "rows.arrow", "order.npy", "about.json"
_LAYOUT = b"1"  # of the files here: another layout is another key
_TOKENS_OF_A_PIECE = 1 << 18  # written at once, about a MiB; a row is never cut
_ROWS_OF_A_PIECE = 4096


@dataclass(frozen=True)
class RowSource:
    """Where rows are read from, whatever their form.

    Attributes:
        files: in order.
        read: the rows of one file. Raises ValueError, naming the place, for what is no row.
        prompts: row ids in the order of the prompts, where they are known, with what changes when that order does.
        expected: how many rows a manifest says there are, for the bar's time left.
    """

    files: tuple[Path, ...]
    read: Callable[[Path], Iterator[AnswerRow]]
    prompts: tuple[str, Callable[[], Iterable[str]]] | None = None
    expected: int | None = None

    def key(self) -> str:
        """A name for the content of the files, wherever they lie, and for the order of the rows."""
        digest = hashlib.sha256(_LAYOUT)
        for path in self.files:
            with open(path, "rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
        if self.prompts:
            digest.update(self.prompts[0].encode())
        return digest.hexdigest()[:24]


def cached_rows(source: RowSource, folder: Path, only_one: bool) -> Rows:
    """The rows of a source from FOLDER/KEY, which is made when it is missing. Raises StageError when the disk is full.

    Several processes may ask at once: one makes the file, the others wait for it. Where the file system knows no locks
    each makes its own, and the first one stays.

    Args:
        only_one: remove what was made of earlier content.
    """
    place = folder / source.key()
    if not place.is_dir():
        folder.mkdir(parents=True, exist_ok=True)
        with WeakFileLock(folder / ".lock"):
            if not place.is_dir():
                partial = folder / f"{place.name}.{os.getpid()}.partial"
                try:
                    with written(f"the table of rows {place}"):
                        _make(source, partial)
                    with contextlib.suppress(OSError):  # another process was first
                        partial.rename(place)
                finally:
                    shutil.rmtree(partial, ignore_errors=True)
                for other in folder.iterdir() if only_one else ():
                    if other.is_dir() and other != place:
                        shutil.rmtree(other, ignore_errors=True)
    return _open(place)


def passing_rows(source: RowSource, folder: Path) -> Rows:
    """The rows of a source from a table in `folder` that may be removed as soon as this returns."""
    _make(source, folder)
    return _open(folder)


def _open(place: Path) -> Rows:
    return Rows(*_table(place), json.loads((place / ABOUT).read_text())["digest"])


def _table(place: Path) -> tuple[Dataset, np.ndarray | None]:
    order = place / ORDER
    return Dataset.from_file(str(place / TABLE)), np.load(order) if order.is_file() else None


def _make(source: RowSource, folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)  # of a killed process with this number
    folder.mkdir(parents=True)
    places = _write(source, str(folder / TABLE))
    if source.prompts:
        order_R = np.fromiter(_in_order(places, source.prompts[1]()), np.int64, len(places))
        np.save(folder / ORDER, order_R.astype(np.int32) if len(order_R) < 2**31 else order_R)
    del places  # before the table is read
    rows = Rows(*_table(folder))
    (folder / ABOUT).write_text(json.dumps({"rows": len(rows), "digest": rows.digest}))


def _write(source: RowSource, path: str) -> dict[str, int]:
    """Writes the first row of each id; returns their places."""
    places: dict[str, int] = {}
    with ArrowWriter(path=path, features=FEATURES) as writer:
        for piece in _pieces(_first_ones(source, places)):
            writer.write_batch({name: [getattr(row, name) for row in piece] for name in FEATURES}, len(piece))
        writer.finalize()
    return places


def _first_ones(source: RowSource, places: dict[str, int]) -> Iterator[AnswerRow]:
    with tqdm(desc="rows", total=source.expected, unit="row", unit_scale=True, delay=2) as bar:
        for path in source.files:
            for row in source.read(path):
                bar.update()
                if row.id not in places:
                    places[row.id] = len(places)
                    yield row


def _pieces(rows: Iterable[AnswerRow]) -> Iterator[list[AnswerRow]]:
    piece: list[AnswerRow] = []
    tokens = 0
    for row in rows:
        piece.append(row)
        tokens += sum(len(getattr(row, name)) for name in TOKENS)
        if tokens >= _TOKENS_OF_A_PIECE or len(piece) >= _ROWS_OF_A_PIECE:
            yield piece
            piece, tokens = [], 0
    if piece:
        yield piece


def _in_order(places: dict[str, int], ids: Iterable[str]) -> Iterator[int]:
    """Places by the order of the prompts; rows of no prompt follow by their ids, so that arrival changes nothing."""
    for row_id in ids:
        place = places.pop(row_id, None)
        if place is not None:
            yield place
    for row_id in sorted(places):
        yield places[row_id]
