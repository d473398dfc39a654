"""The target's answers on disk: RUN/answers/answers*.jsonl, a row a line, and RUN/answers/manifest.json about them."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from data.chat import PLAIN, ChatFormat
from data.disk import sync
from models.whole import check_shards

ROWS, MANIFEST = "answers.jsonl", "manifest.json"
_SAMPLE = 1 << 12  # bytes read at the beginning, middle and end of each tensor
# The 4-grams of a large run's answers would not fit in memory.
_ROWS_OF_4GRAMS = 2000
# A line begins with the row's id: a store of a million rows is indexed without parsing their tokens.
_ID = re.compile(rb'\{"id": ("(?:[^"\\]|\\.)*")')


@dataclass(frozen=True)
class AnswerRow:
    """One answered turn.

    Attributes:
        id: the prompt's id; later turns of a conversation end in `.turn2`, `.turn3`, ...
        domain: of the prompt.
        prompt_ids: tokens up to where the assistant begins, earlier turns and answers included.
        answer_ids: the target's tokens, the eos token included when stop is "eos".
        stop: "eos", or "length" when the answer was cut (then it must not be trained as if it had ended).
        exact: the ids are those that the target sampled; False for a text that was tokenised again and verified.
    """

    id: str
    domain: str
    prompt_ids: list[int]
    answer_ids: list[int]
    stop: str
    exact: bool = True


def read_answers(folder: str) -> tuple[list[AnswerRow], dict]:
    """Rows and manifest of a finished regeneration, all in memory. Raises ValueError as `finished_manifest` does."""
    manifest = finished_manifest(folder)
    return list(read_rows(folder).values()), manifest


def finished_manifest(folder: str) -> dict:
    """The manifest of a finished regeneration. Raises ValueError, naming the command to run, without one."""
    manifest = read_manifest(folder)
    if not manifest.get("finished"):
        state = "not finished" if manifest else "missing"
        raise ValueError(f"the answers in {folder} are {state}; run: bash launch.sh regenerate CONFIG")
    return manifest


def read_manifest(folder: str, *needed: str) -> dict:
    """The manifest, or {} when there is none yet. Raises ValueError for a file that is none or lacks a needed key."""
    path = Path(folder, MANIFEST)
    if not path.is_file():
        return {}
    try:
        manifest = json.loads(path.read_text("utf-8"))
        fault = "" if isinstance(manifest, dict) else f"it holds {str(manifest)[:40]}"
    except ValueError as error:  # no JSON, or no UTF-8
        manifest, fault = {}, str(error)
    fault = fault or ", ".join(f"no {name!r}" for name in needed if name not in manifest)
    if fault:
        raise ValueError(f"{path} is no manifest ({fault}): delete it and run the stage that writes it again")
    return manifest


def read_rows(folder: str) -> dict[str, AnswerRow]:
    """Whole rows by id, the first of each id. A last line without its end (the writer was killed) is left out."""
    rows: dict[str, AnswerRow] = {}
    for row in iterate_rows(folder):
        rows.setdefault(row.id, row)
    return rows


def iterate_rows(folder: str) -> Iterator[AnswerRow]:
    """Every whole row in the order of the files, one in memory at a time; a row may come twice."""
    for path in answer_files(folder):
        with open(path, "rb") as file:
            for number, line in enumerate(file, 1):
                if line.endswith(b"\n"):
                    yield parse_row(line, f"{path} line {number}")


def answer_files(folder: str) -> list[Path]:
    """answers.jsonl, then answers-rank-N.jsonl of further ranks by N; those that are there."""
    stem = ROWS.removesuffix(".jsonl")
    others = [path for path in Path(folder).glob(f"{stem}-rank-*.jsonl") if path.stem.rpartition("-")[2].isdigit()]
    others.sort(key=lambda path: int(path.stem.rpartition("-")[2]))
    return [path for path in (Path(folder, ROWS), *others) if path.is_file()]


def parse_row(line: bytes, place: str) -> AnswerRow:
    """The row of a line. Raises ValueError naming the place for anything else."""
    try:
        return AnswerRow(**json.loads(line))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{place} is no answer row ({error}); delete {Path(place).parent}") from error


def scan_ids(path: Path) -> Iterator[tuple[str, int]]:
    """(row id, where its line begins) of every whole line of an answer file."""
    offset = 0
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):  # its writer was killed, or is at it
                return
            found = _ID.match(line) if line.endswith(b"}\n") else None
            if found is None:
                yield parse_row(line, f"{path} line {number}").id, offset
            else:
                yield json.loads(found[1]) if b"\\" in found[1] else found[1][1:-1].decode(), offset
            offset += len(line)


def drop_half_line(folder: str, name: str = ROWS) -> None:
    """Cuts an unfinished last line, so that rows appended later start on their own line.

    In place: while a file is written anew, a second kill would lose all of it.
    """
    path = Path(folder, name)
    if not path.is_file():
        return
    with open(path, "rb") as file:
        end = whole = file.seek(0, os.SEEK_END)
        while whole:
            start = max(0, whole - (1 << 16))
            file.seek(start)
            last = file.read(whole - start).rfind(b"\n")
            whole = start + last + 1 if last >= 0 else start
            if last >= 0:
                break
    if whole < end:
        os.truncate(path, whole)


def write_manifest(folder: str, manifest: dict) -> None:
    """Replaces the manifest as a whole: a reader sees the old one or the new one."""
    temporary = Path(folder, f"{MANIFEST}.{os.getpid()}.partial")  # several ranks may write the same content at once
    temporary.write_text(json.dumps(manifest, indent=1, ensure_ascii=False) + "\n")
    sync(temporary)
    temporary.replace(Path(folder, MANIFEST))
    sync(folder)


def make_folder(path: str, option: str) -> None:
    """Creates an output folder. Raises ValueError with the option's name when it cannot be one."""
    try:
        os.makedirs(path, exist_ok=True)
    except OSError as error:
        raise ValueError(f"{option}: cannot create {path}: {error.strerror}") from error


