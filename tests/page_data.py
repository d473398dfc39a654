"""Made-up results and traces for tests of the page. Results come from `build_results`: their schema is the real one."""

from __future__ import annotations

import math
from dataclasses import replace

from eval.cells import Cell
from eval.records import AR, PARTS, Divergence, Generation, Plan, RoundRecord
from eval.results import build_results
from eval.throughput import concurrency_rows

PLANS = (
    Plan(AR),
    Plan("ddtree", 4),
    Plan("dartree_pruned", 4, width=2, candidates=8, beta=-0.2),
    Plan("dartree_pruned", 2, width=2, candidates=8, beta=-0.2, note="chosen from measured cost"),
)
# Accepted draft tokens of a round and its seconds, by plan.
ACCEPTED = {PLANS[0].id: (0, 1.0), PLANS[1].id: (1, 1.25), PLANS[2].id: (2, 1.5), PLANS[3].id: (1, 0.8)}
SETTINGS = {
    "target": "folder/<b>target</b>",
    "target_name": "a <script>hack('name')</script> target",
    "drafter": "runs/x/drafter",
    "num_proposals": 3,
    "max_new_tokens": 13,
    "device": "cpu",
    "dtype": "float32",
    "attention": "sdpa",
    "hardware": {"cpu": "some processor", "cores": 2, "threads": 2, "memory_gb": 24.0, "gpus": []},
    "versions": {"python": "3.11.7", "torch": "2.13.0"},
    "git_commit": "0123456789abcdef",
    "engine": None,
    "command": "bash launch.sh eval configs/demo.yaml --methods all",
    "temperatures": [0.0, 1.0],
    "sweep_budget": [],
    "budget_choice": [
        {
            "budget": chosen,
            "curve": [
                {"budget": b, "tau": 1.5, "verify_ms": 10.0 + b, "round_ms": 12.0 + b, "tokens_per_second": 90.0 - b}
                for b in (1, 2, 4)
            ],
            "temperature": temperature,
        }
        for temperature, chosen in ((0.0, 2), (1.0, 1))
    ],
    "budget_calibration": {
        "exponent": 1.2,
        "cost": {
            "verify": [{"requests": r, "context": 64, "nodes": n, "ms": 10.0 + r * n} for r in (1, 4) for n in (1, 8)],
            "draft": [{"requests": r, "ms": 3.0 * r} for r in (1, 4)],
        },
    },
    "fingerprint": "f" * 64,
    "provenance": {"config": {"training": {"learning_rate": 0.002}}, "steps": 360},
}


