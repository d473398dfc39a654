"""Throughput with several requests decoded at once (continuous batching): tokens a second against AR at the same load.

All prompts of a benchmark are decoded by every plan at every concurrency: one run of one plan is one *cell*, in which a
waiting request joins as soon as another ends. The wall time of a cell goes from the first prefill to the last token,
prefills inside, as a server's users see it. Greedy texts are compared with AR's at the lowest concurrency: what a batch
changes would change AR's as well. Cells of one concurrency follow each other in random order, each plan warmed up
before, so that drift of the machine cancels; AR is one of the plans. Resumable cell by cell.
"""

from __future__ import annotations

import hashlib
import json
import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import islice
from pathlib import Path

import numpy as np
from tqdm import tqdm

from data.benchmarks import load_benchmark
from data.prompts import Prompt

from .bootstrap import Resampled, draws, ratio, runs_interval
from .cells import CELLS, Cell, CellStore
from .decoding.loop import Request, Served, serve
from .memory import PeakMemory
from .records import AR, PARTS, Plan
from .results import plan_fields
from .session import Session

WARM_UP_TOKENS = 8


def concurrency_prompts(session: Session) -> tuple[str, list[Prompt]]:
    """(Name of the first benchmark, its prompts that are decoded at every concurrency: their first turns)."""
    config = session.config
    wanted = config.concurrency_prompts
    loaded = load_benchmark(config.benchmarks[0], wanted, config.seed, config.benchmark_dir)
    usable = (p for p in loaded.prompts if session.usable_ids(p.turns[:1], [], p.tools) is not None)
    return loaded.name, list(islice(usable, wanted))


def concurrency_requests(session: Session, temperature: float = 0.0) -> tuple[str, list[Request]]:
    """(Name of the first benchmark, the requests that every cell answers)."""
    config, (benchmark, prompts) = session.config, concurrency_prompts(session)
    return benchmark, [
        Request(
            session.usable_ids(prompt.turns[:1], [], prompt.tools),
            config.max_new_tokens,
            f"{config.seed}/{benchmark}/{prompt.id}/0/{temperature:g}",
        )
        for prompt in prompts
    ]


def measure_concurrency(session: Session, folder: Path, plans: Sequence[Plan], temperature: float = 0.0) -> list[Cell]:
    """Decodes what is missing of `session.config.concurrency` x plans x runs; returns all cells of these.

    Args:
        folder: where `concurrency.jsonl` is kept.
        plans: AR among them.
    """
    config = session.config
    benchmark, requests = concurrency_requests(session, temperature)
    store, digest = CellStore(folder / CELLS), _digest(requests)
    wanted = []
    for run in range(config.concurrency_runs):
        for level in dict.fromkeys(config.concurrency):
            order = list(plans)
            random.Random(f"{config.seed}/{run}/{level}").shuffle(order)
            wanted += [((benchmark, temperature, plan.id, level, run, digest), plan) for plan in order]
    missing = [(key, plan) for key, plan in wanted if key not in store.cells]
    warm: set[tuple] = set()
    bar = tqdm(missing, desc=f"concurrency {benchmark} T={temperature:g}")
    for key, plan in bar:
        level, run = key[3:5]
        bar.set_postfix_str(f"{plan.id}, {level} at once")
        if (plan.id, level) not in warm:
            _warm_up(session, plan, requests[:level], temperature)
            warm.add((plan.id, level))
        store.add(_measure(session, plan, requests, key))
    return [store.cells[key] for key, _ in wanted]


def _warm_up(session: Session, plan: Plan, requests: Sequence[Request], temperature: float) -> None:
    """A few rounds at full load, unrecorded."""
    short = [Request(r.prompt_ids, min(WARM_UP_TOKENS, r.max_new_tokens), r.seed) for r in requests]
    serve(session.target, session.proposer_of(plan), short, temperature, max_cache_gb=session.config.max_cache_gb)


def _measure(session: Session, plan: Plan, requests: list[Request], key: tuple) -> Cell:
    benchmark, temperature, _, level, run, digest = key
    memory = PeakMemory(session.target.device)
    proposer = session.proposer_of(plan)
    memory.reset()
    served = serve(session.target, proposer, requests, temperature, level, session.config.max_cache_gb)
    taus = [statistics.fmean(r.accepted + 1 for r in a.rounds) if a.rounds else None for a in served.answers]
    stops = [a.stop for a in served.answers]
    return Cell(
        benchmark=benchmark,
        temperature=temperature,
        plan=plan,
        concurrency=level,
        run=run,
        prompts=digest,
        requests=len(requests),
        answers=[a.tokens for a in served.answers],
        tokens=served.tokens,
        seconds=served.seconds,
        prefill_seconds=served.prefill_seconds,
        rounds=served.rounds,
        request_rounds=served.request_rounds,
        taus=taus,
        nodes=sum(r.proposed for a in served.answers for r in a.rounds),
        ms_per_round=_ms_per_round(served),
        stopped={stop: stops.count(stop) for stop in sorted(set(stops))},
        kv_cache_gb=served.cache_bytes / 1e9,
        peak_memory_gb=memory.read(),
    )


