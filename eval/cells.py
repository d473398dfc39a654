"""One run of one plan over all requests at one concurrency, and the file of such cells."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from data.answers import drop_half_line

from .records import Plan
from .store import whole_rows

CELLS = "concurrency.jsonl"


@dataclass
class Cell:
    """One plan that answered all prompts once, so many at a time.

    Attributes:
        prompts: hash of the token ids and limits of all requests: a cell counts for exactly these.
        seconds: wall time from the first prefill to the last token; prefill_seconds is the part spent in prefills.
        answers: token ids of each answer, in the order of the requests.
        tokens: emitted by all answers, the prefills' first tokens among them.
        rounds: verifying target forwards; request_rounds sums the requests that took part in each.
        taus: mean over rounds of each answer; None for an answer without a round.
        nodes: draft tokens verified, summed over request_rounds.
        ms_per_round: wall milliseconds of the parts of a mean round.
        stopped: answers by the reason why they ended.
    """

    benchmark: str
    temperature: float
    plan: Plan
    concurrency: int
    run: int
    prompts: str
    requests: int
    answers: list[list[int]]
    tokens: int
    seconds: float
    prefill_seconds: float
    rounds: int
    request_rounds: int
    taus: list[float | None]
    nodes: int
    ms_per_round: dict[str, float]
    stopped: dict[str, int]
    kv_cache_gb: float
    peak_memory_gb: float | None

    @property
    def key(self) -> tuple:
        return self.benchmark, self.temperature, self.plan.id, self.concurrency, self.run, self.prompts

    def to_dict(self) -> dict:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict) -> Cell:
        return cls(**{**data, "plan": Plan(**data["plan"])})


class CellStore:
    """Cells on disk, a line each, appended as they come."""

    def __init__(self, path: Path):
        self.path = path
        drop_half_line(str(path.parent), path.name)
        cells = [Cell.from_dict(row) for row in whole_rows(path)]
        self.cells: dict[tuple, Cell] = {cell.key: cell for cell in cells}

    def add(self, cell: Cell) -> None:
        self.cells[cell.key] = cell
        with self.path.open("a") as file:
            file.write(json.dumps(cell.to_dict()) + "\n")
