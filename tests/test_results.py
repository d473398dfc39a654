"""results.json: the schema of docs/results.md, the right figures, and the same answers for every plan."""

import json
import re
from pathlib import Path

import pytest

from eval import report
from eval.records import Divergence, Plan
from eval.results import build_results
from made_up import plan_of, response

ROOT = Path(__file__).resolve().parent.parent
PRUNED, DDTREE, SERIAL = plan_of("dartree_pruned"), plan_of("ddtree"), plan_of("per_node_serial")
SETTINGS = {"num_proposals": 4, "max_new_tokens": 17}


def sample(temperatures=(0.0, 1.0), benchmark="builtin", prompts=6, phase="main"):
    rows = []
    for t in temperatures:
        more = dict(temperature=t, benchmark=benchmark, phase=phase)
        for n in range(prompts):
            rows.append(response([0] * 6, f"p{n}", "ar", seconds=6.0, **more))
            rows.append(response([n % 2, 2 - n % 2, 1], f"p{n}", plan=DDTREE, seconds=3.0, **more))
            rows.append(response([3, 1], f"p{n}", plan=PRUNED, seconds=1.5, **more))
    return rows


def full_results():
    """Results in which every list has a row."""
    swept = [Plan("dartree_pruned", 8), Plan("dartree_pruned", 16)]
    rows = sample() + sample(benchmark="other", prompts=3)
    rows += [response([0] * 6, f"p{n}", "ar", seconds=6.0, phase="sweep-1") for n in range(2)]
    rows += [response([n], f"p{n}", plan=p, phase="sweep-1") for n in range(2) for p in swept]
    near = Divergence("p0", "ddtree", 1, 0, 7, 1e-5, 1e-4, True, "builtin", 0, DDTREE.id)
    asked = [
        {"benchmark": name, "source": name, "prompts": 6, "turns": 6, "skipped": 0} for name in ("builtin", "other")
    ]
    points = [("budget", p.budget, p) for p in swept]
    return build_results(rows, SETTINGS, [near], 0, {"builtin": 1.25}, asked, points), rows


def documented_keys() -> set[str]:
    return set(re.findall(r"`([a-z0-9_]+)`", (ROOT / "docs" / "results.md").read_text()))


def test_results_have_the_documented_keys(tmp_path):
    results, rows = full_results()
    report.write_report(str(tmp_path), results, rows)
    read = report.read_results(tmp_path / "results.json")
    assert read == results and read["schema_version"] == 2
    keys = documented_keys()
    for part in ("benchmarks", "plans", "summary", "averages", "differences", "quality", "sweeps", "divergences"):
        assert read[part] and part in keys, part
        for row in read[part]:
            assert set(row) <= keys, (part, set(row) - keys)
    assert read.keys() <= keys
    assert set(next(r for r in read["summary"] if r["acceptance_by_position"])["acceptance_by_position"][0]) <= keys
    sections = (ROOT / "docs" / "results.md").read_text().split("\n## ")
    # Every key that a table documents is really there.
    for part, title in (("summary", "`summary`"), ("differences", "`differences`"), ("divergences", "`divergences`")):
        (section,) = [s for s in sections if s.startswith(title)]
        rows_of_table = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
        wanted = set(re.findall(r"`([a-z0-9_]+)`", " ".join(rows_of_table)))
        assert wanted and wanted <= set(read[part][0]), wanted - set(read[part][0])
    fields = [s for s in sections if s.startswith("Plan fields")][0]
    wanted = {re.match(r"\| `(\w+)`", line)[1] for line in fields.splitlines() if line.startswith("| `")}
    for part in ("plans", "summary", "averages", "sweeps"):
        assert wanted <= set(read[part][0]), wanted - set(read[part][0])


