"""Rows of Parquet and Arrow, as their writers meant them.

A columnar file gives every object inside of a row the keys of all rows: what is null there is left out again, or each
tool call would have the arguments of all. Columns of type JSON (`datasets` writes unlike messages so) are text in the
file and objects in the row, nulls and all.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

from data.prompt import Unusable

_BATCH = 500

Row = tuple[str, object]
Converter = Callable[[Any], Any]


def parquet_size(path: str) -> int:
    """Rows of a Parquet file. Raises ValueError when it is none."""
    return _parquet(path).metadata.num_rows


def _parquet(path: str):
    import pyarrow
    import pyarrow.parquet

    try:
        return pyarrow.parquet.ParquetFile(path)
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(f"prompts: {path} is no whole Parquet file ({_line(error)})") from error


def parquet_rows(path: str) -> Iterator[Row]:
    """(where, row) of a file; a group of rows that cannot be read comes as so many `Unusable`."""
    import pyarrow

    file, number = _parquet(path), 0
    for group in range(file.num_row_groups):
        end = number + file.metadata.row_group(group).num_rows
        try:
            for batch in file.iter_batches(_BATCH, row_groups=[group]):
                yield from _batch_rows(batch, number)
                number += batch.num_rows
        except (pyarrow.ArrowException, OSError) as error:
            problem = _line(error)  # the other groups of the file may be whole
            yield from ((f"row {n}", Unusable("an unreadable part of the file", problem)) for n in range(number, end))
            number = end


def arrow_rows(path: str) -> Iterator[Row]:
    """Rows of an Arrow file: of the stream format that `datasets` writes, or of the file format."""
    import pyarrow

    number = 0
    with pyarrow.memory_map(path) as file:
        try:
            try:
                batches = pyarrow.ipc.open_stream(file)
            except pyarrow.ArrowInvalid:
                reader = pyarrow.ipc.open_file(file)
                batches = (reader.get_batch(n) for n in range(reader.num_record_batches))
        except (pyarrow.ArrowException, OSError) as error:
            raise ValueError(f"prompts: {path} is no Arrow file ({_line(error)})") from error
        try:
            for batch in batches:
                for start in range(0, batch.num_rows, _BATCH):
                    yield from _batch_rows(batch.slice(start, _BATCH), number + start)
                number += batch.num_rows
        except (pyarrow.ArrowException, OSError) as error:
            yield f"row {number} and all after it", Unusable("an unreadable part of the file", _line(error))


def _batch_rows(batch, number: int) -> Iterator[Row]:
    try:
        rows = converted_rows(batch.to_pylist(), converters(batch.schema))
    except (ValueError, OverflowError, RecursionError) as error:  # no UTF-8, no JSON, dates of no year
        if batch.num_rows == 1:
            yield f"row {number}", Unusable("an unreadable row", _line(error))
            return
        for index in range(batch.num_rows):
            yield from _batch_rows(batch.slice(index, 1), number + index)
        return
    yield from ((f"row {number + index}", row) for index, row in enumerate(rows))


def converted_rows(rows: list[dict], columns: dict[str, Converter]) -> list[dict]:
    for row in rows:
        for name, convert in columns.items():
            if row[name] is not None:
                row[name] = convert(row[name])
    return rows


def converters(schema, decoded: bool = False) -> dict[str, Converter]:
    """What turns the values of a schema's columns into what their writers meant, for the columns that need it.

    Args:
        schema: of Arrow.
        decoded: whether columns of type JSON are objects already.
    """
    found = {field.name: _converter(field.type, decoded) for field in schema}
    return {name: convert for name, convert in found.items() if convert is not None}


def _converter(kind, decoded: bool) -> Converter | None:
    import pyarrow

    if isinstance(kind, pyarrow.JsonType):
        return None if decoded else json.loads
    if pyarrow.types.is_struct(kind):
        parts = {field.name: _converter(field.type, decoded) or _same for field in kind}
        return lambda value: {key: parts[key](part) for key, part in value.items() if part is not None}
    if pyarrow.types.is_list(kind) or pyarrow.types.is_large_list(kind) or pyarrow.types.is_fixed_size_list(kind):
        inner = _converter(kind.value_type, decoded)
        return inner and (lambda value: [None if part is None else inner(part) for part in value])
    return None


def _same(value: Any) -> Any:
    return value


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
