"""Which plans an evaluation decodes: the chosen methods, the measured budget, rejection sampling, and the sweeps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from data.settings import RunConfig
from models.configuration import DrafterSpec

from .decoding.policy import parse_levels
from .decoding.proposals import TREES, TreeOptions, available_methods
from .records import AR, FIXED, SAMPLE_MATCH, Plan

CHAINS = ("dflash_chain", "domino_chain", "markov_chain")
# The knobs that a method has, beside the budget.
KNOBS = {
    "per_node_serial": ("candidates",),
    "dartree_fixed": ("candidates",),
    "dartree_pruned": ("width", "candidates", "beta"),
}
AT_CHOSEN = ("ddtree", "dartree_fixed", "dartree_pruned")
SWEEPS = ("budget", "width", "candidates", "beta")
# Trees compared at equal B in the sweep of the budget; the other knobs belong to dartree_pruned alone.
SWEPT = {"budget": ("ddtree", "dartree_pruned")}


def chosen_methods(config: RunConfig, head_type: str) -> list[str]:
    """`all`, or the named methods with `ar` always among them (everything is compared with it)."""
    possible = available_methods(head_type)
    if config.methods == ["all"]:
        return possible
    for method in config.methods:
        if method not in possible:
            raise ValueError(
                f"methods: {method!r} is not among {', '.join(possible)} for a drafter with head {head_type!r}"
            )
    return [m for m in possible if m == AR or m in config.methods]


def configured_plan(config: RunConfig, spec: DrafterSpec, method: str, budget: int = 0) -> Plan:
    """A method with the knobs of the configuration; `budget` replaces that of a tree."""
    if method == AR:
        return Plan(AR)
    knobs = {name: getattr(config, name) for name in KNOBS.get(method, ())}
    return Plan(method, (budget or config.budget) if method in TREES else spec.num_proposals, **knobs)


def tree_options(config: RunConfig, plan: Plan) -> TreeOptions:
    """The plan's knobs as the tree builders take them; those that the method lacks are the configuration's."""
    given = {name: value for name in ("width", "candidates", "beta") if (value := getattr(plan, name)) is not None}
    base = TreeOptions(config.budget, config.width, config.candidates, config.beta)
    return replace(base, budget=plan.budget or config.budget, **given)


def main_plans(
    config: RunConfig, spec: DrafterSpec, methods: Sequence[str], chosen_budget: int | None, temperature: float
) -> list[Plan]:
    """The plans of the main tables at one temperature, in the order in which tables list them."""
    plans = []
    for method in methods:
        plan = configured_plan(config, spec, method)
        # Greedy decoding has one rule only; trees and AR always emit the target's own samples.
        rules = config.acceptance if temperature > 0 and method in CHAINS else [SAMPLE_MATCH]
        plans += [replace(plan, acceptance=rule) for rule in dict.fromkeys(rules)]
        if method == "dartree_pruned":
            plans += [_under(config, plan, policy) for policy in dict.fromkeys(config.budget_policy) if policy != FIXED]
        # The trees that might be used at that size, so that none is compared at another's best setting (TRAPS 54).
        if method in AT_CHOSEN and chosen_budget not in (None, plan.budget):
            plans.append(replace(plan, budget=chosen_budget, note="chosen from measured cost"))
    return plans


def _under(config: RunConfig, plan: Plan, policy: str) -> Plan:
    """The plan with a budget that decoding sets; B is the largest that it may set."""
    if policy == "adaptive":
        return replace(plan, policy=policy, budget=max(budget for _, budget, _ in parse_levels(config.adaptive_budget)))
    return replace(plan, policy=policy)


def sweep_points(config: RunConfig, spec: DrafterSpec, methods: Sequence[str]) -> list[tuple[str, float, Plan]]:
    """(knob, value, plan) of every point of every sweep; a point shared by two sweeps appears in both."""
    points = []
    for knob in SWEEPS:
        values = getattr(config, f"sweep_{knob}")
        swept = [m for m in SWEPT.get(knob, ("dartree_pruned",)) if m in methods]
        if values and not swept:
            raise ValueError(f"sweep_{knob} needs dartree_pruned among --methods, got {' '.join(config.methods)}")
        for method in swept:
            plan = configured_plan(config, spec, method)
            points += [(knob, value, replace(plan, **{knob: value})) for value in dict.fromkeys(values)]
    return points


def unique(plans: Sequence[Plan]) -> list[Plan]:
    """The first of each id, in the order in which these come."""
    found: dict[str, Plan] = {}
    for plan in plans:
        found.setdefault(plan.id, plan)
    return list(found.values())


def labels(plans: Sequence[Plan]) -> dict[str, str]:
    """{plan id: name in tables and plots}: trees with B, and whatever else tells plans of one method apart."""
    named = {}
    for plan in plans:
        family = [p for p in plans if p.method == plan.method]
        words = [f"B={plan.budget}"] if plan.method in TREES else []
        for knob, sign in (("width", "W"), ("candidates", "K"), ("beta", "beta")):
            if len({getattr(p, knob) for p in family}) > 1:
                words.append(f"{sign}={getattr(plan, knob):g}")
        words += [word for word in (plan.acceptance, plan.policy) if word not in (SAMPLE_MATCH, FIXED)]
        named[plan.id] = f"{plan.method} ({', '.join(words)})" if words else plan.method
    return named
