"""TRAP 38: a text that is not AR's reaches the report with its phase, turn and plan; several requests at once too."""

import json

import pytest
import torch

from eval import run_eval
from eval.cells import Cell
from eval.decoding.loop import Request, generate, serve
from eval.decoding.proposals import NoProposer, TreeOptions, make_proposer
from eval.exactness import compare_cells
from eval.records import Plan
from eval.store import Store
from eval.throughput import concurrency_rows
from evaluation_runs import save_run, write_benchmark
from models.target import load_target
from tiny import tiny_drafter, tiny_target

AR_PLAN, TREE = Plan("ar"), Plan("dartree_pruned", 8, 3, 8, -0.2)


def spoiled(tokens):
    """The same length with another last token."""
    return [*tokens[:-1], (tokens[-1] + 1) % 64]


def test_a_wrong_answer_is_found_wherever_it_is(tmp_path, monkeypatch):
    """Planted where answers are stored: a first turn of a chain, a second turn of a tree, one point of a sweep."""
    rows = [{"id": "a", "turns": ["what is a fox?", "and a dog?"]}, {"id": "b", "turns": ["count to ten."]}]
    config, folder = save_run(
        tmp_path, write_benchmark(tmp_path / "two.jsonl", rows), eval_prompts=2, max_new_tokens=8, sweep_prompts=2,
        methods=["dflash_chain", "dartree_pruned"], sweep_budget=[2, 6], choose_budget=False, trace_prompts=0,
    )  # fmt: skip
    planted = [
        ("main", "b", 0, "dflash_chain-b4"),
        ("main", "a", 1, "dartree_pruned-b8-w3-k8-beta-0.2"),
        ("sweep", "a", 1, "dartree_pruned-b6-w3-k8-beta-0.2"),
    ]
    add, expected = Store.add, []
    target = load_target(str(tmp_path / "target"), torch.float32)

    def add_spoiled(self, g, prompt_ids):
        if (g.phase[:5].rstrip("-"), g.prompt_id, g.turn, g.plan.id) in planted:
            right, g.tokens = g.tokens, spoiled(g.tokens)
            logits_V = target.forward(torch.tensor([prompt_ids + right[:-1]]), ()).logits[0, -1]
            assert int(logits_V.argmax()) == right[-1]
            gap = float(logits_V.max() - logits_V[g.tokens[-1]])
            expected.append((g.phase, g.prompt_id, g.turn, g.plan.id, len(right) - 1, right[-1], g.tokens[-1], gap))
        add(self, g, prompt_ids)

    monkeypatch.setattr(Store, "add", add_spoiled)
    assert run_eval.main([config]) == 0
    results = json.loads((folder / "results.json").read_text())
    keys = ("phase", "prompt_id", "turn", "plan", "position", "ar_token", "token", "gap")
    found = sorted(tuple(row[key] for key in keys) for row in results["divergences"])
    assert [row[:-1] for row in found] == [row[:-1] for row in sorted(expected)] and len(found) == 3
    assert [row[-1] for row in found] == pytest.approx([row[-1] for row in sorted(expected)], rel=1e-4)
    assert {(row["benchmark"], row["near_tie"], row["method"]) for row in results["divergences"]} == {
        ("two", False, "dflash_chain"), ("two", False, "dartree_pruned"),
    }  # fmt: skip
    assert {r["plan"]: (r["diverged"], r["near_ties"]) for r in results["summary"]} == {
        "ar": (0, 0), planted[0][3]: (1, 0), planted[1][3]: (1, 0),
    }  # fmt: skip
    swept = {(r["method"], r["budget"]): r["diverged"] for r in results["sweeps"]}
    assert swept == {("dartree_pruned", 2): 0, ("dartree_pruned", 6): 1}
    report = (folder / "report.md").read_text()
    assert all(
        f"two/{prompt} at {position}" in report for phase, prompt, _, _, position, *_ in found if phase == "main"
    )


def cell(plan, level, run, answers):
    tokens = sum(map(len, answers))
    return Cell(
        "b", 0.0, plan, level, run, "x", len(answers), answers, tokens, 1.0, 0.5, 4, 8, [1.0] * len(answers), 8,
        dict.fromkeys(("draft", "tree", "verify", "commit"), 1.0), {"length": len(answers)}, 0.1, None,
    )  # fmt: skip


def test_texts_of_several_at_once_are_compared_with_ar_alone():
    """Also AR's own: what several at once break is broken for every method alike."""
    target = tiny_target()
    requests = [Request([5, 6, 7], 6), Request([9, 8], 6), Request([20, 3, 4], 6)]
    right = [a.tokens for a in generate(target, NoProposer(), requests, slots=1)]
    proposer = make_proposer(target, tiny_drafter(target), "dartree_pruned", TreeOptions(8, 3, 8))
    served = [a.tokens for a in serve(target, proposer, requests, slots=2).answers]
    wrong = [spoiled(right[0]), right[1], spoiled(right[2])]
    cells = [
        cell(AR_PLAN, 2, 0, wrong), cell(TREE, 2, 0, wrong), cell(TREE, 2, 1, served), cell(TREE, 1, 0, right),
        cell(AR_PLAN, 1, 0, right), cell(AR_PLAN, 1, 1, [right[0], wrong[0], right[2]]),
    ]  # fmt: skip
    prompts = [request.prompt_ids for request in requests]
    counts = compare_cells(target, cells, prompts, 1e-4)
    assert list(counts.values()) == [(2, 0), (2, 0), (0, 0), (0, 0), (0, 0), (1, 0)]
    assert list(compare_cells(target, cells, prompts, 1e9).values())[:2] == [(2, 2), (2, 2)]
    names = {AR_PLAN.id: "ar", TREE.id: "tree"}
    rows = {(r["method"], r["concurrency"]): r for r in concurrency_rows(cells, names, 0, counts)}
    assert {key: (r["diverged"], r["near_ties"]) for key, r in rows.items()} == {
        ("ar", 2): (2, 0), ("dartree_pruned", 2): (2, 0), ("dartree_pruned", 1): (0, 0), ("ar", 1): (1, 0),
    }  # fmt: skip
    for each in cells:
        each.temperature = 1.0
    assert compare_cells(target, cells, prompts, 1e-4) == {}
    assert {r["diverged"] for r in concurrency_rows(cells, names)} == {None}