def describe(rows: Iterable[AnswerRow]) -> dict:
    """What the answers are like: how they end, how long they are, how much they repeat. One pass, none kept."""
    count = ended = exact = total_grams = 0
    distinct: set[tuple[int, ...]] = set()
    inside: list[float] = []
    lengths: dict[str, tuple[int, int]] = {}
    for count, row in enumerate(rows, 1):
        ended += row.stop == "eos"
        exact += row.exact
        tokens, answers = lengths.get(row.domain, (0, 0))
        lengths[row.domain] = (tokens + len(row.answer_ids), answers + 1)
        if count <= _ROWS_OF_4GRAMS and len(row.answer_ids) >= 4:
            grams = list(zip(*(row.answer_ids[i:] for i in range(4)), strict=False))
            inside.append(len(set(grams)) / len(grams))
            distinct.update(grams)
            total_grams += len(grams)
    if not count:
        return {}
    return {
        "share_eos": ended / count,
        "share_exact": exact / count,
        # Over the sample's answers together, and inside one answer (mean): the second does not fall as the set grows.
        "distinct_4grams_rows": min(count, _ROWS_OF_4GRAMS),
        "distinct_4grams": len(distinct) / max(1, total_grams),
        "distinct_4grams_in_answer": sum(inside) / max(1, len(inside)),
        "answer_tokens": sum(tokens for tokens, _ in lengths.values()),
        "mean_answer_tokens": {domain: tokens / answers for domain, (tokens, answers) in sorted(lengths.items())},
    }


def check_origin(manifest: dict, now: dict, folder: str, form: ChatFormat = PLAIN) -> None:
    """Raises ValueError when the answers are another target's (TRAPS 31), a quantised one's included, or were asked
    in another chat format (TRAPS 28, 29). A manifest written by hand may not say.

    Args:
        now: `target_identity`, `template` and `quantization` of this run's target.
        form: of this run; `template` changes with it, but does not say in what.
    """
    from models.quantization import quantization_of  # imported late: transformers costs seconds

    made = manifest.get("settings", {})
    for name, value in form.recorded.items():
        if made.get(name, value) != value:
            raise ValueError(
                f"the answers in {folder} were asked with {name} {made[name]}, this run has {value}: set {name} as it "
                "was, or choose another --run_dir and run: bash launch.sh regenerate CONFIG"
            )
    if made.get("dtype"):
        made = made | {"quantization": quantization_of(made["dtype"])}
    kinds = {"target_identity": "target", "template": "chat template", "quantization": "a target with quantization"}
    for name, what in kinds.items():
        if made.get(name) is not None and now[name] is not None and made[name] != now[name]:
            raise ValueError(
                f"the answers in {folder} are those of {what} {made[name]}, this run has {now[name]}: "
                "choose another --run_dir and run: bash launch.sh regenerate CONFIG"
            )


def target_identity(path: str) -> str:
    """A name for the target's weights that does not depend on where they lie.

    For a folder, a hash of its configuration and of the beginning, middle and end of each tensor (hashing gigabytes
    whole would cost more than the check is worth): training one layer changes it. For a Hub id, the id with the commit
    in the local cache. Raises ValueError for a file that is no safetensors, or a missing one that the index names.
    """
    if not os.path.isdir(path):
        from huggingface_hub import try_to_load_from_cache

        # Reads the cache only: no network, and none of the code that may come with the model. The file lies in
        # snapshots/COMMIT; transformers' configurations do not hold the commit any more.
        file = try_to_load_from_cache(path, "config.json")
        return f"{path}@{Path(file).parent.name if isinstance(file, str) else None}"
    check_shards(path)
    digest = hashlib.sha256(Path(path, "config.json").read_bytes())
    for file in sorted(Path(path).glob("*.safetensors")):
        digest.update(file.name.encode())
        with open(file, "rb") as stream:
            header, tensors = _header(stream, file)
            digest.update(header)
            for start, end in tensors:
                for place in (start, (start + end) // 2, max(start, end - _SAMPLE)):
                    stream.seek(place)
                    digest.update(stream.read(min(_SAMPLE, end - place)))
    return digest.hexdigest()[:16]


def _header(stream: BinaryIO, file: Path) -> tuple[bytes, list[tuple[int, int]]]:
    """A safetensors file's header, and where each tensor begins and ends in the file."""
    size = int.from_bytes(stream.read(8), "little")
    try:
        if size > file.stat().st_size:
            raise ValueError(f"a header of {size} bytes")
        header = stream.read(size)
        entries = {name: entry for name, entry in json.loads(header).items() if name != "__metadata__"}
        offsets = sorted(tuple(entry["data_offsets"]) for entry in entries.values())
    except (ValueError, AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"{file} is no safetensors file: {error}") from error
    return header, [(8 + size + start, 8 + size + end) for start, end in offsets]