def _ms_per_round(served: Served) -> dict[str, float]:
    return {name: 1e3 * seconds / max(1, served.rounds) for name, seconds in served.part_seconds.items()}


def _digest(requests: Sequence[Request]) -> str:
    return hashlib.sha256(json.dumps([asdict(r) for r in requests]).encode()).hexdigest()[:12]


def concurrency_rows(
    cells: Sequence[Cell],
    names: dict[str, str],
    seed: int = 0,
    differences: Mapping[tuple, tuple[int, int]] | None = None,
) -> list[dict]:
    """The rows `concurrency` of results.json: runs of one cell joined, speed-up against AR at the same concurrency.

    Args:
        names: label of each plan id.
        seed: of the bootstrap over prompts.
        differences: of `exactness.compare_cells`, by key of the cell.
    """
    differences = differences or {}
    groups: dict[tuple, list[Cell]] = {}
    for cell in cells:
        groups.setdefault((cell.benchmark, cell.temperature, cell.concurrency, cell.plan.id), []).append(cell)
    rows = []
    for (benchmark, temperature, level, plan), own in groups.items():
        ar = groups.get((benchmark, temperature, level, AR), [])
        counts = [differences[cell.key] for cell in own if cell.key in differences]
        diverged, near_ties = map(sum, zip(*counts, strict=True)) if counts else (None, None)
        row = {**plan_fields(own[0].plan, names[plan]), **_row(own, ar, seed)}
        rows.append(row | {"diverged": diverged, "near_ties": near_ties})
    return rows


def tau_over_runs(cells: Sequence[Cell], seed: int) -> Resampled | None:
    """Mean over all answers of these runs of the same prompts, bootstrapped over prompts; None without a round."""
    taus = [[cell.taus[i] for cell in cells if cell.taus[i] is not None] for i in range(cells[0].requests)]
    taus = [values for values in taus if values]
    if not taus:
        return None
    sums_P, counts_P = np.array([(sum(values), len(values)) for values in taus], dtype=np.float64).T
    return ratio(sums_P, counts_P, draws(len(taus), seed, cells[0].benchmark))


def _row(own: list[Cell], ar: list[Cell], seed: int) -> dict:
    tokens, seconds, prefill = (sum(getattr(c, name) for c in own) for name in ("tokens", "seconds", "prefill_seconds"))
    rounds, request_rounds = sum(c.rounds for c in own), sum(c.request_rounds for c in own)
    tau = tau_over_runs(own, seed)
    first_tokens = sum(c.requests for c in own)
    memory = [c.peak_memory_gb for c in own if c.peak_memory_gb is not None]
    base = {c.run: c for c in ar}
    ratios = [_speed(c) / _speed(base[c.run]) for c in own if c.run in base]
    return {
        "benchmark": own[0].benchmark,
        "temperature": own[0].temperature,
        "concurrency": own[0].concurrency,
        "runs": len(own),
        "requests": own[0].requests,
        "tokens": tokens,
        "seconds": seconds,
        "prefill_seconds": prefill,
        "tokens_per_second": tokens / seconds,
        "tokens_per_second_interval": runs_interval([_speed(c) for c in own]),
        "tokens_per_second_after_prefill": (tokens - first_tokens) / (seconds - prefill) if seconds > prefill else None,
        "speedup": tokens / seconds / _speed_of(ar) if ar else None,
        "speedup_interval": runs_interval(ratios),
        "tau_mean": tau.estimate if tau else None,
        "tau_interval": tau.interval if tau else None,
        "nodes_per_round": sum(c.nodes for c in own) / request_rounds if request_rounds else None,
        "live_requests": request_rounds / rounds if rounds else None,
        "ms_per_round": {
            name: sum(c.ms_per_round[name] * c.rounds for c in own) / rounds if rounds else 0.0 for name in PARTS
        },
        "kv_cache_gb": max(c.kv_cache_gb for c in own),
        "peak_memory_gb": max(memory) if memory else None,
    }


def _speed(cell: Cell) -> float:
    return cell.tokens / cell.seconds


def _speed_of(cells: list[Cell]) -> float:
    return sum(c.tokens for c in cells) / sum(c.seconds for c in cells)
