"""Made-up results and traces for tests of the page. Results come from `build_results`: their schema is the real one."""

from __future__ import annotations

import math

from eval.records import AR, PARTS, Divergence, Generation, Plan, RoundRecord
from eval.results import build_results
from eval.throughput import Cell, concurrency_rows

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
    "budget_choice": {
        "budget": 2,
        "curve": [
            {"budget": b, "tau": 1.5, "verify_ms": 10.0 + b, "round_ms": 12.0 + b, "tokens_per_second": 90.0 - b}
            for b in (1, 2, 4)
        ],
    },
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
        nodes=plan.budget * rounds * level, ms_per_round=dict.fromkeys(PARTS, 1.0),
        stopped={"length": 8}, kv_cache_gb=0.1 * level, peak_memory_gb=None,
    )  # fmt: skip


def full_results() -> dict:
    """Two benchmarks, two temperatures, sweeps, concurrency and a divergence: every part of the page."""
    places = [(b, t, p) for b in ("builtin", "gsm<8k>") for t in (0.0, 1.0) for p in range(4)]
    main = [generation(plan, b, p, t) for plan in PLANS for b, t, p in places]
    swept = [generation(plan, "builtin", p, phase="sweep-1") for plan in PLANS for p in range(4)]
    points = [("budget", plan.budget, plan) for plan in PLANS[1:]]
    load = [cell(plan, level, run) for plan in PLANS[::2] for level in (1, 2, 4) for run in (0, 1)]
    rows = concurrency_rows(load, {plan.id: plan.method for plan in PLANS})
    divergence = Divergence(
        benchmark="builtin", prompt_id="p1", turn=0, method="ddtree", plan=PLANS[1].id, phase="main",
        position=3, ar_token=3, token=4, gap=0.001, threshold=0.01, near_tie=True,
    )  # fmt: skip
    benchmarks = [{"benchmark": b, "source": b, "prompts": 4, "skipped": 0} for b in ("builtin", "gsm<8k>")]
    speeds = {"builtin": 11.0}
    return build_results([*main, *swept], SETTINGS, [divergence], 0, speeds, benchmarks, points, rows)


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
