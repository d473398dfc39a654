"""Benchmark of this project's own part, for a quiet machine.

    bash launch.sh bench [CONFIG] [--parts tree share batch] [--bench_repeats 9]
    python -m eval.bench configs/demo.yaml --parts tree

tree: building a tree, batched against one head call a node, at the demo's and at Qwen3-4B's sizes (random weights).
share: what a round of one request spends outside the forwards of drafter and target, by stage.
batch: tokens/s of several requests decoded at once against one at a time, AR's own gain beside it.
The last two need the run's target and drafter. Tables for people first; the last line is one JSON object.
`bash launch.sh bench --training` is training/bench.py, `--data` eval/bench_data.py.

Shape suffix: R requests decoded at once.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch

from data.environment import choose_device
from data.settings import RunConfig, run_stage
from models.checkpoint import finished_drafter
from models.target import choose_dtype

from .bench_tree import tree_part
from .decoding.loop import Batch, serve
from .decoding.policy import TreeOptions
from .decoding.request import Request, Served
from .measure import Stopwatch, interleave, print_result, print_table, ratios, spread
from .records import AR, PARTS
from .session import Session, load_session

EVAL_PARTS = ("tree", "share", "batch")
TREE = "dartree_pruned"
SMALL = 16  # the budget at which the gain of batching is asked for, beside the configured one


def main(argv: list[str]) -> int:
    return run_stage("bench", argv, bench)


def chosen_parts(config: RunConfig, known: Sequence[str]) -> list[str]:
    """The parts to measure, in the order of `known`. Raises ValueError for a name that is not among them."""
    unknown = [name for name in config.parts if name not in known]
    if unknown:
        raise ValueError(f"parts must be among {', '.join(known)}, got {unknown[0]!r}")
    return [name for name in known if not config.parts or name in config.parts]


def bench(config: RunConfig) -> None:
    """Runs the stage. Raises ValueError for a user's mistake."""
    parts = chosen_parts(config, EVAL_PARTS)
    device = torch.device(choose_device(config.device))
    dtype = choose_dtype(config.dtype, device.type)
    options = TreeOptions(config.budget, config.width, config.candidates, config.beta)
    needs_run = [name for name in parts if name != "tree"]
    # Before the first measurement, so that a missing run is known at once.
    session = load_session(config, finished_drafter(config.run_dir, config.drafter)) if needs_run else None
    results: dict = {}
    with torch.inference_mode():
        if "tree" in parts:
            results["tree"] = tree_part(options, dtype, device, config.bench_repeats)
        if "share" in parts:
            results["share"] = share_part(session)
        if "batch" in parts:
            results["batch"] = batch_part(session)
    target = session.target.path if session else None
    print_result("eval", dtype, config.quantization, results, target=target, repeats=config.bench_repeats)


def plans_of(config: RunConfig) -> list[tuple[str, int]]:
    """(method, budget) of what is timed: AR, and trees of a small and of the configured budget."""
    return list(dict.fromkeys([(AR, 0), (TREE, SMALL), (TREE, config.budget)]))


def requests_of(session: Session, count: int) -> list[Request]:
    """Training prompts: the text must be of the right kind, and nothing is learned from it."""
    prompts = session.training_prompts(count, session.config.seed)
    return [Request(ids, session.config.max_new_tokens, seed=i) for i, ids in enumerate(prompts)]


def share_part(session: Session) -> list[dict]:
    """A row a method: milliseconds a round by stage, and the share outside the two models' forwards."""
    requests = requests_of(session, min(4, session.config.eval_prompts or 4))
    arms = {plan: lambda plan=plan: one_share(session, plan, requests) for plan in plans_of(session.config)}
    measured = interleave(arms, session.config.bench_repeats)
    rows = []
    for (method, budget), turns in measured.items():
        row = {"method": method, "B": budget}
        row |= {name: spread([turn[name] for turn in turns]) for name in turns[0]}
        rows.append(row)
    print_table(
        "A round of one request, ms: the stages without the forwards inside them, the forwards, and the share outside "
        "(LM heads belong to the forwards; the correction head belongs to the tree)",
        rows,
    )
    return rows


def one_share(session: Session, plan: tuple[str, int], requests: list[Request]) -> dict[str, float]:
    """Milliseconds a round, from the rounds of all requests, one decoded after the other."""
    target, watch = session.target, Stopwatch(session.target.device)
    watch.watch(target, "forward", "verify")
    # Outside a forward of the target, its LM head gives the drafter's base logits.
    watch.watch(target, "logits", "draft")
    watch.watch(session.drafter.model, "forward", "draft")
    stages = dict.fromkeys((*PARTS, "rest"), 0.0)
    forwards, count, total = {"draft": 0.0, "verify": 0.0}, 0, 0.0
    try:
        for request in requests:
            batch = Batch(target, session.proposer(*plan), [request])
            while batch.admit():
                watch.reset()
                start = batch.clock.now()
                batch.round()
                seconds = batch.clock.now() - start
                record = batch.answers[0].rounds[-1]
                parts = {name: getattr(record, name) for name in PARTS}
                for name, value in {**parts, "rest": seconds - sum(parts.values())}.items():
                    stages[name] += value - watch.seconds.get(name, 0.0)
                for name in forwards:
                    forwards[name] += watch.seconds[name]
                total, count = total + seconds, count + 1
    finally:
        watch.release()
    return {
        **{f"{name} outside": 1e3 * seconds / count for name, seconds in stages.items()},
        "drafter": 1e3 * forwards["draft"] / count,
        "target": 1e3 * forwards["verify"] / count,
        "round": 1e3 * total / count,
        "outside %": 100 * sum(stages.values()) / total,
    }


def batch_part(session: Session) -> list[dict]:
    """A row a method and R: tokens/s, gain over R = 1, and speed-up over AR at the same R."""
    config = session.config
    concurrency = sorted({1, config.bench_concurrency})
    requests = requests_of(session, 2 * max(concurrency))
    arms = {
        (plan, slots): lambda plan=plan, slots=slots: serve(
            session.target, session.proposer(*plan), requests, slots=slots
        )
        for slots in concurrency
        for plan in plans_of(config)
    }
    served = interleave(arms, config.bench_repeats)
    speeds = {key: [decode_speed(s) for s in turns] for key, turns in served.items()}
    rows = []
    for (plan, slots), turns in served.items():
        rows.append(
            {
                "method": plan[0],
                "B": plan[1],
                "R": slots,
                "tokens/s": spread(speeds[plan, slots]),
                "gain over R=1": ratios(speeds[plan, slots], speeds[plan, 1]),
                "speed-up over AR": ratios(speeds[plan, slots], speeds[(AR, 0), slots]),
                "tokens/s with prefills": spread([s.tokens / s.seconds for s in turns]),
                "mean R": turns[0].request_rounds / turns[0].rounds,
                "cache MB": turns[0].cache_bytes / 1e6,
            }
        )
    print_table(
        f"{len(requests)} requests of {config.max_new_tokens} tokens, R decoded at once; tokens/s without prefills, "
        "medians over repeats (smallest-largest)",
        rows,
    )
    return rows


def decode_speed(served: Served) -> float:
    """Tokens a second after each request's first one, which the prefill gives, prefills left out."""
    return (served.tokens - len(served.answers)) / (served.seconds - served.prefill_seconds)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
