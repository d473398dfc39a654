"""Plans: which are decoded, what tells them apart, and the points of the sweeps."""

import pytest

from data.options import RunConfig
from eval.plans import chosen_methods, configured_plan, labels, main_plans, sweep_points, tree_options, unique
from eval.records import Plan
from models.configuration import DrafterSpec

SPEC = DrafterSpec(block_size=5, mask_token_id=2, target_layer_ids=(0, 2), num_target_layers=4, head_type="domino")
ALL = chosen_methods(RunConfig(), "domino")


def test_every_plan_has_an_id_of_its_own():
    plans = [
        Plan("ar"), Plan("dflash_chain", 4), Plan("dflash_chain", 4, acceptance="rejection"), Plan("ddtree", 64),
        Plan("dartree_pruned", 64, 12, 64, -0.2), Plan("dartree_pruned", 64, 12, 64, -0.1),
        Plan("dartree_pruned", 64, 12, 32, -0.2), Plan("dartree_pruned", 64, 8, 64, -0.2),
        Plan("dartree_pruned", 16, 12, 64, -0.2), Plan("dartree_pruned", 64, 12, 64, -0.2, policy="adaptive"),
    ]  # fmt: skip
    assert len({plan.id for plan in plans}) == len(plans) == len(unique(plans + plans))
    assert plans[4].id == "dartree_pruned-b64-w12-k64-beta-0.2" and plans[0].id == "ar"
    # Why a plan is there does not make it another one.
    assert Plan("ddtree", 8, note="x").id == Plan("ddtree", 8).id


def test_configured_plans_carry_the_knobs_that_the_method_has():
    config = RunConfig(budget=32, width=6, candidates=16, beta=-0.1)
    knobs = {m: (p.budget, p.width, p.candidates, p.beta) for m in ALL for p in [configured_plan(config, SPEC, m)]}
    assert knobs == {
        "ar": (0, None, None, None),
        "dflash_chain": (4, None, None, None),
        "domino_chain": (4, None, None, None),
        "ddtree": (32, None, None, None),
        "per_node_serial": (32, None, 16, None),
        "dartree_fixed": (32, None, 16, None),
        "dartree_pruned": (32, 6, 16, -0.1),
    }
    options = tree_options(config, Plan("dartree_pruned", 8, 3, 4, 0.0))
    assert (options.budget, options.width, options.candidates, options.beta) == (8, 3, 4, 0.0)
    assert tree_options(config, Plan("ddtree", 8)).width == 6


def test_greedy_plans_are_the_methods_in_order_and_the_chosen_budget_stands_beside():
    config = RunConfig()
    plans = main_plans(config, SPEC, ALL, 16, 0.0)
    chosen = [p for p in plans if p.note == "chosen from measured cost"]
    # TRAP 54: every tree that one would use is measured at that size, not DARTree alone.
    assert [(p.method, p.budget) for p in chosen] == [("ddtree", 16), ("dartree_fixed", 16), ("dartree_pruned", 16)]
    assert [p.method for p in plans if p not in chosen] == ALL
    assert all(p.acceptance == "sample-match" for p in plans)
    # A choice equal to the configured budget, or none, adds nothing.
    assert len(main_plans(config, SPEC, ALL, 64, 0.0)) == len(main_plans(config, SPEC, ALL, None, 0.0)) == len(ALL)


def test_rejection_is_a_row_of_its_own_for_chains_when_sampling():
    plans = main_plans(RunConfig(), SPEC, ALL, None, 1.0)
    rules = {}
    for plan in plans:
        rules.setdefault(plan.method, []).append(plan.acceptance)
    assert {m for m, r in rules.items() if "rejection" in r} == {"dflash_chain", "domino_chain"}
    assert rules["domino_chain"] == ["sample-match", "rejection"] and rules["ar"] == ["sample-match"]
    only = main_plans(RunConfig(acceptance=["rejection"]), SPEC, ALL, None, 1.0)
    assert [p.acceptance for p in only if p.method == "dflash_chain"] == ["rejection"]


def test_sweeps_change_one_knob_at_a_time():
    config = RunConfig(
        sweep_budget=[8, 64], sweep_width=[4, 12], sweep_candidates=[16], sweep_beta=[0.0, -0.4], methods=["all"]
    )
    points = sweep_points(config, SPEC, ALL)
    assert [(knob, value, plan.method) for knob, value, plan in points] == [
        ("budget", 8, "ddtree"), ("budget", 64, "ddtree"), ("budget", 8, "dartree_pruned"),
        ("budget", 64, "dartree_pruned"), ("width", 4, "dartree_pruned"), ("width", 12, "dartree_pruned"),
        ("candidates", 16, "dartree_pruned"), ("beta", 0.0, "dartree_pruned"), ("beta", -0.4, "dartree_pruned"),
    ]  # fmt: skip
    # B=64 and W=12 are the configured plan: decoded once, shown in both sweeps.
    assert len(unique([plan for *_, plan in points])) == 8
    base = configured_plan(config, SPEC, "dartree_pruned")
    for knob, value, plan in points:
        if plan.method == "dartree_pruned":
            different = {n for n in ("budget", "width", "candidates", "beta") if getattr(plan, n) != getattr(base, n)}
            assert different <= {knob} and getattr(plan, knob) == value
    assert sweep_points(RunConfig(), SPEC, ALL) == []
    with pytest.raises(ValueError, match="sweep_width needs dartree_pruned among --methods, got ddtree"):
        sweep_points(RunConfig(sweep_width=[4], methods=["ddtree"]), SPEC, ["ar", "ddtree"])


def test_plans_keep_the_order_of_their_first_answer():
    """Sweeps decode some of the main plans again: tables and page list those where the main plans stand."""
    ar, tree, chosen, swept = Plan("ar"), Plan("ddtree", 64), Plan("ddtree", 16, note="chosen"), Plan("ddtree", 8)
    assert unique([ar, tree, chosen, ar, swept, Plan("ddtree", 16), tree]) == [ar, tree, chosen, swept]


def test_labels_name_what_tells_plans_apart():
    plans = [
        Plan("ar"), Plan("dflash_chain", 4), Plan("dflash_chain", 4, acceptance="rejection"), Plan("ddtree", 64),
        Plan("dartree_pruned", 64, 12, 64, -0.2), Plan("dartree_pruned", 64, 8, 64, -0.2),
    ]  # fmt: skip
    assert list(labels(plans).values()) == [
        "ar", "dflash_chain", "dflash_chain (rejection)", "ddtree (B=64)", "dartree_pruned (B=64, W=12)",
        "dartree_pruned (B=64, W=8)",
    ]  # fmt: skip


def test_bad_values_name_the_option():
    for options, message in (
        ({"sweep_beta": [0.1]}, "sweep_beta must be <= 0, got 0.1"),
        ({"sweep_budget": [8, 0]}, "sweep_budget: every value must be at least 1, got 0"),
        ({"eval_prompts": -1}, "eval_prompts must be at least 0, got -1"),
        ({"sweep_prompts": 0}, "sweep_prompts must be at least 1, got 0"),
    ):
        with pytest.raises(ValueError, match=message):
            RunConfig(**options)
