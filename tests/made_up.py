"""Made-up answers for tests of metrics, results and tables: hand-computed rounds and clocks."""

from __future__ import annotations

from eval.records import Generation, Plan, RoundRecord

TREES = ("ddtree", "per_node_serial", "dartree_fixed", "dartree_pruned")


def plan_of(method: str, budget: int | None = None, **knobs) -> Plan:
    if budget is None:
        budget = 0 if method == "ar" else 4
    return Plan(method, budget, **knobs)


def round_of(accepted, depth=4, emitted=None, ms=(1.0, 2.0, 3.0, 4.0), busy=None):
    emitted = accepted + 1 if emitted is None else emitted
    return RoundRecord(depth, depth, accepted, emitted, *(part / 1000 for part in ms), busy=busy)


def response(
    accepted, prompt="p0", method="m", seconds=1.0, stop="length", last_emitted=None, tokens=None, plan=None, **more
):
    """An answer whose rounds accepted so many tokens. `more`: other fields of Generation."""
    plan = plan or plan_of(method)
    rounds = [round_of(a, 0 if plan.method == "ar" else 4) for a in accepted]
    if last_emitted is not None:
        rounds[-1].emitted = last_emitted
    ids = list(range(1 + sum(r.emitted for r in rounds))) if tokens is None else tokens
    fields = {"benchmark": "builtin", "temperature": 0.0, "prefill_seconds": 0.5} | more
    return Generation(
        prompt_id=prompt, plan=plan, tokens=ids, stop=stop, rounds=rounds, seconds=seconds,
        target_forwards=len(rounds) + 1, **fields,
    )  # fmt: skip
