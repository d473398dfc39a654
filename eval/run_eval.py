"""Evaluation: every method on the same held-out prompts, interleaved, through the one round loop.

    bash launch.sh eval [CONFIG] --benchmarks gsm8k mt-bench --methods all --temperatures 0 1
    bash launch.sh eval [CONFIG] --sweep_budget 8 16 32 64 128 --sweep_prompts 8
    deepspeed eval/run_eval.py [CONFIG] [--key value ...]   # all GPUs: prompts sharded, one rank writes the report

Resumable: every decoded request is appended to RUN/eval/MARK/rank-N.jsonl, and a rerun decodes only what is missing;
more prompts, benchmarks, temperatures or sweeps continue what is there. Results do not depend on the number of ranks:
each request has its own random stream.
"""

from __future__ import annotations

import os
import sys

if not __package__:
    # Run as a script by DeepSpeed's launcher: Python looks into this folder first, and not into the project's.
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import timedelta

import torch.distributed as dist
from tqdm import tqdm

from data.settings import RunConfig, run_stage
from eval.ask import Asker, conversation, warm_up
from eval.budget import SIZES, BudgetChoice, choose_budget, verify_cost
from eval.budget_policy import BudgetCalibration, calibrate_budget, unmeasured
from eval.decoding.loop import Request, generate
from eval.document import headline
from eval.exactness import find_divergences
from eval.html_report import write_page
from eval.marks import already_done, command_of, fingerprints
from eval.metrics import peak_memory
from eval.plans import chosen_methods, configured_plan, labels, main_plans, sweep_points, tree_options, unique
from eval.records import AR, MAIN, SWEEP, Generation, Plan
from eval.report import collect_settings, write_report, write_whole
from eval.results import build_results
from eval.session import Asked, Session, load_benchmarks, load_session
from eval.store import Asking, Store
from eval.throughput import concurrency_prompts, concurrency_rows, measure_concurrency
from eval.traces import write_traces
from models.checkpoint import finished_drafter

COSTS = "round-cost.json"  # beside the stored answers


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
    folder = finished_drafter(config.run_dir, config.drafter)
    if already_done(config, fingerprints(config, folder)[1]):
        if rank == 0:
            print(f"eval: finished already, see {config.path('report.md')}")
        return
    session = load_session(config, folder, rank, ranks)
    # Once more: a target from the Hub has a commit only when it is in the cache.
    mark, whole = fingerprints(config, folder)
    methods = chosen_methods(config, session.drafter.spec.head_type)
    asked = load_benchmarks(session)
    swept = _swept(config, asked)
    points = sweep_points(config, session.drafter.spec, methods)
    if ranks > 1:
        # A rank may finish its share long before the others.
        dist.init_process_group("gloo", timeout=timedelta(days=7))
    store = Store(config, mark, rank)
    choice = None
    if "dartree_pruned" in methods and config.choose_budget:
        choice = _shared(lambda: choose(session, store, asked), session)
    spec, budget = session.drafter.spec, choice and choice.budget
    plans = {t: main_plans(config, spec, methods, budget, t) for t in dict.fromkeys(config.temperatures)}
    work = Work(asked, plans, swept if points else None, points)
    if "dartree_pruned" in methods and "cost-aware" in config.budget_policy:
        session.calibration = _shared(lambda: calibrate(session, store, asked), session)
    decode(session, store, work)
    if ranks > 1:
        dist.barrier()
    if rank == 0:
        finish(session, Store(config, mark, rank), work, choice, fingerprint=whole, command=command)
    if ranks > 1:
        dist.destroy_process_group()


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


def choose(session: Session, store: Store, asked: list[Asked]) -> BudgetChoice:
    """The budget for this machine, from training prompts only; kept for a resumed evaluation."""
    if store.choice is not None:
        return store.choice
    config = session.config
    answers = []
    prompts = session.training_prompts(8, config.seed, _evaluated(session, asked))
    for ids in tqdm(prompts, desc="budget: acceptance on training prompts"):
        proposer = session.proposer("dartree_pruned")
        answers += generate(session.target, proposer, [Request(ids, min(48, config.max_new_tokens))])
    sizes = [*(s for s in SIZES if s < config.budget), config.budget]
    context = len(ids) + config.max_new_tokens // 2
    # The first answer warms up.
    choice = choose_budget(
        answers[1:] or answers, verify_cost(session.target, session.drafter.spec.target_layer_ids, sizes, context)
    )
    store.save_choice(choice)
    return choice


