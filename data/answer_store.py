"""The append-only store of regeneration: what became of each turn, by row id, in RUN/answers.

answers.jsonl holds the answered rows (data/answers.py), outcomes.jsonl a line for each turn that has no answer. Rank N
of several writes answers-rank-N.jsonl and outcomes-rank-N.jsonl. Each file is written by one process at a time and at
its end only, and what a call adds is on disk when it returns: a kill at any moment costs the unfinished last line,
which readers leave out. Of a row that both kinds of file name, the answer counts; of several outcomes, the last one.

In memory are ids and places, never texts or tokens.
"""

from __future__ import annotations

import fcntl
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from data.answers import ROWS, AnswerRow, answer_files, drop_half_line, parse_row, scan_ids
from data.settings import StageError

OUTCOMES = "outcomes.jsonl"
SKIPPED, FAILED = "skipped", "failed"
_FILE_BITS = 48  # of a place: the file's number above, the offset in it below


@dataclass(frozen=True)
class Outcome:
    """Why a turn has no answer.

    Attributes:
        status: "skipped", which is final, or "failed", which the next run tries again.
        reason: one of few, so that they can be counted.
        detail: what is particular to this row.
    """

    id: str
    status: str
    reason: str
    detail: str = ""


def rank_name(name: str, rank: int) -> str:
    """A rank's own file: rank 0 keeps the plain name."""
    stem, suffix = os.path.splitext(name)
    return f"{stem}-rank-{rank}{suffix}" if rank else name


class Accounts:
    """What a folder holds about every row, read without a lock: a writer may be at work.

    Attributes:
        places: answered row -> where its line is.
        dropped: row without an answer -> (status, reason).
    """

    def __init__(self, folder: str):
        self.folder = folder
        self.files = answer_files(folder)
        self.places: dict[str, int] = {}
        self.dropped: dict[str, tuple[str, str]] = {}
        for number, path in enumerate(self.files):
            for key, offset in scan_ids(path):
                self.places.setdefault(key, number << _FILE_BITS | offset)
        for path in outcome_files(folder):
            for outcome in read_outcomes(path):
                if outcome.id not in self.places:
                    self.dropped[outcome.id] = (sys.intern(outcome.status), sys.intern(outcome.reason))

    def status(self, key: str) -> str | None:
        """ "done", "skipped", "failed", or None for a row of which nothing is known."""
        return "done" if key in self.places else self.dropped.get(key, (None, ""))[0]

    def row(self, key: str) -> AnswerRow:
        place = self.places[key]
        path = self.files[place >> _FILE_BITS]
        with open(path, "rb") as file:
            file.seek(place & ((1 << _FILE_BITS) - 1))
            return parse_row(file.readline(), str(path))

    def counts(self, turns: int) -> dict[str, int]:
        """input, done, failed, skipped, left: the first is the sum of the others."""
        dropped = Counter(status for status, _ in self.dropped.values())
        counts = {"input": turns, "done": len(self.places), "failed": dropped[FAILED], "skipped": dropped[SKIPPED]}
        counts["left"] = turns - counts["done"] - counts["failed"] - counts["skipped"]
        return counts

    def open_turns(self, turns: int) -> int:
        """Turns that a run asks: those that are left, and those that failed."""
        counts = self.counts(turns)
        return counts["left"] + counts["failed"]

    def reasons(self, status: str) -> dict[str, int]:
        """Rows by reason, the most frequent first."""
        return dict(Counter(reason for kind, reason in self.dropped.values() if kind == status).most_common())