def test_summary_has_the_right_figures():
    results = build_results(sample(), SETTINGS, generate_speed={"builtin": 1.25})
    rows = {(r["method"], r["temperature"]): r for r in results["summary"]}
    assert len(rows) == len(results["summary"]) == 6
    pruned = rows["dartree_pruned", 0.0]
    assert pruned["tau_mean"] == 3.0 and pruned["tau_trimmed"] == 3.0 and pruned["tau_rounds"] == 3.0
    assert (pruned["prompts"], pruned["answers"], pruned["budget"], pruned["rounds"]) == (6, 6, 4, 12)
    assert pruned["tokens_per_second"] == pytest.approx(6 / 1.5) and pruned["speedup"] == pytest.approx(4.0)
    assert pruned["speedup_interval"] == pytest.approx([4.0, 4.0])
    assert pruned["target_forwards"] == 18 and pruned["diverged"] == pruned["near_ties"] == 0
    assert pruned["max_new_tokens"] == 17 and pruned["tokens"] == 6 * 7 and pruned["nodes_per_round"] == 4.0
    assert pruned["accepted_histogram"] == [0, 6, 0, 6] and pruned["whole_block_share"] == 0.0
    assert rows["ar", 0.0]["speedup"] == 1.0 and rows["ar", 0.0]["tau_mean"] == 1.0
    assert rows["ar", 0.0]["whole_block_share"] is None and rows["ddtree", 1.0]["diverged"] is None
    quality = {r["temperature"]: r for r in results["quality"]}
    assert quality[0.0]["ar_over_generate"] == pytest.approx(1.0 / 1.25)
    assert quality[1.0]["ar_over_generate"] is None


def test_every_plan_is_averaged_over_the_same_answers():
    rows = [g for g in sample((0.0,)) if not (g.prompt_id == "p5" and g.plan == DDTREE)]
    asked = [{"benchmark": "builtin", "source": "builtin", "prompts": 6, "turns": 8, "skipped": 0}]
    results = build_results(rows, SETTINGS, benchmarks=asked)
    assert {r["answers"] for r in results["summary"]} == {5}
    # Eight turns, of which two were never asked and one was not answered by DDTree.
    asked = results["benchmarks"][0]
    assert (asked["answers"], asked["left_out"], asked["turns_dropped"]) == (5, 1, 2)
    # An answer that one plan ended in its first token has no round there: it counts in nobody's tau.
    rows = sample((0.0,))
    empty = next(g for g in rows if g.prompt_id == "p1" and g.plan == PRUNED)
    empty.rounds, empty.tokens = [], [3]
    results = build_results(rows, SETTINGS)
    taus = {r["method"]: r for r in results["summary"]}
    assert taus["ddtree"]["rounds"] == 15 and taus["ar"]["rounds"] == 30
    assert taus["dartree_pruned"]["answers_without_rounds"] == 1 and taus["ddtree"]["answers_without_rounds"] == 0


def test_an_average_weighs_benchmarks_equally_and_pools_rounds():
    other = sample((0.0,), "other", prompts=2)
    for g in other:
        if g.plan == PRUNED:
            g.rounds, g.seconds = [g.rounds[1]] * 3, 3.0  # tau 2 at 6 tokens in 3 seconds: twice AR
    results = build_results(sample((0.0,)) + other, SETTINGS)
    row = next(r for r in results["averages"] if r["method"] == "dartree_pruned")
    assert row["tau_mean"] == pytest.approx((3.0 + 2.0) / 2) and row["speedup"] == pytest.approx((4.0 + 2.0) / 2)
    assert (row["benchmarks"], row["rounds"], row["accepted_histogram"]) == (2, 18, [0, 12, 0, 6])
    pair = [d for d in results["differences"] if d["benchmark"] == "average"]
    assert len(pair) == 1 and pair[0]["tau_difference"] == pytest.approx(2.5 - 2.0) and pair[0]["prompts"] == 8


def test_dartree_stands_on_the_left_of_a_difference_and_every_pair_is_there():
    rows = sample((0.0,)) + [response([1, 1], f"p{n}", plan=SERIAL, seconds=2.0) for n in range(6)]
    rows.sort(key=lambda g: g.method)  # dartree_pruned comes before ddtree
    results = build_results(rows, SETTINGS)
    pairs = {(d["a"], d["b"]): d for d in results["differences"]}
    assert pairs.keys() == {(PRUNED.id, DDTREE.id), (PRUNED.id, SERIAL.id), (SERIAL.id, DDTREE.id)}
    row = pairs[PRUNED.id, DDTREE.id]
    assert row["tau_difference"] == pytest.approx(1.0) and row["tau_interval"] == pytest.approx([1.0, 1.0])
    assert row["speedup_difference"] == pytest.approx(2.0) and row["tau_p"] == row["speedup_p"] == 2**-5
    # Three pairs in one table: the serial heap is as good and as fast as DDTree, and DARTree better than both.
    for figure in ("tau", "speedup"):
        found = {pair: (d[f"{figure}_p"], d[f"{figure}_p_holm"]) for pair, d in pairs.items()}
        assert found[SERIAL.id, DDTREE.id] == (1.0, 1.0)
        assert found[PRUNED.id, SERIAL.id] == found[PRUNED.id, DDTREE.id] == (2**-5, 3 * 2**-5)


