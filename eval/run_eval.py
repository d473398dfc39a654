"""Evaluation: every method on the same held-out prompts, interleaved, through the one round loop.

    bash launch.sh eval [CONFIG] --benchmarks gsm8k mt-bench --methods all --temperatures 0 1
    bash launch.sh eval [CONFIG] --sweep_budget 8 16 32 64 128 --sweep_prompts 8
    deepspeed eval/run_eval.py [CONFIG] [--key value ...]   # all GPUs: prompts sharded, one rank writes the report

Resumable: every decoded request is appended to RUN/eval/MARK/rank-N.jsonl, and a rerun decodes only what is missing;
more prompts, benchmarks, temperatures or sweeps continue what is there, on the same machine with the same libraries.
Answers do not depend on the number of ranks: each request has its own random stream.
"""

from __future__ import annotations

import os
import sys

if not __package__:
    # Run as a script by DeepSpeed's launcher: Python looks into this folder first, and not into the project's.
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

import hashlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta

import torch.distributed as dist

from data.settings import RunConfig, run_stage
from eval.ask import Asker, conversation, warm_up
from eval.beforehand import calibrate, check_memory, choose
from eval.budget import BudgetChoice
from eval.document import headline
from eval.environment import git_commit
from eval.exactness import compare_cells, find_divergences
from eval.html_report import write_page
from eval.marks import already_done, command_of, fingerprints, measured_on, others
from eval.metrics import peak_memory
from eval.plans import chosen_methods, labels, main_plans, sweep_points, unique
from eval.records import AR, MAIN, SWEEP, Generation, Plan
from eval.report import collect_settings, write_report
from eval.results import build_results
from eval.session import Asked, Session, load_benchmarks, load_session, take_device
from eval.store import Asking, Store
from eval.throughput import concurrency_requests, concurrency_rows, measure_concurrency
from eval.traces import write_traces
from models.checkpoint import finished_drafter


def main(argv: list[str]) -> int:
    return run_stage("eval", argv, lambda config: evaluate(config, command_of(argv)))


@dataclass
class Work:
    """What is to be decoded.

    Attributes:
        plans: by temperature, AR first.
        swept: the benchmark of the sweeps, cut to their prompts; None without a sweep.
        points: (knob, value, plan) of the sweeps.
    """

    asked: list[Asked]
    plans: dict[float, list[Plan]]
    swept: Asked | None
    points: list[tuple[str, float, Plan]]

    @property
    def parts(self) -> list[tuple[str, Asked, float, list[Plan]]]:
        """(Phase, benchmark, temperature, plans) of everything, in the order of the tables."""
        parts = [(MAIN, asked, t, plans) for t, plans in self.plans.items() for asked in self.asked]
        if self.swept:
            parts.append((self.sweep_phase, self.swept, next(iter(self.plans)), self.sweep_plans))
        return parts

    @property
    def sweep_plans(self) -> list[Plan]:
        return unique([Plan(AR), *(plan for _, _, plan in self.points)])

    @property
    def sweep_phase(self) -> str:
        """A sweep over other points is another phase: its plans were not decoded in turn with these."""
        ids = " ".join(plan.id for plan in self.sweep_plans)
        return f"{SWEEP}-{hashlib.sha256(ids.encode()).hexdigest()[:8]}"


def evaluate(config: RunConfig, command: str) -> None:
    """Runs what is missing, then writes RUN/results.json, report.md and plots. Raises ValueError for user mistakes."""
    rank, ranks = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if ranks > 1:
        # A rank may finish its share long before the others.
        dist.init_process_group("gloo", timeout=timedelta(days=7))
    _evaluate(config, command, rank, ranks)
    if ranks > 1:
        dist.destroy_process_group()


def _evaluate(config: RunConfig, command: str, rank: int, ranks: int) -> None:
    folder, commit = finished_drafter(config.run_dir, config.drafter), git_commit()
    measured = measured_on(config, take_device(config, ranks).split(":")[0], ranks)
    if _shared(lambda: already_done(config, fingerprints(config, folder, measured)[1]), rank, ranks):
        if rank == 0:
            print(f"eval: finished already, see {config.path('report.md')}")
        return
    session = load_session(config, folder, rank, ranks)
    # Once more: a target from the Hub has a commit only when it is in the cache.
    mark, whole = _shared(lambda: fingerprints(config, folder, measured), rank, ranks)
    methods = chosen_methods(config, session.drafter.spec.head_type)
    asked = load_benchmarks(session)
    swept = _swept(config, asked)
    points = sweep_points(config, session.drafter.spec, methods)
    work = Work(asked, _plans(session, methods, {}), swept if points else None, points)
    check_memory(session, [(part, plans) for _, part, _, plans in work.parts], next(iter(work.plans.values())))
    if rank == 0 and (count := others(config, mark)):
        print(
            f"eval: starts a new measurement; {count} in {config.path('eval')} had other options, weights, versions or "
            "another machine"
        )
    store = Store(config, mark, rank)
    choices = {}
    if "dartree_pruned" in methods and config.choose_budget:
        choices = _shared(lambda: choose(session, store, asked), rank, ranks)
        work.plans = _plans(session, methods, choices)
    if "dartree_pruned" in methods and "cost-aware" in config.budget_policy:
        session.calibration = _shared(lambda: calibrate(session, store, asked), rank, ranks)
    if rank == 0:
        store.add_commit(commit)
    decode(session, store, work)
    if ranks > 1:
        dist.barrier()
    if rank == 0:
        store = Store(config, mark, rank)
        finish(
            session, store, work, choices.values(), whole, command=command, git_commit=commit, git_commits=store.commits
        )


