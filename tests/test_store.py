"""What an evaluation takes for its own: the target's weights, the prompts as they are now, and one calibration."""

import json

import pytest

from data.options import RunConfig
from eval import budget_policy, run_eval
from eval.marks import fingerprints, measured_on
from eval.records import Generation
from evaluation_runs import save_run, write_benchmark
from tiny_tokenizer import save_tiny_target


@pytest.fixture
def run(tmp_path, monkeypatch):
    """(Config file, run folder) of a saved target, a saved drafter and a benchmark that is asked with AR alone."""
    monkeypatch.setattr(run_eval, "git_commit", lambda: "aaa")  # the clone may change while the tests run
    benchmark = ask(tmp_path, ["count to ten."], ["what is a fox?", "and a dog?"])
    alone = dict(methods=["ar"], choose_budget=False, trace_prompts=0)
    return save_run(tmp_path, benchmark, eval_prompts=4, max_new_tokens=6, **alone)


def ask(folder, *conversations):
    rows = [{"id": f"q{n}", "turns": turns} for n, turns in enumerate(conversations)]
    return write_benchmark(folder / "two.jsonl", rows)


def reported(folder):
    """Tokens by prompt and turn, as the report's figures are made of them."""
    rows = [Generation.from_dict(json.loads(line)) for line in (folder / "generations.jsonl").read_text().splitlines()]
    assert len({g.answer for g in rows}) == len(rows)
    return {g.answer: g.tokens for g in rows}


def stores(folder):
    return sorted((folder / "eval").iterdir())


def test_other_weights_under_the_same_name_start_anew(run, capsys):
    config, folder = run
    assert run_eval.main([config]) == 0
    before = reported(folder)
    save_tiny_target(folder.parent / "target", seed=7)
    capsys.readouterr()
    assert run_eval.main([config]) == 0
    assert "finished already" not in capsys.readouterr().out
    after = reported(folder)
    assert len(stores(folder)) == 2 and before.keys() == after.keys() and before != after
    # The same weights are the same target, wherever they lie.
    (folder.parent / "target").rename(folder.parent / "moved")
    assert run_eval.main([config, "--target", str(folder.parent / "moved")]) == 0
    assert "finished already" in capsys.readouterr().out and len(stores(folder)) == 2


def test_a_target_of_the_hub_is_known_by_its_commit(run, monkeypatch):
    _, folder = run
    config, marks = RunConfig(run_dir=str(folder), target="owner/name"), []
    for commit in ("aaa", "bbb", "aaa"):
        monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *_, c=commit: f"/c/{c}/config.json")
        marks.append(fingerprints(config, str(folder / "drafter"), measured_on(config, "cpu", 1)))
    assert marks[0] == marks[2] and marks[0][0] != marks[1][0] and marks[0][1] != marks[1][1]


def test_what_was_asked_under_an_id_before_is_not_reported(run, tmp_path):
    """A rank that is gone has stored the old answer: it neither shadows the new one nor counts itself."""
    config, folder = run
    assert run_eval.main([config]) == 0
    original = reported(folder)
    (store,) = stores(folder)
    (store / "rank-0.jsonl").rename(store / "rank-1.jsonl")
    ask(tmp_path, ["count to nine."], ["what is a fox?", "or a cat?"])
    assert run_eval.main([config]) == 0
    edited, lines = reported(folder), (store / "rank-0.jsonl").read_text().splitlines()
    assert edited.keys() == original.keys() and edited["q1", 0] == original["q1", 0]
    assert all(edited[key] != original[key] for key in (("q0", 0), ("q1", 1)))
    # An answer for each prompt that is new, and a time of target.generate on it.
    assert sum("generation" in json.loads(line) for line in lines) == 2
    assert sum("time" in json.loads(line) for line in lines) == 2
    assert stores(folder) == [store]
    # The first prompts again: everything is there, nothing is decoded.
    ask(tmp_path, ["count to ten."], ["what is a fox?", "and a dog?"])
    assert run_eval.main([config]) == 0
    assert reported(folder) == original and (store / "rank-0.jsonl").read_text().splitlines() == lines


def test_a_prompt_that_is_not_asked_any_more_is_not_reported(run, tmp_path):
    config, folder = run
    assert run_eval.main([config]) == 0
    ask(tmp_path, ["count to ten."])
    assert run_eval.main([config]) == 0
    assert set(reported(folder)) == {("q0", 0)} and len(stores(folder)) == 1


def test_one_calibration_for_all_answers_and_only_missing_costs_are_measured(run, monkeypatch):
    config, folder = run
    measured = []

    def verify_cost(target, taps, sizes, context, repeats=5, requests=1):
        measured.append(requests)
        return {size: 1e-3 * (len(measured) + size) for size in sizes}

    monkeypatch.setattr(budget_policy, "verify_cost", verify_cost)
    words = [config, "--methods", "dartree_pruned", "--budget_policy", "cost-aware", "--concurrency_prompts", "3"]

    def calibration(*more):
        measured.clear()
        assert run_eval.main([*words, *more]) == 0
        return json.loads((folder / "results.json").read_text())["settings"]["budget_calibration"]

    first = calibration("--temperatures", "0")
    assert set(measured) == {1}
    more = calibration("--temperatures", "0", "--concurrency", "2")
    # Costs and exponent by which the stored answers were decoded stay as they were.
    assert set(measured) == {2} and more["exponent"] == first["exponent"]
    for part in ("verify", "draft"):
        kept = [row for row in more["cost"][part] if row["requests"] == 1]
        assert [row["ms"] for row in kept] == pytest.approx([row["ms"] for row in first["cost"][part]])
        assert {row["requests"] for row in more["cost"][part]} == {1, 2}
    again = calibration("--temperatures", "0", "--eval_prompts", "1")
    assert again["exponent"] == first["exponent"] and not measured
    assert len(list((folder / "eval").glob("*/round-cost.json"))) == 1
    # Fitted at another temperature it is another one, with answers of its own.
    calibration("--temperatures", "1", "0")
    assert set(measured) == {1} and len(list((folder / "eval").glob("*/round-cost.json"))) == len(stores(folder)) == 2