def test_a_single_prompt_has_null_intervals_and_dashes_in_the_report(tmp_path):
    rows = sample((0.0,), prompts=1) + sample((0.0,), "other", prompts=3)
    results = build_results(rows, SETTINGS)
    report.write_report(str(tmp_path), results, rows)
    keys = ("tau_interval", "speedup_interval", "tau_p", "speedup_p", "tau_p_holm", "speedup_p_holm")
    for row in results["summary"] + results["averages"] + results["differences"]:
        alone = row.get("benchmark") != "other"
        assert all((row[key] is None) is alone for key in keys if key in row), row
    assert next(r for r in results["summary"] if r["method"] == "dartree_pruned")["tau_mean"] == 3.0
    text = (tmp_path / "report.md").read_text()
    assert "| dartree_pruned (B=4) | 3.00 (-) | 3.00 (3.00–3.00) | 3.00 (-) |" in text
    # Three prompts that agree are no proof: p is 1/4.
    assert "| dartree_pruned (B=4) - ddtree (B=4) | +1.00 (-) | +1.00 (+1.00 to +1.00), p 0.250 | +1.00 (-) |" in text


def test_one_method_at_two_budgets_makes_two_rows_and_a_difference():
    chosen = Plan("dartree_pruned", 16, note="chosen from measured cost")
    rows = sample((0.0,)) + [response([2, 1], f"p{n}", plan=chosen) for n in range(6)]
    results = build_results(rows, SETTINGS)
    labels = {r["budget"]: (r["label"], r["note"]) for r in results["summary"] if r["method"] == "dartree_pruned"}
    assert labels == {
        4: ("dartree_pruned (B=4)", ""),
        16: ("dartree_pruned (B=16)", "chosen from measured cost"),
    }
    assert chosen.id in {d["a"] for d in results["differences"]} | {d["b"] for d in results["differences"]}


def test_divergences_and_near_ties_are_counted_apart():
    rows = sample((0.0,))
    rows[1].tokens = rows[0].tokens[:2] + [40] + rows[0].tokens[3:]  # ddtree, p0: explained by rounding
    rows[4].tokens = rows[3].tokens[:3] + [41] + rows[3].tokens[4:]  # ddtree, p1: not explained
    rows[7].tokens = rows[6].tokens[:-1]  # ddtree, p2: shorter
    near = Divergence("p0", "ddtree", 2, 2, 40, 1e-5, 1e-4, True, "builtin", 0, DDTREE.id)
    far = Divergence("p1", "ddtree", 3, 3, 41, 0.5, 1e-4, False, "builtin", 0, DDTREE.id)
    results = build_results(rows, SETTINGS, [near, far])
    row = next(r for r in results["summary"] if r["method"] == "ddtree")
    assert (row["diverged"], row["near_ties"]) == (3, 1)
    assert results["divergences"] == [near.to_dict(), far.to_dict()]


def test_sweeps_have_their_own_baseline_and_prompts():
    results, _ = full_results()
    assert [(r["sweep"], r["value"], r["budget"], r["prompts"]) for r in results["sweeps"]] == [
        ("budget", 8, 8, 2),
        ("budget", 16, 16, 2),
    ]
    # AR needed 6 s for 6 tokens there; these 1 s for 1 + n.
    assert results["sweeps"][0]["speedup"] == pytest.approx((6 / 6) / (2 / 3))
    assert {r["benchmark"] for r in results["summary"]} == {"builtin", "other"}
    assert all(r["prompts"] in (3, 6) for r in results["summary"])


def test_answers_without_rounds_reach_neither_nan_nor_a_crash(tmp_path):
    rows = [response([], tokens=[1], seconds=0.0, plan=plan) for plan in (Plan("ar"), DDTREE, PRUNED)]
    results = build_results(rows, SETTINGS)
    report.write_report(str(tmp_path), results, rows)
    assert results["summary"][0]["tau_mean"] is None and results["summary"][0]["answers_without_rounds"] == 1
    assert results["averages"] == [] and results["differences"] == []
    assert "NaN" not in (tmp_path / "results.json").read_text()
    assert "| ddtree | 4 | 1 | - |" in (tmp_path / "report.md").read_text()


def test_another_schema_version_is_refused(tmp_path):
    (tmp_path / "results.json").write_text(json.dumps({"schema_version": 1}))
    with pytest.raises(ValueError, match="schema_version 1, this code reads 2"):
        report.read_results(tmp_path / "results.json")
