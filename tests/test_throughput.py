"""Throughput against concurrency: what a cell counts, how runs are joined, resuming, and the stage as a whole."""

import json
import math

import pytest

from data.settings import load_config
from eval import run_eval, throughput
from eval.decoding.loop import Request, generate
from eval.plans import main_plans
from eval.records import Plan
from eval.session import load_session
from eval.throughput import Cell, concurrency_rows, measure_concurrency
from evaluation_runs import save_run, write_benchmark


@pytest.fixture
def run(tmp_path):
    """(Config file, run folder) of a saved target, a saved drafter and a benchmark of five prompts."""
    texts = ["what is a fox?", "count to ten.", "and a dog?", "what is ten?", "a fox and a dog?"]
    benchmark = write_benchmark(tmp_path / "five.jsonl", [{"turns": [text]} for text in texts])
    alone = dict(methods=["dartree_pruned"], choose_budget=False, trace_prompts=0)
    levels = dict(concurrency=[1, 3], concurrency_prompts=5)
    return save_run(tmp_path, benchmark, eval_prompts=2, max_new_tokens=8, **alone, **levels)


def cell(plan, concurrency, run, tokens, seconds, prefill=1.0, taus=(1.5, None, 2.0, 2.5)):
    return Cell(
        "b", 0.0, plan, concurrency, run, "digest", 4, [[5, 6]] * 4, tokens, seconds, prefill, 10, 20, list(taus), 60,
        dict(draft=1.0, tree=2.0, verify=3.0, commit=0.5), {"length": 4}, 0.25, 1.5,
    )  # fmt: skip


def test_runs_are_joined_and_compared_with_ar_at_the_same_concurrency():
    ar, tree = Plan("ar"), Plan("dartree_pruned", 8, 3, 8, -0.2)
    cells = [
        cell(ar, 1, 0, 40, 20.0), cell(ar, 4, 0, 40, 8.0), cell(ar, 4, 1, 40, 10.0),
        cell(tree, 4, 0, 40, 4.0), cell(tree, 4, 1, 44, 5.0, taus=(2.5, None, 3.0, 3.5)),
    ]  # fmt: skip
    rows = {(r["method"], r["concurrency"]): r for r in concurrency_rows(cells, {ar.id: "AR", tree.id: "tree"})}
    row = rows["dartree_pruned", 4]
    assert (row["label"], row["runs"], row["requests"], row["tokens"], row["seconds"]) == ("tree", 2, 4, 84, 9.0)
    assert row["tokens_per_second"] == pytest.approx(84 / 9)
    assert row["tokens_per_second_after_prefill"] == pytest.approx((84 - 8) / (9 - 2))
    assert row["speedup"] == pytest.approx((84 / 9) / (80 / 18))
    # Two speeds, 10 and 8.8, likewise.
    middle, margin = math.sqrt(10 * 8.8), math.exp(12.706 * math.log(10 / 8.8) / 2)
    assert row["tokens_per_second_interval"] == pytest.approx([middle / margin, middle * margin])
    assert rows["ar", 1]["tokens_per_second_interval"] is None
    # Two speed-ups, 2 and 2.2: their logarithms lie d/2 from the middle, and the margin is t * (d / sqrt 2) / sqrt 2.
    middle, margin = math.sqrt(2 * 2.2), math.exp(12.706 * math.log(2.2 / 2) / 2)
    assert row["speedup_interval"] == pytest.approx([middle / margin, middle * margin])
    # Prompts with 2, 2.5 and 3 over both runs (one had no round): 1 in 27 resamples draws the lowest three times.
    assert row["tau_interval"] == pytest.approx([2.0, 3.0])
    assert rows["ar", 1]["tau_interval"] == pytest.approx([1.5, 2.5])
    assert (row["tau_mean"], row["nodes_per_round"], row["live_requests"]) == (2.5, 3.0, 2.0)
    assert row["ms_per_round"] == dict(draft=1.0, tree=2.0, verify=3.0, commit=0.5)
    assert rows["ar", 1]["speedup"] == 1.0 and rows["ar", 1]["speedup_interval"] is None