class AnswerStore(Accounts):
    """The accounts with the right to write. Raises ValueError when another process writes the same files."""

    def __init__(self, folder: str, rank: int = 0):
        self._lock: int | None = _lock(folder, rank)
        self._answers, self._outcomes = Path(folder, rank_name(ROWS, rank)), Path(folder, rank_name(OUTCOMES, rank))
        for path in (self._answers, self._outcomes):
            drop_half_line(folder, path.name)
            path.touch()
        super().__init__(folder)
        self._number = self.files.index(self._answers)

    def close(self) -> None:
        """Gives the right to write back."""
        if self._lock is not None:
            os.close(self._lock)
        self._lock = None

    def own(self) -> set[str]:
        """Answered rows of this rank's file."""
        return {key for key, place in self.places.items() if place >> _FILE_BITS == self._number}

    def add(self, rows: Sequence[AnswerRow], outcomes: Iterable[Outcome] = ()) -> None:
        """Appends and waits until it is on disk. A row that has an answer, and an outcome that is known, are left out.

        Raises StageError when the disk refuses it; then nothing of the call stays in the file that was refused.
        """
        first = {row.id: row for row in reversed(rows)}  # of those given twice, too
        rows = [row for row in rows if first[row.id] is row and row.id not in self.places]
        outcomes = [o for o in outcomes if self.dropped.get(o.id) != (o.status, o.reason) and o.id not in self.places]
        offset = self._append(self._answers, lines := [_line(row) for row in rows])
        for row, line in zip(rows, lines, strict=True):
            self.places[row.id] = self._number << _FILE_BITS | offset
            self.dropped.pop(row.id, None)
            offset += len(line)
        self._append(self._outcomes, [_line(outcome) for outcome in outcomes])
        for outcome in outcomes:
            if outcome.id not in self.places:
                self.dropped[outcome.id] = (sys.intern(outcome.status), sys.intern(outcome.reason))

    def _append(self, path: Path, lines: list[bytes]) -> int:
        """Writes lines at the end of a file and returns where they begin."""
        if not lines:
            return 0
        with open(path, "ab", buffering=0) as file:
            start = file.seek(0, os.SEEK_END)
            try:
                _write(file.fileno(), b"".join(lines))
                os.fsync(file.fileno())
            except OSError as error:
                os.ftruncate(file.fileno(), start)
                raise StageError(
                    f"answers in {self.folder} could not be saved ({error.strerror or error}); what was saved before "
                    "is safe: free some space and run the same command again"
                ) from error
        return start


def _write(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def _line(record: AnswerRow | Outcome) -> bytes:
    # A lone surrogate, which JSON may hold and UTF-8 may not, stays an escape.
    return json.dumps(asdict(record), ensure_ascii=False).encode("utf-8", "backslashreplace") + b"\n"


def outcome_files(folder: str) -> list[Path]:
    return sorted(Path(folder).glob("outcomes*.jsonl"))


def holds_answers(folder: str) -> bool:
    """Whether any turn is answered. Outcomes alone bind nobody: another run may answer what this one skipped."""
    return any(path.stat().st_size for path in answer_files(folder))


def drop_outcomes(folder: str) -> None:
    """Removes the outcomes of other settings, unless a process is at work with them: its lock then refuses this run."""
    if 0 not in writers(folder):
        for path in outcome_files(folder):
            path.unlink()


def read_outcomes(path: Path) -> Iterable[Outcome]:
    """The outcomes of a file in order. Raises ValueError for a line that is none."""
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):  # its writer was killed, or is at it
                return
            try:
                yield Outcome(**json.loads(line))
            except (ValueError, TypeError) as error:
                raise ValueError(f"{path} line {number} is no outcome ({error}); delete the file") from error


def writers(folder: str) -> list[int]:
    """Ranks whose files a process is writing right now."""
    ranks = []
    for path in Path(folder).glob("lock*"):
        with open(path, "rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                ranks.append(int(path.name.rpartition("-")[2]) if "-" in path.name else 0)
    return sorted(ranks)


def _lock(folder: str, rank: int, patience: float = 120.0) -> int:
    """Locks a rank's files until the process ends, and returns the descriptor that holds the lock.

    Rank 0 decides whether a run may write: the others wait until it holds its lock, so that a second run, whose rank 0
    is refused, writes nothing at all.
    """
    path = Path(folder, rank_name("lock", rank))
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    for _ in range(5):  # `writers` of another process holds it for an instant
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            time.sleep(0.05)
    else:
        owner = _owner(path).get("pid", "unknown")
        os.close(descriptor)
        raise ValueError(f"run_dir: process {owner} is writing {folder} already; wait for its end or stop it")
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, json.dumps({"pid": os.getpid(), "run": _run_name()}).encode(), 0)
    end = time.monotonic() + patience
    while rank and _owner(Path(folder, "lock")).get("run") != _run_name():
        if time.monotonic() > end:
            raise StageError(f"rank 0 of this run has not begun to write {folder} within {patience:.0f} seconds")
        time.sleep(0.05)
    return descriptor


def _owner(path: Path) -> dict:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):  # not there yet, or being written
        return {}


def _run_name() -> str:
    """What all ranks of one launch have in common: a second launch on the machine needs another port."""
    return f"{os.environ.get('MASTER_ADDR', '')}:{os.environ.get('MASTER_PORT', '')}"
