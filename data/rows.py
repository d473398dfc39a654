"""The rows to train on, from RUN/answers, a folder that the stage `dataset` wrote, or such a data set on the Hub.

    rows, manifest = open_answers(config)     # checked and memory-mapped
    rows[3].answer_ids, rows.answer_lengths   # data/row_table.py

Rows come in the order of the prompts that they were asked with (RUN/prompts), so that training does not depend on who
answered first; in the order of the files where that is not known.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from pyarrow import parquet

from data.answers import MANIFEST, AnswerRow, answer_files, finished_manifest, parse_row, read_manifest
from data.row_cache import RowSource, cached_rows, passing_rows
from data.row_table import FEATURES, TOKENS, Rows, as_rows
from data.settings import RunConfig

__all__ = ["Rows", "answers_of", "as_rows", "open_answers", "open_rows"]

FOLDER = "rows"  # beside the answers
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
_REQUIRED = ("id", "domain", *TOKENS, "stop")


def answers_of(config: RunConfig) -> str:
    """What training reads: RUN/answers unless `answers` names something else."""
    return config.answers or config.path("answers")


def open_answers(config: RunConfig, keep: bool = True) -> tuple[Rows, dict]:
    """Rows and manifest of what training reads. Raises ValueError, naming the command to run, where they are missing,
    not finished, or of unknown origin.

    Args:
        keep: of `open_rows`.
    """
    source = local_source(answers_of(config))
    manifest = read_manifest(source) if config.answers else finished_manifest(source)
    if manifest.get("finished") is False:
        raise ValueError(f"answers: those in {source} are not finished; run: bash launch.sh regenerate CONFIG")
    if not manifest:
        raise ValueError(
            f"answers: {config.answers} has no {MANIFEST}, which says what target wrote them; "
            "name a folder that bash launch.sh dataset CONFIG wrote"
        )
    rows = open_rows(source, keep)
    if not rows:
        raise ValueError(f"answers: {source} holds no row")
    return rows, manifest


def open_rows(source: str, keep: bool = True) -> Rows:
    """All rows of a folder of answers, a folder of a data set, or a data set's Hub id. Raises ValueError when there are
    none, or for a line that is no row.

    The memory-mapped table is made at the first call and kept beside the answers, or in the cache of `datasets`.

    Args:
        keep: False leaves nothing behind where there is no table yet.
    """
    folder = Path(local_source(source))
    found, beside = _find(folder), None
    if found.read is read_jsonl and os.access(folder, os.W_OK):
        beside = folder / FOLDER
    if not keep and not (beside and (beside / found.key()).is_dir()):
        with tempfile.TemporaryDirectory() as passing:
            return passing_rows(found, Path(passing, FOLDER))
    from datasets import config

    return cached_rows(found, beside or Path(config.HF_DATASETS_CACHE, "dartree-rows"), only_one=beside is not None)


def local_source(source: str) -> str:
    """The folder itself, or the local copy of a data set of the Hub. Raises ValueError for what is neither."""
    if os.path.isdir(source) or not _HUB_ID.fullmatch(source):
        return source
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return snapshot_download(source, repo_type="dataset", allow_patterns=["*.parquet", MANIFEST])
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(f"answers: {source!r} is no folder and no data set that the Hub gives: {reason}") from error


def _find(folder: Path) -> RowSource:
    manifest, files = read_manifest(str(folder)), answer_files(str(folder))
    expected = manifest.get("rows") or manifest.get("counts", {}).get("done")
    if files:
        return RowSource(tuple(files), read_jsonl, _prompt_order(folder, manifest), expected)
    files = sorted(folder.rglob("*.parquet"))
    if not files:
        raise ValueError(f"answers: {folder} holds neither answers*.jsonl nor *.parquet")
    return RowSource(tuple(files), read_parquet, expected=expected)


def _prompt_order(answers: Path, manifest: dict) -> tuple[str, Callable[[], Iterable[str]]] | None:
    """Row ids in the order of the prompts beside the answers, if the answers say that they were asked with those.

    Answers of before there were prepared prompts stay in their own order, so that runs on them can be resumed.
    """
    from data.dialogues import turn_ids  # imported late: it brings the engines with it
    from data.prompt_store import Prepared
    from data.prompt_store import read_manifest as read_prompts

    asked = manifest.get("prompts", {}).get("fingerprint")
    folder = str(answers.parent / "prompts")
    if asked is None or read_prompts(folder).get("fingerprint") != asked:
        return None
    prompts = Prepared(folder)
    return prompts.manifest["content"], lambda: turn_ids(prompts)


def read_jsonl(path: Path) -> Iterator[AnswerRow]:
    """The rows of a file of answers. A last line without its end (its writer was killed, or is at it) is left out."""
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if line.endswith(b"\n"):
                row = parse_row(line, f"{path} line {number}")
                if reason := wrong_in(row):
                    raise ValueError(f"{path} line {number} is no answer row ({reason}); delete {path.parent}")
                yield row


def read_parquet(path: Path) -> Iterator[AnswerRow]:
    """The rows of a shard of a data set; columns that `AnswerRow` does not have are not read."""
    try:
        opened = parquet.ParquetFile(path)
    except ValueError as error:  # pyarrow's own, without the file's name
        raise ValueError(f"answers: {path} is no Parquet file ({error})") from error
    with opened as file:
        there = file.schema_arrow.names
        missing = [name for name in _REQUIRED if name not in there]
        if missing:
            raise ValueError(f"answers: {path} has no column {missing[0]}; it has {', '.join(there)}")
        names, number = [name for name in FEATURES if name in there], 0
        for batch in file.iter_batches(batch_size=1024, columns=names):
            for values in zip(*(batch.column(name).to_pylist() for name in names), strict=True):
                row, number = AnswerRow(**dict(zip(names, values, strict=True))), number + 1
                if reason := wrong_in(row):
                    raise ValueError(f"answers: {path} row {number} is no answer row ({reason})")
                yield row


def wrong_in(row: AnswerRow) -> str:
    """What is no text or no token id in a row; "" for a right one."""
    for name in ("id", "domain", "stop"):
        if not isinstance(getattr(row, name), str):
            return f"{name} is {getattr(row, name)!r}, not text"
    for name in TOKENS:
        tokens = getattr(row, name)
        if not isinstance(tokens, list) or set(map(type, tokens)) - {int}:
            return f"{name} is no list of whole numbers"
        if tokens and not 0 <= min(tokens) <= max(tokens) < 2**31:
            return f"{name} holds {min(tokens) if min(tokens) < 0 else max(tokens)}, which is no token id"
    return ""
