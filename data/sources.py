"""Sources of prompts: the project's generator, local files, or data sets of the Hub, streamed.

A data set of the Hub is written OWNER/NAME, with what is needed of `:CONFIG`, `@SPLIT` and `#REVISION` after it, in
this order: HuggingFaceH4/ultrachat_200k@train_sft, openai/gsm8k:main@train, own/logs#v2.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from data.columnar import converted_rows, converters
from data.generator import SPLITS, generated_prompts
from data.local_files import SUFFIXES, Row, files_of, identity, known_rows, rows_of
from data.settings import StageError

BUILTIN = "builtin"
_HUB = re.compile(r"(?P<id>[\w.-]+(?:/[\w.-]+)?)(?::(?P<config>[^@#]+))?(?:@(?P<split>[\w.-]+))?(?:#(?P<revision>.+))?")


@dataclass(frozen=True)
class Source:
    """One source.

    Attributes:
        name: as the option says.
        domain: of its rows that name none.
        rows: begins to read; (where, row) pairs, the row a dict, a `Prompt` of the generator, or `Unusable`.
        count: rows, where they are known beforehand.
        version: what it is a version of: the commit of a Hub id, a hash of files.
    """

    name: str
    domain: str
    rows: Callable[[], Iterator[Row]]
    count: int | None = None
    version: str = ""


def open_source(name: str, split: str = "train", seed: int = 0, version: str = "") -> Source:
    """The source of a name.

    Args:
        split: "train" or "eval": the generator's templates and numbers, or the split of a Hub id that names none
            (evaluation takes "test"). Files have one split.
        version: commit of a Hub id that names no revision, to read what was read before.

    Raises ValueError for one that does not exist or cannot be reached.
    """
    if split not in SPLITS:
        raise ValueError(f"split must be one of {', '.join(SPLITS)}, got {split!r}")
    if name == BUILTIN:
        return Source(name, name, lambda: ((f"prompt {n}", p) for n, p in enumerate(generated_prompts(seed, split))))
    if paths := files_of(name):
        return Source(name, _stem(name), lambda: _file_rows(paths), known_rows(paths), identity(paths))
    if name.removesuffix(".gz").endswith(SUFFIXES) or name.startswith((".", "/", "~")) or "*" in name:
        raise ValueError(f"prompts: no such file: {name}")
    return _hub_source(name, split, version)


def shuffled(rows: Iterator[Row], size: int, seed: str) -> Iterator[Row]:
    """The rows through a buffer of `size`, from which each one leaves by chance: its order depends on nothing but seed
    and size. Size 0 keeps the order."""
    rng, buffer = random.Random(seed), []
    for row in rows:
        if len(buffer) < size:
            buffer.append(row)
            continue
        if size:
            place = rng.randrange(size)
            row, buffer[place] = buffer[place], row
        yield row
    rng.shuffle(buffer)
    yield from buffer


def _stem(name: str) -> str:
    path = Path(name.rstrip("/").removesuffix(".gz"))
    if "*" in path.name:
        path = path.parent
    return path.stem if path.suffix in SUFFIXES else path.name


def _file_rows(paths: list[str]) -> Iterator[Row]:
    for path in paths:
        before = f"{Path(path).name} " if len(paths) > 1 else ""
        for where, row in rows_of(path):
            yield f"{before}{where}", row


def _hub_source(name: str, split: str, version: str) -> Source:
    form = _HUB.fullmatch(name)
    if form is None:
        raise ValueError(f"prompts: {name!r} is no file, and no OWNER/NAME[:CONFIG][@SPLIT][#REVISION] of the Hub")
    wanted = form["split"] or ("train" if split == "train" else "test")
    builder = _builder(name, form["id"], form["config"], form["revision"] or version or None)
    known = builder.info.splits
    if known and wanted not in known:
        raise ValueError(
            f"prompts: {form['id']} has no split {wanted!r}; write {form['id']}@SPLIT with one of {', '.join(known)}"
        )
    try:
        rows = builder.as_streaming_dataset(split=wanted)
    except Exception as error:  # the library raises its own types for network, names and splits alike
        raise ValueError(f"prompts: {name!r} cannot be read at split {wanted!r}: {_line(error)}") from error
    count = (known[wanted].num_examples or None) if known else None
    commit = re.search(r"@([0-9a-f]{7,64})(?:/|$)", str(builder.base_path or ""))
    return Source(name, form["id"].rsplit("/", 1)[-1], lambda: _stream(name, rows), count, commit[1] if commit else "")


def _builder(name: str, hub_id: str, config: str | None, revision: str | None):
    from datasets import load_dataset_builder  # imported late: the built-in prompts and files do not need it

    try:
        return load_dataset_builder(hub_id, config, revision=revision)
    except Exception as error:
        raise ValueError(f"prompts: {name!r} is no file and no data set that can be reached: {_line(error)}") from error


def _stream(name: str, rows) -> Iterator[Row]:
    """Raises StageError when the Hub ends the stream: without the rest of its rows the set would be another one."""
    features = getattr(rows, "features", None)
    columns = converters(features.arrow_schema, decoded=True) if features else {}
    number, stream = 0, iter(rows)
    while True:
        try:
            row = next(stream)
        except StopIteration:
            return
        except Exception as error:
            raise StageError(
                f"prompts: {name} cannot be read beyond row {number}: {_line(error)}; run it again, or download it"
            ) from error
        yield f"row {number}", converted_rows([row], columns)[0]
        number += 1


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]
