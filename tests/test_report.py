"""results.json keeps its documented schema, counts divergences right, and becomes a table and pictures."""

import json

import pytest

from data.settings import RunConfig
from eval import report
from eval.records import Divergence, Generation, RoundRecord
from eval.table import markdown
from tiny import tiny_target

METHODS = {"ar": 0, "ddtree": 4, "dartree_pruned": 4}


def answer(method, prompt, accepted, temperature=0.0, benchmark="builtin", tokens=None, seconds=1.0):
    depth = 0 if method == "ar" else 4
    rounds = [RoundRecord(METHODS[method], depth, a, a + 1, 0.001, 0.002, 0.003, 0.004) for a in accepted]
    ids = tokens if tokens is not None else list(range(1 + sum(a + 1 for a in accepted)))
    return Generation(
        benchmark, prompt, method, temperature, METHODS[method], ids, "length", rounds, seconds, 0.1, len(rounds) + 1
    )


def sample(temperatures=(0.0, 1.0)):
    rows = []
    for t in temperatures:
        for n in range(6):
            rows.append(answer("ar", f"p{n}", [0] * 6, t, seconds=6.0))
            rows.append(answer("ddtree", f"p{n}", [n % 2, 2 - n % 2, 1], t, seconds=3.0))
            rows.append(answer("dartree_pruned", f"p{n}", [3, 1], t, seconds=1.5))
    return rows


SUMMARY = {
    "benchmark": str, "temperature": float, "method": str, "budget": int, "prompts": int,
    "answers_without_rounds": int, "tau_mean": float, "tau_interval": list, "tau_rounds": float, "tau_trimmed": float,
    "tokens_per_second": float, "tokens_per_second_end_to_end": float, "speedup": float, "speedup_interval": list,
    "speedup_mean_of_ratios": float, "speedup_after_first_draft": float,
    "ms_per_round": dict, "ms_per_round_total": float, "target_forwards": int,
    "acceptance": list, "accepted_histogram": list, "eos_share": float, "distinct_4gram": float, "diverged": int,
    "near_ties": int,
}  # fmt: skip
DIFFERENCE = {
    "benchmark": str, "temperature": float, "a": dict, "b": dict, "prompts": int, "tau_difference": float,
    "tau_interval": list, "speedup_difference": float, "speedup_interval": list,
}  # fmt: skip
QUALITY = {
    "benchmark": str, "temperature": float, "answers": int, "eos_share": float, "distinct_4gram": float,
    "ar_tokens_per_second": float, "generate_tokens_per_second": float, "ar_over_generate": float,
}  # fmt: skip


def check(row, schema):
    assert row.keys() == schema.keys()
    for key, kind in schema.items():
        assert row[key] is None or isinstance(row[key], kind), (key, row[key])


def test_results_follow_the_schema_of_the_docstring(tmp_path):
    results = report.build_results(sample(), {"target": "x"}, generate_tokens_per_second={"builtin": 1.25})
    report.write_report(str(tmp_path), results, sample())
    read = report.read_results(tmp_path / "results.json")
    assert read == results
    assert read.keys() == {"schema_version", "settings", "summary", "differences", "quality", "divergences"}
    for part, schema in (("summary", SUMMARY), ("differences", DIFFERENCE), ("quality", QUALITY)):
        assert read[part]
        for row in read[part]:
            check(row, schema)
            assert all(key in report.__doc__ for key in schema)
    assert read["summary"][0]["ms_per_round"].keys() == {"draft", "tree", "verify", "commit"}


def test_summary_has_the_right_figures():
    results = report.build_results(sample(), {}, generate_tokens_per_second={"builtin": 1.25})
    rows = {(r["method"], r["temperature"]): r for r in results["summary"]}
    assert len(rows) == len(results["summary"]) == 6
    pruned = rows["dartree_pruned", 0.0]
    assert pruned["tau_mean"] == 3.0 and pruned["prompts"] == 6 and pruned["budget"] == 4
    assert pruned["tokens_per_second"] == pytest.approx(6 / 1.5) and pruned["speedup"] == pytest.approx(4.0)
    assert pruned["target_forwards"] == 18 and pruned["diverged"] == pruned["near_ties"] == 0
    assert rows["ar", 0.0]["speedup"] == 1.0 and rows["ar", 0.0]["tau_mean"] == 1.0
    assert rows["ddtree", 1.0]["diverged"] is None
    quality = {r["temperature"]: r for r in results["quality"]}
    assert quality[0.0]["ar_over_generate"] == pytest.approx(1.0 / 1.25)
    assert quality[1.0]["ar_over_generate"] is None


def test_dartree_stands_on_the_left_of_a_difference():
    rows = sample((0.0,))
    rows.sort(key=lambda g: g.method)  # dartree_pruned comes before ddtree
    (row,) = report.build_results(rows, {})["differences"]
    assert row["a"] == {"method": "dartree_pruned", "budget": 4} and row["b"]["method"] == "ddtree"
    assert row["tau_difference"] == pytest.approx(1.0)
    assert row["speedup_difference"] == pytest.approx(2.0)


