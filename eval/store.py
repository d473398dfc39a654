"""What an evaluation has decoded so far, on disk: a file for each rank, a line for each decoded request."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from data.answers import make_folder
from data.settings import RunConfig

from .budget import BudgetChoice
from .metrics import tau_mean, tokens_per_second
from .records import Generation


class Store:
    """What has been decoded, appended to a file of this rank as it comes and read back from all ranks' files.

    Each fingerprint of settings has its own folder, so that no evaluation removes what another one decoded.
    """

    def __init__(self, config: RunConfig, mark: str, rank: int):
        self.folder = Path(config.path("eval", mark[:12]))
        make_folder(str(self.folder), "run_dir")
        self.path = self.folder / f"rank-{rank}.jsonl"
        self.generations: dict[tuple, Generation] = {}
        self.prompt_ids: dict[tuple[str, str], list[int]] = {}
        self.generate_times: dict[tuple, tuple[int, float]] = {}
        self.choice: BudgetChoice | None = None
        for path in sorted(self.folder.glob("rank-*.jsonl")):
            self._read(path)

    def _read(self, path: Path) -> None:
        """Takes over an interrupted run. Only the rank that owns a file cuts its half-written last line."""
        lines = path.read_bytes().splitlines(keepends=True)
        whole = [line for line in lines if line.endswith(b"\n")]
        if len(whole) < len(lines) and path == self.path:
            path.write_bytes(b"".join(whole))
        for line in whole:
            row = json.loads(line)
            if "choice" in row:
                self.choice = BudgetChoice(**row["choice"])
            elif "time" in row:
                self.generate_times[tuple(row["key"])] = tuple(row["time"])
            else:
                self.generations[tuple(row["key"])] = Generation.from_dict(row["generation"])
                self.prompt_ids[tuple(row["key"][:2])] = row["prompt_ids"]

    def _append(self, row: dict) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(row) + "\n")

    def add(self, key: tuple, generation: Generation, prompt_ids: list[int]) -> None:
        self.generations[key], self.prompt_ids[key[:2]] = generation, prompt_ids
        self._append({"key": key, "generation": generation.to_dict(), "prompt_ids": prompt_ids})

    def add_time(self, key: tuple, time: tuple[int, float]) -> None:
        self.generate_times[key] = time
        self._append({"key": key, "time": time})

    def save_choice(self, choice: BudgetChoice) -> None:
        self.choice = choice
        self._append({"choice": asdict(choice)})

    def progress(self, benchmark: str, temperature: float) -> str:
        """tau and speed-up so far of the pruned tree (or of the last method)."""
        here = [g for g in self.generations.values() if (g.benchmark, g.temperature) == (benchmark, temperature)]
        best = [g for g in here if g.method == "dartree_pruned"] or here
        ar_speed = tokens_per_second([g for g in here if g.method == "ar"])
        speed, tau = tokens_per_second(best), tau_mean(best)
        if not speed or not ar_speed or tau is None:
            return ""
        return f"{best[0].method} tau {tau:.2f}, {speed / ar_speed:.2f}x"
