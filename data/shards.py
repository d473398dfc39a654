"""Parquet files of some hundred megabytes, written one after another, so that a killed run goes on behind the last
whole one. The same rows give the same bytes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

import pyarrow
import pyarrow.parquet

from data.disk import sync, written
from data.records import SCHEMA, Record

SHARD_BYTES = 384 << 20  # of a file's rows in memory; compressed it is about a third
_BATCH_ROWS, _BATCH_TOKENS = 1000, 1 << 20
_UNFINISHED = ".partial"


def finished_shards(folder: Path) -> list[Path]:
    """The whole shards of an unfinished data set: an unbroken row from the first on."""
    found = []
    while _readable(path := folder / _name(len(found))):
        found.append(path)
    return found


def _readable(path: Path) -> bool:
    try:
        return path.is_file() and bool(count_rows([path]))
    except (pyarrow.ArrowException, OSError):  # the disk lost a part of it
        return False


def count_rows(paths: Iterable[Path]) -> int:
    return sum(pyarrow.parquet.read_metadata(path).num_rows for path in paths)


def write_shards(folder: Path, records: Iterable[Record], limit: int = SHARD_BYTES) -> list[Path]:
    """Adds shards behind the finished ones; returns all of them. Raises StageError when the disk refuses a write.

    Args:
        records: the rows that are not in the finished shards.
        limit: bytes in memory from which on a shard is closed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    shards = finished_shards(folder)
    batches = _batches(records)
    batch = next(batches, None)
    while batch is not None:
        path = folder / _name(len(shards))
        partial, size = path.with_name(path.name + _UNFINISHED), 0
        with written(f"the data set's shard {path.name}", partial):
            with pyarrow.parquet.ParquetWriter(partial, SCHEMA, compression="zstd") as writer:
                while batch is not None and size < limit:
                    table = pyarrow.Table.from_pylist(batch, SCHEMA)
                    writer.write_table(table)
                    size += table.nbytes
                    batch = next(batches, None)
            sync(partial)
            partial.rename(path)
            sync(folder)
        shards.append(path)
    return shards


def name_shards(paths: list[Path]) -> list[Path]:
    """Gives finished shards the names under which `datasets` finds them, which tell how many there are."""
    named = [path.with_name(f"train-{n:05}-of-{len(paths):05}.parquet") for n, path in enumerate(paths)]
    for path, name in zip(paths, named, strict=True):
        path.rename(name)
    return named


def describe_shard(path: Path) -> dict:
    """What the manifest says of a shard."""
    return {
        "file": f"data/{path.name}", "rows": count_rows([path]), "bytes": path.stat().st_size, "sha256": hash_file(path)
    }  # fmt: skip


def intact(folder: Path, shard: dict, thoroughly: bool) -> bool:
    """Whether a data set's shard is as its manifest says: by its size, or (`thoroughly`) by all of its bytes."""
    path = folder / shard["file"]
    whole = path.is_file() and path.stat().st_size == shard.get("bytes")
    return whole and (not thoroughly or hash_file(path) == shard["sha256"])


def hash_file(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _name(number: int) -> str:
    return f"shard-{number:05}.parquet"


def _batches(records: Iterable[Record]) -> Iterable[list[dict]]:
    """Rows of about a row group, in the columns of SCHEMA."""
    batch, tokens = [], 0
    for record in records:
        batch.append(record.columns())
        tokens += len(record.row.prompt_ids) + len(record.row.answer_ids)
        if len(batch) >= _BATCH_ROWS or tokens >= _BATCH_TOKENS:
            yield batch
            batch, tokens = [], 0
    if batch:
        yield batch