def calibrate(session: Session, store: Store, asked: list[Asked]) -> BudgetCalibration:
    """Costs of this machine for the cost-aware budget, from training prompts only.

    There is one calibration of all stored answers, kept beside them: another temperature has another folder
    (eval/marks.py), and a later evaluation with more requests at once adds their costs to those that are there.
    """
    config = session.config
    path = store.folder / COSTS
    known = BudgetCalibration.from_dict(json.loads(path.read_text())) if path.is_file() else None
    if known is not None and not unmeasured(known, config.concurrency):
        return known
    print("eval: measures what a round costs on this machine")
    plan = configured_plan(config, session.drafter.spec, "dartree_pruned")
    measured = calibrate_budget(
        session.target,
        session.drafter,
        tree_options(config, plan),
        session.training_prompts(8, config.seed, _evaluated(session, asked)),
        config.concurrency,
        (64, max(128, config.max_prompt_length + config.max_new_tokens)),
        config.temperatures[0],
        known,
    )
    write_whole(path, json.dumps(measured.to_dict()) + "\n")
    return BudgetCalibration.from_dict(measured.to_dict())  # to the last bit what a resumed evaluation reads


def _evaluated(session: Session, asked: list[Asked]) -> set[str]:
    """First turns of everything that is evaluated: nothing is chosen or measured on them beforehand."""
    prompts = [prompt for a in asked for prompt in a.prompts]
    if session.config.concurrency:
        prompts += concurrency_prompts(session)[1]
    return {prompt.turns[0] for prompt in prompts}


def _shared(compute, session: Session):
    """Rank 0 measures; everyone uses its answer."""
    box = [compute() if session.rank == 0 else None]
    if session.ranks > 1:
        dist.broadcast_object_list(box, src=0)
    return box[0]


def finish(session: Session, store: Store, work: Work, choice: BudgetChoice | None, **marks) -> None:
    """Compares every greedy text with AR's, and writes the report."""
    generations, prompts = collect(session, store, work)
    cells = []
    if session.config.concurrency:
        temperature, plans = next(iter(work.plans.items()))
        cells = measure_concurrency(session, store.folder, plans, temperature)
    settings = collect_settings(
        session.config,
        session.target,
        session.drafter,
        session.drafter_folder,
        budget_choice=asdict(choice) if choice else None,
        budget_calibration=session.calibration.to_dict() if session.calibration else None,
        ranks=session.ranks,
        peak_memory_gb=peak_memory(generations),
        seconds=sum(g.prefill_seconds + g.seconds for g in generations),
        **marks,
    )
    results = build_results(
        generations,
        settings,
        find_divergences(session.target, generations, prompts, session.config.near_tie),
        session.config.seed,
        generate_speeds(store, prompts),
        [
            {"benchmark": a.name, "source": a.source, "prompts": len(a.prompts), "skipped": a.skipped}
            for a in work.asked
        ],
        work.points,
        concurrency_rows(cells, labels(unique([cell.plan for cell in cells])), session.config.seed),
    )
    traces = write_traces(session, [question for asked in work.asked for question in asked.questions])
    write_page(session.config.run_dir, results, traces)
    write_report(session.config.run_dir, results, generations)
    print(headline(results))
    print(f"eval: the whole report is {session.config.path('report.md')}")


def collect(session: Session, store: Store, work: Work) -> tuple[list[Generation], dict[Asking, list[int]]]:
    """This evaluation's answers among all that the store holds, in the order of the tables, and its questions with
    their prompts."""
    generations: list[Generation] = []
    prompts: dict[Asking, list[int]] = {}
    parts = [(MAIN, asked, t, plans) for t, plans in work.plans.items() for asked in work.asked]
    if work.swept:
        parts.append((work.sweep_phase, work.swept, next(iter(work.plans)), work.sweep_plans))
    for phase, asked, temperature, plans in parts:
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
