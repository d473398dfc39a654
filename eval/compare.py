"""Stage `compare`: the drafters of several finished evaluations on the prompts that all of them answered.

    bash launch.sh compare RUN RUN [RUN ...]

A RUN is looked for from where the command was typed, then in the project's folder. The first one is the one that the
others are compared with. Other prompts under the same ids are left out, and their number is told. Differences in tau
are paired by prompt; speed-ups are each over the autoregressive decoding of its own run and carry no test, since runs
were timed at different hours. p is corrected for all differences of a table (Holm), and bold marks p <= 0.05. Writes
nothing.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from data.settings import StageError

from . import bootstrap
from .records import AR, MAIN, Generation, Plan
from .table import number, ranged, signed, table

# .marks, .plans and .report are imported late: they cost seconds that --help should not.

# Answers under another of these are no pairs; nor are those of another target.
SAME = (
    "target_adapter", "dtype", "quantization", "max_new_tokens", "seed", "confidence_threshold", "adaptive_budget",
)  # fmt: skip


@dataclass
class Run:
    """A finished evaluation: its name in tables, its settings, and its main answers by (benchmark, T, plan)."""

    name: str
    settings: dict
    answers: dict[tuple[str, float, Plan], dict[tuple[str, int], Generation]]


def main(argv: list[str]) -> int:
    if any(word in ("-h", "--help") for word in argv):
        print(__doc__.strip())
        return 0
    left_out = ""
    try:
        runs = load_runs(argv)
        left_out = drop_other_prompts(runs)
        rows = compare(runs)
    except (ValueError, StageError, OSError) as error:
        print(f"compare: {' '.join(f'{error} {left_out}'.split())}", file=sys.stderr)
        return 2 if isinstance(error, ValueError) else 1
    print(comparison_table(rows))
    if left_out:
        print(left_out)
    return 0


def load_runs(folders: Sequence[str]) -> list[Run]:
    """Raises ValueError for fewer than two, one twice, one without results, or runs whose answers are no pairs."""
    if len(folders) < 2 or any(folder.startswith("-") for folder in folders):
        raise ValueError(f"give two or more run folders, got {' '.join(folders) or 'none'}")
    paths: dict[Path, str] = {}
    for folder in folders:
        path = find_run(folder).resolve()
        if path in paths:
            raise ValueError(f"{folder} is the same run as {paths[path]}")
        paths[path] = folder
    runs = [load_run(path, name) for path, name in zip(paths, short_names(folders), strict=True)]
    for run in runs[1:]:
        _check_pairs(runs[0], run)
    return runs


def find_run(folder: str) -> Path:
    """The folder as seen from where the command was typed, or else from the project, where other stages look.

    Raises ValueError when neither holds results.
    """
    from .marks import ROOT

    for path in (Path(folder), ROOT / folder):
        if (path / "results.json").is_file():
            return path
    raise ValueError(f"{folder} has no results.json; `bash launch.sh eval` writes it")


def _check_pairs(first: Run, run: Run) -> None:
    # Weights tell targets apart; older results know only the name.
    known = first.settings.get("target_identity") and run.settings.get("target_identity")
    for key in ("target_identity" if known else "target_name", *SAME):
        theirs, ours = first.settings.get(key), run.settings.get(key)
        if ours != theirs:
            raise ValueError(f"{key} is {theirs!r} in {first.name} and {ours!r} in {run.name}: no pairs")


def short_names(folders: Sequence[str]) -> list[str]:
    """The last parts of the paths, or the paths where these are not unique."""
    names = [Path(folder).resolve().name for folder in folders]
    return names if len(set(names)) == len(names) else [os.path.normpath(folder) for folder in folders]


def load_run(path: Path, name: str) -> Run:
    """Raises ValueError for files that no evaluation wrote, OSError for one that cannot be read; both name it."""
    from .report import read_results

    settings = read_results(path / "results.json")["settings"]
    if not isinstance(settings.get("seed"), int):
        raise ValueError(f"{path / 'results.json'} holds no seed in its settings")
    run = Run(name, settings, {})
    for g in _generations(path / "generations.jsonl"):
        if g.phase == MAIN:
            run.answers.setdefault((g.benchmark, g.temperature, common_plan(g.plan)), {})[g.answer] = g
    return run


def _generations(path: Path) -> Iterator[Generation]:
    with path.open("rb") as lines:
        for place, line in enumerate(lines, 1):
            try:
                generation = Generation.from_dict(json.loads(line))
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise ValueError(f"{path} is broken: line {place} is no answer ({error!r})") from error
            yield generation


def drop_other_prompts(runs: Sequence[Run]) -> str:
    """Takes out of all runs the answers that stand under one id but answer other prompts: a benchmark's file changed.

    Older answers do not tell their prompt and are taken by their id.

    Returns:
        A line that counts them by benchmark; empty when there are none.
    """
    prompts: dict[tuple, set[str]] = defaultdict(set)
    groups = [(key[:2], group) for run in runs for key, group in run.answers.items()]
    for where, group in groups:
        for answer, generation in group.items():
            if generation.prompt:
                prompts[*where, answer].add(generation.prompt)
    others = [key for key, found in prompts.items() if len(found) > 1]
    for where, group in groups:
        for benchmark, temperature, answer in others:
            if where == (benchmark, temperature):
                group.pop(answer, None)
    counts = Counter(f"{benchmark}, temperature {temperature:g}" for benchmark, temperature, _ in others)
    told = "; ".join(f"{count} of {where}" for where, count in counts.items())
    return f"(Left out, other prompts under the same ids: {told})" if told else ""


def common_plan(plan: Plan) -> Plan:
    """The plan without what belongs to the drafter: a chain is as long as its block."""
    from .plans import CHAINS

    return replace(plan, note="", budget=0) if plan.method in CHAINS else replace(plan, note="")


def compare(runs: Sequence[Run]) -> list[dict]:
    """A row for each (benchmark, temperature, plan) that at least two runs share, and each run that has it.

    Returns:
        Rows {benchmark, temperature, label, run, prompts, tau, tau_interval, speedup, difference, difference_interval,
        difference_p}; the differences are to the first of these runs, null in its own row.

    Raises:
        StageError: nothing was answered by two runs.
    """
    from .plans import labels, unique

    keys = list(dict.fromkeys(key for run in runs for key in run.answers if key[2].method != AR))
    names = labels(unique([plan for _, _, plan in keys]))
    rows = []
    for benchmark, temperature, plan in keys:
        sharing = [run for run in runs if (benchmark, temperature, plan) in run.answers]
        where = {"benchmark": benchmark, "temperature": temperature, "label": names[plan.id]}
        rows += [where | row for row in _shared(sharing, (benchmark, temperature, plan))]
    if not rows:
        raise StageError(f"no answer of one method is in two of {', '.join(run.name for run in runs)}")
    return rows


def _shared(runs: Sequence[Run], key: tuple[str, float, Plan]) -> list[dict]:
    """Rows of one plan, over the answers that have rounds in all these runs."""
    groups = [run.answers[key] for run in runs]
    common = sorted(a for a in set.intersection(*map(set, groups)) if all(group[a].rounds for group in groups))
    if len(runs) < 2 or not common:
        return []
    prompts = sorted({prompt for prompt, _ in common})
    weights_SP = bootstrap.draws(len(prompts), runs[0].settings["seed"], key[0])
    rows, first = [], None
    for run, group in zip(runs, groups, strict=True):
        figures = bootstrap.resample([group[a] for a in common], prompts, weights_SP)
        ar = run.answers.get((*key[:2], Plan(AR)), {})
        speedup = None
        if all(a in ar for a in common):
            base = bootstrap.resample([ar[a] for a in common], prompts, weights_SP)
            speedup = (base.seconds_per_token / figures.seconds_per_token).estimate
        gain = figures.tau - first if first else None
        rows.append(
            {
                "run": run.name,
                "prompts": len(prompts),
                "tau": figures.tau.estimate,
                "tau_interval": figures.tau.interval,
                "speedup": speedup,
                "difference": gain and gain.estimate,
                "difference_interval": gain and gain.interval,
                "difference_p": gain and gain.p_value,
            }
        )
        first = first or figures.tau
    return rows


def comparison_table(rows: Sequence[dict]) -> str:
    """One Markdown table for each benchmark and temperature."""
    head = ["method", "run", "prompts", "tau (95 %)", "tau - first run's (95 %), p", "speed-up"]
    parts = []
    groups: dict[tuple[str, float], list[dict]] = {}
    for row in rows:
        groups.setdefault((row["benchmark"], row["temperature"]), []).append(row)
    for (benchmark, temperature), group in groups.items():
        # Many tests stand in one table: Holm's correction over them.
        p_values = bootstrap.holm([row["difference_p"] for row in group])
        body = [
            [row["label"], row["run"], str(row["prompts"]), ranged(row["tau"], row["tau_interval"])]
            + [signed(row["difference"], row["difference_interval"], p), number(row["speedup"], 2)]
            for row, p in zip(group, p_values, strict=True)
        ]
        parts.append(f"{benchmark}, temperature {temperature:g}:\n\n{table(head, body)}")
    return "\n".join(parts)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