def generation(plan: Plan, benchmark: str, prompt: int, temperature: float = 0.0, phase: str = "main") -> Generation:
    """Twelve tokens after the first; prompt 0 gets one more accepted token in its first round."""
    accepted, seconds = ACCEPTED[plan.id]
    lengths = [accepted + (prompt == 0 and i == 0 and accepted > 0) for i in range(12 // (accepted + 1))]
    depth = 0 if plan.method == AR else 3
    rounds = [RoundRecord(plan.budget, depth, n, n + 1, 0.001, 0.002, 0.02 * seconds, 0.0001) for n in lengths]
    count = len(rounds)
    tokens = list(range(13))
    return Generation(
        benchmark,
        f"p{prompt}",
        plan,
        temperature,
        tokens,
        "length",
        rounds,
        seconds * count,
        0.1,
        count + 1,
        phase=phase,
    )


def cell(plan: Plan, level: int, run: int) -> Cell:
    """Eight answers of twelve tokens, `level` at a time."""
    accepted, seconds = ACCEPTED[plan.id]
    rounds = 8 * 12 // (accepted + 1) // level
    return Cell(
        benchmark="builtin", temperature=0.0, plan=plan, concurrency=level, run=run, prompts="x", requests=8,
        tokens=8 * 12, seconds=seconds * rounds + run, prefill_seconds=0.5, rounds=rounds,
        request_rounds=rounds * level, taus=[accepted + 1.0] * 8,
        answers=[], nodes=plan.budget * rounds * level, ms_per_round=dict.fromkeys(PARTS, 1.0),
        stopped={"length": 8}, kv_cache_gb=0.1 * level, peak_memory_gb=None,
    )  # fmt: skip


def full_results() -> dict:
    """Two benchmarks, two temperatures, sweeps, concurrency and divergences: every part of the page but the next."""
    places = [(b, t, p) for b in ("builtin", "gsm<8k>") for t in (0.0, 1.0) for p in range(4)]
    main = [generation(plan, b, p, t) for plan in PLANS for b, t, p in places]
    swept = [generation(plan, "builtin", p, phase="sweep-1") for plan in PLANS for p in range(4)]
    points = [("budget", plan.budget, plan) for plan in PLANS[1:]]
    load = [cell(plan, level, run) for plan in PLANS[::2] for level in (1, 2, 4) for run in (0, 1)]
    # One answer of each run of DARTree at the highest concurrency left AR's text, explained in the first run only.
    left = {c.key: (1, 1 - c.run) if c.plan.method != AR and c.concurrency == 4 else (0, 0) for c in load}
    rows = concurrency_rows(load, {plan.id: plan.method for plan in PLANS}, differences=left)
    divergences = []
    for answers, prompt, near_tie in ((main, "p1", True), (swept, "p1", True), (swept, "p2", False)):
        g = next(g for g in answers if g.plan == PLANS[1] and g.prompt_id == prompt)
        g.tokens = [0, 1, 2, 4, *g.tokens[4:]]
        divergences.append(
            Divergence(
                benchmark=g.benchmark, prompt_id=prompt, turn=0, method=g.method, plan=g.plan.id, phase=g.phase,
                position=3, ar_token=3, token=4, gap=0.001, threshold=0.01, near_tie=near_tie,
            )
        )  # fmt: skip
    benchmarks = [{"benchmark": b, "source": b, "prompts": 4, "turns": 4, "skipped": 0} for b in ("builtin", "gsm<8k>")]
    speeds = {"builtin": 11.0}
    return build_results([*main, *swept], SETTINGS, divergences, 0, speeds, benchmarks, points, rows)


def markov_results() -> dict:
    """A Markov head: chains, the serial heap, and DARTree at its budget, at another one and under a policy."""
    accepted = {"ar": 0, "dflash_chain": 1, "markov_chain": 2, "per_node_serial": 3, "dartree_pruned": 3}
    plans = [Plan(method, 4 if accepted[method] else 0) for method in accepted]
    plans += [Plan("dartree_pruned", 8), Plan("dartree_pruned", 4, policy="cost-aware")]
    rows = []
    for plan in plans:
        for prompt in range(2):
            g = generation(PLANS[0], "builtin", prompt)
            count, depth = accepted[plan.method], 3 if plan.budget else 0
            record = RoundRecord(plan.budget, depth, count, count + 1, 0.001, 0.002, 0.02, 0.0001)
            rows.append(replace(g, plan=plan, rounds=[record] * 3, seconds=0.1 * (1 + len(rows) // 2)))
    return build_results(rows, {"target_name": "m", "max_new_tokens": 13, "num_proposals": 3, "head": "markov_rnn"})


def small_results() -> dict:
    """One benchmark at one temperature, and nothing else."""
    main = [generation(plan, "builtin", p) for plan in PLANS for p in range(2)]
    return build_results(main, {"target_name": "small", "max_new_tokens": 13, "num_proposals": 3})


TEXTS = {
    "10": "The",
    "11": " fox",
    "12": "</script><script>hack('token')</script>",
    "13": "\n\tover",
    "14": "\u202eevil",
    "15": "<img src=x onerror=hack('image')>",
    "16": "!",
}
EVIL_PROMPT = "What does\n</script><script>hack('prompt')</script><!-- say?"


def tree(tokens, parents, probabilities, ranks, path) -> dict:
    """Scores are sums of log probabilities along the path, as the builders give them."""
    scores: list[float] = []
    for parent, p in zip(parents, probabilities, strict=True):
        scores.append((scores[parent - 1] if parent else 0.0) + math.log(p))
    return {"tokens": tokens, "parents": parents, "scores": scores, "ranks": ranks, "path": path, "open": False}


def traces() -> dict:
    """Two prompts. The first has two rounds: 10 | 11 12 13 | 16, then 16 | 14 15, in which a pruned node was right."""
    pruned = tree(
        [11, 14, 12, 16, 13, 15], [0, 0, 1, 1, 3, 3], [0.5, 0.25, 0.8, 0.1, 0.5, 0.25], [0, 2, 1, 5, 3, 4], [0, 2]
    )
    chain = tree([11, 16, 13], [0, 1, 2], [0.5, 0.3, 0.9], [0, 1, 2], [0])
    lost = tree([15, 14], [0, 0], [0.9, 0.05], [0, 5], [])
    empty = tree([10, 11, 12], [0, 1, 2], [0.9, 0.9, 0.9], [0, 1, 2], [])
    first = {"position": 0, "emitted": 3, "trees": {"dflash_chain": chain, "dartree_pruned": pruned}}
    second = {"position": 3, "emitted": 1, "trees": {"dflash_chain": empty, "dartree_pruned": lost}}
    base = {"benchmark": "builtin", "domain": "chat", "prompt_tokens": 7, "stop": "length"}
    return {
        "schema_version": 1,
        "method": "dartree_pruned",
        "options": {"budget": 4, "width": 2, "candidates": 8, "beta": -0.2},
        "methods": ["dflash_chain", "dartree_pruned"],
        "texts": TEXTS,
        "prompts": [
            {**base, "prompt_id": "p0", "text": EVIL_PROMPT, "answer": [10, 11, 12, 16, 14], "rounds": [first, second]},
            {**base, "prompt_id": "p1", "text": "Second?", "answer": [10, 11, 12, 16], "rounds": [first]},
        ],
    }