def _plans(session: Session, methods: Sequence[str], choices: Mapping[float, BudgetChoice]) -> dict[float, list[Plan]]:
    """The plans of each temperature, with those at the budget that was chosen for it."""
    config, spec = session.config, session.drafter.spec
    budgets = {t: choices[t].budget if t in choices else None for t in config.temperatures}
    return {t: main_plans(config, spec, methods, budget, t) for t, budget in budgets.items()}


def decode(session: Session, store: Store, work: Work) -> None:
    """Everything that is missing, benchmark by benchmark."""
    temperatures = list(work.plans)
    for temperature, plans in work.plans.items():
        warm_up(session, plans, temperature)
        for asked in work.asked:
            Asker(session, store, plans, temperature).ask(asked)
    if work.swept:
        warm_up(session, work.sweep_plans, temperatures[0])
        Asker(session, store, work.sweep_plans, temperatures[0], work.sweep_phase).ask(work.swept)


def _swept(config: RunConfig, asked: list[Asked]) -> Asked | None:
    """The benchmark of the sweeps, with as many prompts as they take. Raises ValueError for one that is not asked."""
    names = [a.name for a in asked]
    wanted = config.sweep_benchmark or names[0]
    if wanted not in names:
        raise ValueError(f"sweep_benchmark: {wanted!r} is not among the benchmarks {', '.join(names)}")
    whole = asked[names.index(wanted)]
    return Asked(whole.name, whole.source, whole.prompts[: config.sweep_prompts], whole.skipped)


def _shared(compute: Callable, rank: int, ranks: int):
    """Rank 0 measures; everyone uses its answer, or raises its ValueError."""
    box: list = [None, None]
    if rank == 0:
        try:
            box[0] = compute()
        except ValueError as error:
            box[1] = error
    if ranks > 1:
        dist.broadcast_object_list(box, src=0)
    if box[1] is not None:
        raise box[1]
    return box[0]


def finish(
    session: Session, store: Store, work: Work, choices: Collection[BudgetChoice], fingerprint: str, **settings
) -> None:
    """Compares every greedy text with AR's, measures several requests at once, and writes the report.

    Args:
        fingerprint: of the finished results. Until all is measured they carry none, so that a rerun goes on.
    """
    config, target = session.config, session.target
    generations, prompts = collect(session, store, work)
    settings |= {
        "budget_choice": [asdict(choice) for choice in choices] or None,
        "budget_calibration": session.calibration.to_dict() if session.calibration else None,
        "ranks": session.ranks,
        "peak_memory_gb": peak_memory(generations),
        "seconds": sum(g.prefill_seconds + g.seconds for g in generations),
        "fingerprint": None,
    }
    results = build_results(
        generations,
        collect_settings(config, target, session.drafter, session.drafter_folder, **settings),
        find_divergences(target, generations, prompts, config.near_tie),
        config.seed,
        generate_speeds(store, prompts),
        [_benchmark_row(asked) for asked in work.asked],
        work.points,
    )
    traces = write_traces(session, [question for asked in work.asked for question in asked.questions])
    if config.concurrency:
        _write(session, results, traces, generations)  # stands whatever becomes of the longer measurement
        results["concurrency"] = _concurrency(session, store, work)
    results["settings"]["fingerprint"] = fingerprint
    _write(session, results, traces, generations)
    print(headline(results))
    print(f"eval: the whole report is {config.path('report.md')}")


def _benchmark_row(asked: Asked) -> dict:
    return {
        "benchmark": asked.name,
        "source": asked.source,
        "prompts": len(asked.prompts),
        "turns": sum(len(prompt.turns) for prompt in asked.prompts),
        "skipped": asked.skipped,
    }


def _write(session: Session, results: dict, traces: dict | None, generations: list[Generation]) -> None:
    write_page(session.config.run_dir, results, traces)
    write_report(session.config.run_dir, results, generations)


def _concurrency(session: Session, store: Store, work: Work) -> list[dict]:
    """The rows of several requests at once, at the first temperature."""
    temperature, plans = next(iter(work.plans.items()))
    cells = measure_concurrency(session, store.folder, plans, temperature)
    prompts = [request.prompt_ids for request in concurrency_requests(session, temperature)[1]]
    differences = compare_cells(session.target, cells, prompts, session.config.near_tie)
    return concurrency_rows(cells, labels(unique([cell.plan for cell in cells])), session.config.seed, differences)


def collect(session: Session, store: Store, work: Work) -> tuple[list[Generation], dict[Asking, list[int]]]:
    """This evaluation's answers among all that the store holds, in the order of the tables, and its questions with
    their prompts."""
    generations: list[Generation] = []
    prompts: dict[Asking, list[int]] = {}
    for phase, asked, temperature, plans in work.parts:
        own = dict(pair for q in asked.questions for pair in conversation(session, store, phase, q, temperature))
        generations += store.answers(own, plans)
        prompts |= own
    return generations, prompts


def generate_speeds(store: Store, prompts: Mapping[Asking, list[int]]) -> dict[str, float]:
    """Tokens per second of target.generate by benchmark, the prefill outside, as for our own methods."""
    sums: dict[str, list[float]] = {}
    for where, ids in prompts.items():
        if time := store.find_time(where, ids):
            total = sums.setdefault(where[1], [0.0, 0.0])
            total[0], total[1] = total[0] + time[0], total[1] + time[1]
    return {name: tokens / seconds for name, (tokens, seconds) in sums.items() if seconds > 0}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
