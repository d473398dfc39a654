"""Rows of local files: JSON lines, JSON arrays, Parquet and Arrow, one at a time, each with the place where it stands.

A row that cannot be read comes as an `Unusable`; the next one follows. The builders of `datasets` end at the first bad
line and give all rows of a file one schema (tool arguments of one row then hold the keys of all others): JSON is read
here, line by line.
"""

from __future__ import annotations

import codecs
import functools
import glob
import gzip
import hashlib
import json
import os
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from data.columnar import Row, arrow_rows, parquet_rows, parquet_size
from data.prompt import Unusable

JSON_LINES, JSON, PARQUET, ARROW = (".jsonl", ".ndjson"), (".json",), (".parquet",), (".arrow",)
SUFFIXES = (*JSON_LINES, *JSON, *PARQUET, *ARROW)
LONGEST_LINE = 32 << 20  # bytes: a conversation is far shorter, and one line must not fill the memory
_CHUNK = 1 << 20

_DECODER = json.JSONDecoder()
# Python makes no integer of more than 4300 digits, and its error is a plain ValueError: this one finds the row's end.
_ANY_NUMBER, _TOO_LONG_NUMBER = json.JSONDecoder(parse_int=str), "a number of too many digits"
_BEFORE_ARRAY, _BETWEEN_ROWS = re.compile(r"\ufeff?\s*\[?"), re.compile(r"[\s,]*")


def files_of(source: str) -> list[str]:
    """The files that a source names, in the order of their names; [] when it names none on this machine.

    A folder stands for all files of a known kind below it; a file of any other kind is read as JSON lines. Raises
    ValueError for a folder without one.
    """
    path = os.path.expanduser(source)
    if os.path.isdir(path):
        found = sorted(str(p) for p in Path(path).rglob("*") if p.is_file() and _suffix(str(p)) in SUFFIXES)
        # Files beside the rows, as `Dataset.save_to_disk` and data set repositories have them.
        found = [
            p for p in found if os.path.basename(p) not in ("dataset_info.json", "state.json", "dataset_dict.json")
        ]
        if not found:
            raise ValueError(f"prompts: the folder {source} holds no file of {', '.join(SUFFIXES)}")
        return found
    if os.path.isfile(path):
        return [path]
    return sorted(p for p in glob.glob(path, recursive=True) if os.path.isfile(p)) if glob.has_magic(path) else []


def rows_of(path: str) -> Iterator[Row]:
    """(where, row) of a file. Raises ValueError when it cannot be opened as what its name says it is."""
    suffix = _suffix(path)
    try:
        if suffix in PARQUET:
            yield from parquet_rows(path)
        elif suffix in ARROW:
            yield from arrow_rows(path)
        else:
            with _opened(path) as file:
                yield from (_array_rows(file) if suffix in JSON and _is_array(file) else _line_rows(file))
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"prompts: {path} is no whole gzip file ({error})") from error


def known_rows(paths: list[str]) -> int | None:
    """How many rows the files hold, where their kind says so without reading them."""
    if not all(_suffix(path) in PARQUET for path in paths):
        return None
    return sum(map(parquet_size, paths))


def identity(paths: list[str]) -> str:
    """A hash of the files' names and of all that is in them."""
    digest = hashlib.sha256()
    for path in paths:
        status = os.stat(path)
        digest.update(f"{os.path.basename(path)} {status.st_size}\n".encode())
        digest.update(_content(os.path.abspath(path), status.st_ino, status.st_size, status.st_mtime_ns))
    return digest.hexdigest()[:16]


@functools.lru_cache(maxsize=1 << 16)
def _content(path: str, *state: int) -> bytes:
    """A checksum of a file. In the state in which this process has read it before, it is not read again."""
    sum_so_far = 0  # a cryptographic hash would take ten times as long, and nobody forges a source
    with open(path, "rb") as file:
        while piece := file.read(_CHUNK):
            sum_so_far = zlib.crc32(piece, sum_so_far)
    return sum_so_far.to_bytes(4)


def _suffix(path: str) -> str:
    return os.path.splitext(path.removesuffix(".gz"))[1].lower()


def _opened(path: str) -> BinaryIO:
    return gzip.open(path) if path.endswith(".gz") else open(path, "rb")


def _is_array(file: BinaryIO) -> bool:
    """Whether a JSON file is one array. Its place in the file is its beginning again afterwards."""
    start = file.read(4096).removeprefix(b"\xef\xbb\xbf").lstrip()
    file.seek(0)
    return start.startswith(b"[")


def _line_rows(file: BinaryIO) -> Iterator[Row]:
    number = 0
    while line := file.readline(LONGEST_LINE + 1):
        number += 1
        if len(line) > LONGEST_LINE:
            while line and not line.endswith(b"\n"):
                line = file.readline(LONGEST_LINE)
            yield f"line {number}", Unusable("a line that is too long", f"more than {LONGEST_LINE >> 20} MiB")
        elif line.strip():
            yield f"line {number}", _parsed(line)


def _parsed(line: bytes) -> object:
    try:
        return json.loads(line.decode("utf-8-sig"))
    except json.JSONDecodeError as error:
        return Unusable("not JSON", error.msg)
    except UnicodeDecodeError:
        return Unusable("not UTF-8")
    except ValueError:
        return Unusable("not JSON", _TOO_LONG_NUMBER)
    except RecursionError:
        return Unusable("not JSON", "nested too deeply")


def _array_rows(file: BinaryIO) -> Iterator[Row]:
    """Elements of one large array, as ShareGPT comes, without the whole of it in memory.

    What follows a place that is not JSON cannot be told into rows: it is one `Unusable`.
    """
    pieces = iter(lambda: file.read(_CHUNK), b"")
    # A byte that is no UTF-8 becomes half of a surrogate pair, for which its row is skipped.
    decode = codecs.getincrementaldecoder("utf-8")(errors="surrogateescape").decode
    text, number, start = decode(next(pieces, b"")), 0, 0
    start = _BEFORE_ARRAY.match(text).end()
    while True:
        start = _BETWEEN_ROWS.match(text, start).end()
        if text.startswith("]", start):
            return
        row, end = _element(text, start)
        if end is not None:
            yield f"row {number}", row
            number, start = number + 1, end
            continue
        piece = next(pieces, b"")
        if not piece or len(text) - start > LONGEST_LINE:
            reason = f"no row in {LONGEST_LINE >> 20} MiB" if piece else "the file ends within a row"
            yield f"row {number} and all after it", Unusable("not JSON", reason)
            return
        text, start = text[start:] + decode(piece), 0


def _element(text: str, start: int) -> tuple[object, int | None]:
    """The element that begins at `start` and where it ends: None when it is not whole, or no JSON."""
    try:
        try:
            row, end = _DECODER.raw_decode(text, start)
        except json.JSONDecodeError:
            raise
        except ValueError:
            row, end = Unusable("not JSON", _TOO_LONG_NUMBER), _ANY_NUMBER.raw_decode(text, start)[1]
    except (json.JSONDecodeError, RecursionError):
        return None, None
    return (row, end) if end < len(text) else (None, None)  # a number or a word may go on in the next piece