def test_one_method_at_two_budgets_makes_two_rows_and_a_difference():
    rows = sample((0.0,))
    for n in range(6):
        rows.append(answer("dartree_pruned", f"p{n}", [2, 1], seconds=1.0))
        rows[-1].budget = 16
    results = report.build_results(rows, {})
    budgets = [r["budget"] for r in results["summary"] if r["method"] == "dartree_pruned"]
    assert budgets == [4, 16]
    assert {"method": "dartree_pruned", "budget": 16} in [d["a"] for d in results["differences"]]


def test_divergences_and_near_ties_are_counted_apart():
    rows = sample((0.0,))
    rows[1].tokens = rows[0].tokens[:2] + [40] + rows[0].tokens[3:]  # ddtree, p0: explained by rounding
    rows[4].tokens = rows[3].tokens[:3] + [41] + rows[3].tokens[4:]  # ddtree, p1: not explained
    rows[7].tokens = rows[6].tokens[:-1]  # ddtree, p2: shorter
    near = Divergence("p0", "ddtree", 2, 2, 40, 1e-5, True)
    far = Divergence("p1", "ddtree", 3, 3, 41, 0.5, False)
    results = report.build_results(rows, {}, [near, far])
    row = next(r for r in results["summary"] if r["method"] == "ddtree")
    assert (row["diverged"], row["near_ties"]) == (3, 1)
    assert results["divergences"] == [near.to_dict(), far.to_dict()]


def test_answers_without_rounds_reach_neither_nan_nor_a_crash(tmp_path):
    rows = [answer(m, "p0", [], tokens=[1], seconds=0.0) for m in METHODS]
    results = report.build_results(rows, {})
    report.write_report(str(tmp_path), results, rows)
    assert results["summary"][0]["tau_mean"] is None and results["summary"][0]["answers_without_rounds"] == 1
    assert "NaN" not in (tmp_path / "results.json").read_text()
    assert "| ddtree | 4 | 1 | - |" in (tmp_path / "report.md").read_text()


def test_report_files(tmp_path):
    rows = sample()
    report.write_report(str(tmp_path), report.build_results(rows, {}), rows)
    lines = (tmp_path / "generations.jsonl").read_text().splitlines()
    assert [Generation.from_dict(json.loads(line)) for line in lines] == rows
    plots = sorted(p.name for p in (tmp_path / "plots").iterdir())
    assert plots == [f"{kind}-builtin-t{t}.png" for kind in ("acceptance", "speed", "time") for t in (0, 1)]
    assert all((tmp_path / "plots" / p).read_bytes().startswith(b"\x89PNG") for p in plots)
    assert not list(tmp_path.glob("*.partial"))


def test_markdown_table_has_a_row_a_method():
    text = markdown(report.build_results(sample((0.0,)), {"dtype": "float32"}, (), 0, {"builtin": 1.25}))
    assert "| dartree_pruned | 4 | 6 | 3.00 | 3.00 to 3.00 | 3.00 | 4.00 | 4.00 to 4.00 | 4.0 |" in text
    assert "AR in this loop runs at 0.80x the tokens/s of `target.generate`" in text
    assert "dartree_pruned (B=4) - ddtree (B=4) | +1.00 |" in text
    assert "- dtype: float32" in text
    lines = [line for line in text.splitlines() if line.startswith("|")]
    assert len({line.count("|") for line in lines[:5]}) == 1


def test_settings_say_what_was_measured_and_where(tmp_path):
    (tmp_path / "provenance.json").write_text(
        json.dumps({"engine": "DeepSpeedEngine", "zero_stage": 1, "world_size": 2})
    )
    target = tiny_target()
    settings = report.collect_settings(RunConfig(max_new_tokens=17), target, str(tmp_path), chosen_budget=24)
    assert settings["target"] == "tiny" and settings["dtype"] == "float32" and settings["device"] == "cpu"
    assert settings["engine"] == {"engine": "DeepSpeedEngine", "zero_stage": 1, "world_size": 2}
    assert settings["provenance"]["world_size"] == 2
    assert settings["max_new_tokens"] == 17 and settings["chosen_budget"] == 24
    assert settings["hardware"]["cores"] >= 1 and settings["hardware"]["memory_gb"] > 0
    assert {"python", "torch", "transformers"} <= settings["versions"].keys()
    json.dumps(settings, allow_nan=False)
    assert report.read_provenance(str(tmp_path / "elsewhere")) is None


def test_another_schema_version_is_refused(tmp_path):
    (tmp_path / "results.json").write_text('{"schema_version": 2}')
    with pytest.raises(ValueError, match="schema_version 2"):
        report.read_results(tmp_path / "results.json")
