"""What an evaluation has decoded so far, on disk: a file for each rank, a line for each decoded request."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from data.answers import drop_half_line, make_folder
from data.settings import RunConfig

from .budget import BudgetChoice
from .marks import FOLDER_DIGITS
from .metrics import tau_mean, tokens_per_second
from .records import AR, Generation, Plan

# phase, benchmark, prompt id, turn, temperature: a question as all plans of a phase answer it
Asking = tuple[str, str, str, int, float]
Ids = tuple[int, ...]  # of a prompt


def whole_rows(path: Path) -> list[dict]:
    """The rows of a JSONL file that is appended to; a last line without its end (its writer was killed) is left out."""
    content = path.read_bytes() if path.is_file() else b""
    return [json.loads(line) for line in content.split(b"\n")[:-1]]


class Store:
    """What has been decoded, appended to a file of this rank as it comes and read back from all ranks' files.

    Each fingerprint of settings has its own folder, so that no evaluation removes what another one decoded. An answer
    counts only for the very prompt tokens that it answered: a benchmark file may have changed under its ids.

    Attributes:
        choices: the budget of this machine, by temperature.
        used: `prompt_digest` of every training prompt that these choices, or the costs of a round, come from.
        commits: of the project, of every run that took part, the first one first.
    """

    def __init__(self, config: RunConfig, mark: str, rank: int):
        self.folder = Path(config.path("eval", mark[:FOLDER_DIGITS]))
        make_folder(str(self.folder), "run_dir")
        self.path = self.folder / f"rank-{rank}.jsonl"
        self.generations: dict[tuple[Asking, str, Ids], Generation] = {}
        self.generate_times: dict[tuple[Asking, Ids], tuple[int, float]] = {}
        self.choices: dict[float, BudgetChoice] = {}
        self.used: set[str] = set()
        self.commits: list[str] = []
        for path in sorted(self.folder.glob("rank-*.jsonl")):
            self._read(path)

    def _read(self, path: Path) -> None:
        """Takes over an interrupted run. Only the rank that owns a file cuts its half-written last line."""
        if path == self.path:
            drop_half_line(str(path.parent), path.name)
        for row in whole_rows(path):
            if "choice" in row:
                self._choose(BudgetChoice(**row["choice"]))
            elif "used" in row:
                self.used.update(row["used"])
            elif "commit" in row:
                self.commits.append(row["commit"])
            elif "time" in row:
                self.generate_times[tuple(row["asking"]), tuple(row["prompt_ids"])] = tuple(row["time"])
            else:
                self._keep(Generation.from_dict(row["generation"]), row["prompt_ids"])

    def _keep(self, generation: Generation, prompt_ids: list[int]) -> None:
        generation.prompt = prompt_digest(prompt_ids)
        self.generations[asking(generation), generation.plan.id, tuple(prompt_ids)] = generation

    def _append(self, row: dict) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(row) + "\n")

    def find(self, where: Asking, plan: Plan, prompt_ids: list[int]) -> Generation | None:
        """The stored answer to exactly this prompt, or None."""
        return self.generations.get((where, plan.id, tuple(prompt_ids)))

    def find_time(self, where: Asking, prompt_ids: list[int]) -> tuple[int, float] | None:
        """The stored time of target.generate for exactly this prompt, or None."""
        return self.generate_times.get((where, tuple(prompt_ids)))

    def add(self, generation: Generation, prompt_ids: list[int]) -> None:
        self._keep(generation, prompt_ids)
        self._append({"generation": generation.to_dict(), "prompt_ids": prompt_ids})

    def add_time(self, where: Asking, prompt_ids: list[int], time: tuple[int, float]) -> None:
        self.generate_times[where, tuple(prompt_ids)] = time
        self._append({"asking": where, "prompt_ids": prompt_ids, "time": time})

    def save_choice(self, choice: BudgetChoice) -> None:
        self._choose(choice)
        self._append({"choice": asdict(choice)})

    def _choose(self, choice: BudgetChoice) -> None:
        self.choices[choice.temperature] = choice

    def add_used(self, digests: Iterable[str]) -> None:
        if new := sorted(set(digests) - self.used):
            self.used.update(new)
            self._append({"used": new})

    def add_commit(self, commit: str | None) -> None:
        """commit: what the project's code is now; None outside a clone."""
        if commit and commit not in self.commits:
            self.commits.append(commit)
            self._append({"commit": commit})

    def answers(self, prompts: Mapping[Asking, list[int]], plans: Sequence[Plan]) -> list[Generation]:
        """Stored answers of these plans to these prompts, plan by plan, with the plans' notes of this run."""
        found = []
        for plan in plans:
            for where, ids in prompts.items():
                generation = self.find(where, plan, ids)
                if generation is not None:
                    generation.plan = plan
                    found.append(generation)
        return found

    def progress(self, phase: str, benchmark: str, temperature: float, plan: Plan) -> str:
        """tau and speed-up of one plan so far, over the prompts that AR has decoded too."""
        latest = {(where, plan_id): g for (where, plan_id, _), g in self.generations.items()}
        here = [g for (a, _), g in latest.items() if (a[0], a[1], a[4]) == (phase, benchmark, temperature)]
        own = [g for g in here if g.plan.id == plan.id]
        done = {g.answer for g in own}
        ar = tokens_per_second([g for g in here if g.method == AR and g.answer in done])
        speed, tau = tokens_per_second(own), tau_mean(own)
        if not speed or not ar or tau is None:
            return ""
        return f"{plan.method} B={plan.budget} tau {tau:.2f}, {speed / ar:.2f}x"


def prompt_digest(prompt_ids: list[int]) -> str:
    return hashlib.sha256(json.dumps(prompt_ids).encode()).hexdigest()[:16]


def asking(g: Generation) -> Asking:
    return g.phase, g.benchmark, g.prompt_id, g.turn, g.temperature
