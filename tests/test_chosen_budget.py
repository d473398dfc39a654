"""The measured budget of an evaluation: one for each temperature, kept, reported, and never taken for another's."""

import json

import pytest

from eval import beforehand, run_eval
from eval.decoding.loop import Answer
from eval.records import RoundRecord
from eval.report import read_results
from evaluation_runs import save_run, write_benchmark

# Ranks of the nodes that a round accepts: sampled text is accepted less deep.
RANKS = {0.0: [0, 1, 2, 5], 1.0: [0]}
# Seconds of a verification; the rest of a round takes 0.015. Tokens a second of 3, 7 and 8 nodes are then 89, 110 and
# 110 in greedy decoding (tau 4, 5, 5), and 44, 44 and 33 where tau is 2.
COST = {3: 0.030, 7: 0.0305, 8: 0.0306}


@pytest.fixture
def run(tmp_path, monkeypatch):
    """(Config file, run folder, calls): of what decodes training prompts, as (temperature, seed of the request)."""
    monkeypatch.setattr(run_eval, "git_commit", lambda: "aaa")
    calls = []

    def scripted(target, proposer, requests, temperature=0.0):
        ranks = RANKS[temperature]
        calls.append((temperature, requests[0].seed))
        rounds = [RoundRecord(8, 4, len(ranks), len(ranks) + 1, draft=0.01, tree=0.004, verify=0.06, commit=0.001)]
        return [Answer(rounds=rounds, accepted_ranks=[ranks])]

    monkeypatch.setattr(beforehand, "generate", scripted)
    monkeypatch.setattr(beforehand, "verify_cost", lambda target, taps, sizes, context: {s: COST[s] for s in sizes})
    benchmark = write_benchmark(tmp_path / "two.jsonl", [{"turns": ["what is a fox?"]}, {"turns": ["count to ten."]}])
    asked = dict(methods=["dartree_pruned"], temperatures=[0.0, 1.0], trace_prompts=0)
    return *save_run(tmp_path, benchmark, eval_prompts=2, max_new_tokens=6, **asked), calls


def results_of(folder):
    return json.loads((folder / "results.json").read_text())


def budgets(folder):
    """B of dartree_pruned by temperature: as configured, and as chosen."""
    rows = [r for r in results_of(folder)["summary"] if r["method"] == "dartree_pruned"]
    return {t: [r["budget"] for r in rows if r["temperature"] == t] for t in (0.0, 1.0)}


def chosen(folder):
    return {c["temperature"]: c["budget"] for c in results_of(folder)["settings"]["budget_choice"]}


def stored_choices(folder, change=None):
    """The stored choices; `change` rewrites each line of the one store first."""
    (path,) = (folder / "eval").glob("*/rank-0.jsonl")
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    if change:
        rows = [row for row in map(change, rows) if row]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [row["choice"] for row in rows if "choice" in row]


def greedy_only(row):
    """A line as it was stored when one greedy choice was made for all temperatures; None where there was none."""
    if choice := row.get("choice"):
        return {"choice": {k: choice[k] for k in ("budget", "curve")}} if choice["temperature"] == 0 else None
    return row


def test_each_temperature_has_its_own_budget(run):
    config, folder, calls = run
    assert run_eval.main([config]) == 0
    assert chosen(folder) == {0.0: 7, 1.0: 3} and budgets(folder) == {0.0: [8, 7], 1.0: [8, 3]}
    curves = {c["temperature"]: c["curve"] for c in results_of(folder)["settings"]["budget_choice"]}
    assert [row["tau"] for row in curves[0.0]] == [4, 5, 5] and [row["tau"] for row in curves[1.0]] == [2, 2, 2]
    assert curves[1.0][0]["tokens_per_second"] == pytest.approx(2 / 0.045)
    # Prompts are sampled from streams of their own, alike at both temperatures.
    assert {t for t, _ in calls} == {0.0, 1.0} and len(set(calls)) == len(calls) > 4
    report = (folder / "report.md").read_text()
    assert "At temperature 0, B=7 is the smallest tree within 2 %" in report
    assert "At temperature 1, B=3 is the smallest tree within 2 %" in report and report.count("## Budget") == 1


def test_a_resumed_run_finds_the_choices_and_a_new_temperature_adds_its_own(run, monkeypatch):
    config, folder, calls = run
    assert run_eval.main([config, "--temperatures", "1", "--eval_prompts", "1"]) == 0
    assert chosen(folder) == {1.0: 3} and {t for t, _ in calls} == {1.0}
    calls.clear()
    assert run_eval.main([config]) == 0
    assert chosen(folder) == {0.0: 7, 1.0: 3} and {t for t, _ in calls} == {0.0}
    monkeypatch.setattr(beforehand, "generate", lambda *_: pytest.fail("measured again"))
    assert run_eval.main([config, "--eval_prompts", "1"]) == 0
    assert chosen(folder) == {0.0: 7, 1.0: 3} and len(stored_choices(folder)) == 2


def test_an_old_choice_holds_for_greedy_decoding_alone(run, capsys):
    """Before there was one for each temperature, it was made in greedy decoding whatever was evaluated."""
    config, folder, calls = run
    assert run_eval.main([config]) == 0
    (old,) = stored_choices(folder, greedy_only)
    calls.clear()
    results = results_of(folder)
    results["settings"]["budget_choice"] = old
    (folder / "results.json").write_text(json.dumps(results))
    read = read_results(folder / "results.json")
    assert read["settings"]["budget_choice"] == [{**old, "temperature": 0.0}]
    capsys.readouterr()
    # Those results sampled at a budget that greedy text had chosen: they are not finished.
    assert run_eval.main([config]) == 0
    assert "finished already" not in capsys.readouterr().out
    assert {t for t, _ in calls} == {1.0} and chosen(folder) == {0.0: 7, 1.0: 3}


def test_old_greedy_results_stay_finished(run, capsys):
    config, folder, calls = run
    words = [config, "--temperatures", "0"]
    assert run_eval.main(words) == 0
    results = results_of(folder)
    (choice,) = results["settings"]["budget_choice"]
    results["settings"]["budget_choice"] = {k: choice[k] for k in ("budget", "curve")}
    (folder / "results.json").write_text(json.dumps(results))
    calls.clear()
    capsys.readouterr()
    assert run_eval.main(words) == 0
    assert "finished already" in capsys.readouterr().out and not calls