def test_cells_count_what_was_decoded_and_are_kept(run, monkeypatch, tmp_path):
    path, folder = run
    config = load_config(path)
    session = load_session(config, str(folder / "drafter"))
    plans = main_plans(config, session.drafter.spec, ["ar", "dartree_pruned"], None, 0.0)
    cells = measure_concurrency(session, tmp_path, plans)
    assert sorted((c.plan.method, c.concurrency) for c in cells) == [
        ("ar", 1), ("ar", 3), ("dartree_pruned", 1), ("dartree_pruned", 3),
    ]  # fmt: skip
    _, prompts = throughput.concurrency_prompts(session)
    ids = [session.usable_ids(p.turns, []) for p in prompts]
    alone = [generate(session.target, session.proposer("ar"), [Request(i, 8)])[0] for i in ids]
    rounds = sum(len(a.rounds) for a in alone)
    for c in cells:
        # fp32: the same text whatever the method and the concurrency, so the same tokens.
        assert (c.requests, c.tokens) == (5, sum(len(a.tokens) for a in alone))
        assert sum(c.stopped.values()) == 5 and 0 < c.prefill_seconds < c.seconds
        if c.plan.method == "ar":
            assert c.request_rounds == rounds and set(c.taus) <= {1.0, None} and c.nodes == 0
            assert c.rounds == rounds if c.concurrency == 1 else rounds / 3 <= c.rounds < rounds
    by_level = {c.concurrency: c.kv_cache_gb for c in cells if c.plan.method == "ar"}
    assert by_level[3] == pytest.approx(3 * by_level[1])

    # A killed run leaves half a line; only what lacks is decoded again.
    file = tmp_path / throughput.CELLS
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join(lines[:3]) + lines[3][:20])
    measured, original = [], throughput.serve

    def spy(target, proposer, requests, *args, **kwargs):
        measured.append(len(requests))
        return original(target, proposer, requests, *args, **kwargs)

    monkeypatch.setattr(throughput, "serve", spy)
    again = measure_concurrency(session, tmp_path, plans)
    assert len(measured) == 2  # warm-up and measurement of one cell
    assert [c.key for c in again] == [c.key for c in cells]
    assert [c.answers for c in again] == [[a.tokens for a in alone]] * 4
    assert len(file.read_text().splitlines()) == 4


def test_the_stage_measures_every_policy_at_every_concurrency(run):
    config, folder = run
    words = ["--budget_policy", "fixed", "adaptive", "cost-aware", "--adaptive_budget", "1:8:3", "3:4:2"]
    assert run_eval.main([config, *words]) == 0
    results = json.loads((folder / "results.json").read_text())
    rows = {(r["method"], r["policy"], r["concurrency"]): r for r in results["concurrency"]}
    assert set(rows) == {
        (method, policy, level)
        for method, policy in (("ar", "fixed"), *(("dartree_pruned", p) for p in ("fixed", "adaptive", "cost-aware")))
        for level in (1, 3)
    }
    assert len({r["tokens"] for r in rows.values()}) == 1
    assert rows["dartree_pruned", "adaptive", 1]["nodes_per_round"] == 8.0
    assert 4.0 <= rows["dartree_pruned", "adaptive", 3]["nodes_per_round"] < 8.0
    assert {r["requests"] for r in rows.values()} == {5}
    assert {(r["diverged"], r["near_ties"]) for r in rows.values()} == {(0, 0)}
    # The policies have rows of their own in the main table too, and the text is AR's everywhere.
    assert {(r["method"], r["policy"]) for r in results["summary"]} == {key[:2] for key in rows}
    assert all(r["diverged"] == 0 for r in results["summary"])
    measured = results["settings"]["budget_calibration"]
    assert {point["requests"] for point in measured["cost"]["verify"]} == {1, 3} and measured["exponent"] > 0
    report = (folder / "report.md").read_text()
    assert "3 at once" in report and "cost-aware" in report


def test_a_request_beyond_the_memory_limit_is_one_line(run, capsys):
    config, _ = run
    assert run_eval.main([config, "--max_cache_gb", "1e-6"]) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("eval: request '") and "max_cache_gb 1e-06 holds 1 " in error
