"""The stages eval and verify on a tiny saved target: report, resume after a kill, one-line errors."""

import json
import re
from dataclasses import fields

import pytest

from data.chat import encode_prompt, messages_of
from data.options import RunConfig
from eval import run_eval, verify
from eval.records import Generation, Plan
from eval.store import Store, asking
from evaluation_runs import save_run, write_benchmark
from made_up import response
from mistakes import mistake
from tiny_tokenizer import tiny_tokenizer
from training_runs import ROOT, run_ranks


@pytest.fixture
def run(tmp_path):
    """A config file with a saved target, a saved drafter and a two-turn benchmark."""
    rows = [{"turns": ["what is a fox?", "and a dog?"]}, {"turns": ["count to ten."]}]
    benchmark = write_benchmark(tmp_path / "two.jsonl", rows)
    asked = dict(methods=["dflash_chain", "dartree_pruned"], temperatures=[0.0, 1.0])
    config, folder = save_run(tmp_path, benchmark, eval_prompts=4, max_new_tokens=8, **asked)
    (folder / "drafter" / "provenance.json").write_text(json.dumps({"engine": "DeepSpeedEngine"}))
    return config, folder


def answers_of(folder):
    """Tokens by question and plan, from the file for people."""
    rows = [Generation.from_dict(json.loads(line)) for line in (folder / "generations.jsonl").read_text().splitlines()]
    return {(asking(g), g.plan.id): g.tokens for g in rows}


def stored(folder):
    """(generation, prompt ids) of every decoded answer on disk."""
    files = sorted((folder / "eval").glob("*/rank-*.jsonl"))
    rows = [json.loads(line) for path in files for line in path.read_text().splitlines()]
    return [(Generation.from_dict(r["generation"]), r["prompt_ids"]) for r in rows if "generation" in r]


def test_report_of_two_temperatures_with_all_turns(run, capsys):
    config, folder = run
    assert run_eval.main([config]) == 0
    results = json.loads((folder / "results.json").read_text())
    rows = {(r["temperature"], r["method"], r["budget"], r["acceptance"]): r for r in results["summary"]}
    assert {key[1] for key in rows} == {"ar", "dflash_chain", "dartree_pruned"}
    assert (1.0, "dflash_chain", 4, "rejection") in rows and (0.0, "dflash_chain", 4, "rejection") not in rows
    # Three turns in two conversations; both temperatures for every method.
    assert all((row["prompts"], row["answers"]) == (2, 3) for row in rows.values())
    assert rows[0.0, "ar", 0, "sample-match"]["tau_mean"] == 1.0
    assert all(r["diverged"] == 0 for (temperature, *_), r in rows.items() if temperature == 0)
    assert results["quality"][0]["ar_over_generate"] > 0
    assert results["benchmarks"] == [
        {"benchmark": "two", "source": str(folder.parent / "two.jsonl"), "prompts": 2, "turns": 3, "skipped": 0,
         "turns_dropped": 0, "answers": 3, "left_out": 0}
    ]  # fmt: skip
    settings = results["settings"]
    documented = set(re.findall(r"`([a-z_]+)`", (ROOT / "docs" / "results.md").read_text()))
    own = set(settings) - {field.name for field in fields(RunConfig)}
    assert own <= documented, own - documented
    assert settings["command"] == f"bash launch.sh eval {config}" and settings["num_proposals"] == 4
    assert [c["temperature"] for c in settings["budget_choice"]] == [0.0, 1.0]
    assert all(c["budget"] in (3, 7, 8) for c in settings["budget_choice"]) and settings["peak_memory_gb"] > 0
    report = (folder / "report.md").read_text()
    assert "is the smallest tree within 2 % of the most expected tokens" in report
    assert "Command: `bash launch.sh eval" in report
    assert all(row["ms_per_round"]["verify"] > 0 and row["busy_ms_per_round"] for row in rows.values())

    capsys.readouterr()
    assert run_eval.main([config]) == 0
    assert "finished already" in capsys.readouterr().out


def test_second_turns_follow_the_same_history_for_every_method(run):
    """TRAP 54: whatever a method answered itself, the next turn is asked after AR's answer."""
    config, folder = run
    assert run_eval.main([config, "--temperatures", "1", "--choose_budget", "false"]) == 0
    turns = [(g, ids) for g, ids in stored(folder) if g.turn == 1]
    assert len(turns) == 4 and len({tuple(ids) for _, ids in turns}) == 1
    (ar,) = [g for g, _ in stored(folder) if g.method == "ar" and g.prompt_id == turns[0][0].prompt_id and g.turn == 0]
    text = tiny_tokenizer().decode(ar.tokens, skip_special_tokens=True)
    assert text and turns[0][1] == encode_prompt(
        tiny_tokenizer(), messages_of(["what is a fox?", "and a dog?"], [text])
    )
    # Rejection sampling answers otherwise than AR, so that its own history would be another one.
    own = {g.plan.acceptance: g.tokens for g, _ in stored(folder) if g.turn == 0 and g.prompt_id == ar.prompt_id}
    assert own["rejection"] != ar.tokens


class Killed(BaseException):
    """Stands for kill -9: nothing of the program may catch it."""


def test_a_killed_run_resumed_equals_one_that_ran_through(run, monkeypatch, tmp_path):
    config, folder = run
    words = [config, "--sweep_budget", "2", "8", "--sweep_prompts", "1", "--choose_budget", "false"]
    assert run_eval.main([*words, "--run_dir", str(tmp_path / "whole"), "--drafter", str(folder / "drafter")]) == 0
    append, lines = Store._append, []

    def dying(self, row):
        if "commit" in row:
            append(self, row)
            return
        if len(lines) % 7 == 6:
            lines.append(None)
            with self.path.open("a") as file:
                file.write('{"generation": {"half')
            raise Killed
        lines.append(row)
        append(self, row)

    monkeypatch.setattr(Store, "_append", dying)
    kills = 0
    while not (folder / "results.json").is_file():
        try:
            assert run_eval.main(words) == 0
        except Killed:
            kills += 1
    assert kills == 4
    assert answers_of(folder) == answers_of(tmp_path / "whole")
    # Nothing was decoded twice: a line for each answer and each time of target.generate.
    written = [row for row in lines if row]
    assert len(written) == len(answers_of(folder)) + 3
    old, new = (json.loads((f / "results.json").read_text()) for f in (tmp_path / "whole", folder))
    for part, key in (("summary", "tau_mean"), ("sweeps", "tau_interval"), ("differences", "tau_difference")):
        assert [row[key] for row in old[part]] == [row[key] for row in new[part]] and old[part]


def test_more_of_the_same_continues_and_other_methods_start_anew(run):
    config, folder = run
    words = [config, "--choose_budget", "false", "--temperatures", "0"]
    assert run_eval.main([*words, "--eval_prompts", "1"]) == 0
    first = {(asking(g), g.plan.id): g.seconds for g, _ in stored(folder)}
    (store,) = (folder / "eval").glob("*/rank-0.jsonl")
    assert run_eval.main([*words, "--sweep_beta", "0", "-0.4"]) == 0
    later = {(asking(g), g.plan.id): g.seconds for g, _ in stored(folder)}
    assert first.items() <= later.items() and store.exists()
    results = json.loads((folder / "results.json").read_text())
    assert results["summary"][0]["prompts"] == 2
    # AR of the sweep is its own, timed among the points of the sweep.
    assert [(r["value"], r["beta"]) for r in results["sweeps"]] == [(0.0, 0.0), (-0.4, -0.4)]
    phases = {g.phase for g, _ in stored(folder) if g.method == "ar"}
    assert len(phases) == 2 and "main" in phases
    # The plans of a prompt are timed in turn with each other: other plans are another measurement.
    assert run_eval.main([*words, "--methods", "ddtree"]) == 0
    assert len(list((folder / "eval").glob("*/rank-0.jsonl"))) == 2
    assert {r["method"] for r in json.loads((folder / "results.json").read_text())["summary"]} == {"ar", "ddtree"}


def test_an_answer_to_another_prompt_of_the_same_id_does_not_count(run, tmp_path):
    config, folder = run
    benchmark = tmp_path / "two.jsonl"
    words = [config, "--choose_budget", "false", "--temperatures", "0", "--methods", "ar"]
    benchmark.write_text(json.dumps({"id": "a", "turns": ["count to ten."]}) + "\n")
    assert run_eval.main(words) == 0
    before = answers_of(folder)
    benchmark.write_text(json.dumps({"id": "a", "turns": ["count to nine."]}) + "\n")
    assert run_eval.main(words) == 0
    after = answers_of(folder)
    assert before.keys() == after.keys() and before != after


def test_methods_are_decoded_in_another_order_for_every_turn(run, monkeypatch):
    """TRAP 54: drift of the machine must not fall on the same method each time."""
    config, folder = run
    rows = [{"turns": [f"what is {n}?"]} for n in range(6)]
    (folder.parent / "two.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = [config, "--choose_budget", "false", "--temperatures", "0", "--eval_prompts", "6", "--max_new_tokens", "2"]
    assert run_eval.main(words) == 0
    orders = {}
    for g, _ in stored(folder):
        orders.setdefault(g.prompt_id, []).append(g.method)
    assert all(sorted(order) == ["ar", "dartree_pruned", "dflash_chain"] for order in orders.values())
    assert len({tuple(order) for order in orders.values()}) >= 3 and len({order[0] for order in orders.values()}) >= 2


def test_results_do_not_depend_on_the_number_of_ranks(run):
    """TRAP 48: two ranks and three turns in two conversations; each request has its own random stream."""
    config, folder = run
    words = ["--choose_budget", "false"]
    assert run_eval.main([config, *words]) == 0
    alone = answers_of(folder)
    (folder / "results.json").unlink()
    for path in (folder / "eval").glob("*/*"):
        path.unlink()
    for code, _, err in run_ranks(2, "eval/run_eval.py", config, *words):
        assert code == 0, err
    assert sorted(path.name for path in (folder / "eval").glob("*/*")) == ["rank-0.jsonl", "rank-1.jsonl"]
    assert answers_of(folder) == alone
    assert json.loads((folder / "results.json").read_text())["settings"]["ranks"] == 2


def test_progress_is_of_one_plan_over_the_prompts_that_ar_has(tmp_path):
    store = Store(RunConfig(run_dir=str(tmp_path)), "mark", 0)
    large, small = Plan("dartree_pruned", 64, 12, 64, -0.2), Plan("dartree_pruned", 12, 12, 64, -0.2)
    for g in (
        response([0] * 4, "p0", "ar", seconds=4.0),
        response([3], "p0", plan=large, seconds=2.0),
        response([1, 1], "p0", plan=small, seconds=1.0),
        response([7], "p1", plan=small, seconds=1.0, benchmark="other"),
    ):
        store.add(g, [1])
    assert store.progress("main", "builtin", 0.0, small) == "dartree_pruned B=12 tau 2.00, 4.00x"
    assert store.progress("main", "builtin", 0.0, large) == "dartree_pruned B=64 tau 4.00, 2.00x"
    assert store.progress("main", "other", 0.0, small) == ""


def test_the_budget_is_never_chosen_on_evaluated_prompts(run, capsys):
    config, folder = run
    asked = folder.parent / "two.jsonl"
    assert "not evaluated itself" in mistake(capsys, run_eval.main, "eval", config, "--prompts", asked)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--methods", "beam"], "methods: 'beam' is not among ar"),
        (["--run_dir", "/nowhere/at/all"], "bash launch.sh train"),
        (["--benchmarks", "/no/such.jsonl"], "/no/such.jsonl"),
        (["--max_prompt_length", "2"], "no prompt is left to evaluate"),
        (["--drafter", "/no/drafter"], "/no/drafter"),
        (["--budget", "0"], "budget must be at least 1"),
        (["--benchmarks", "gsm9k"], "benchmarks: 'gsm9k' is unknown: choose from builtin, gsm8k, math500"),
        (["--benchmarks", "gsm8k", "--benchmark_dir", "/nowhere"], "benchmark_dir: no such folder: /nowhere"),
        (["--sweep_width", "4", "--sweep_benchmark", "gsm8k"], "sweep_benchmark: 'gsm8k' is not among"),
        (["--sweep_width", "4", "--methods", "dflash_chain"], "sweep_width needs dartree_pruned among --methods"),
        (["--max_new_tokens", "510"], "no prompt is left to evaluate"),
    ],
)
def test_user_mistakes_are_one_line(run, capsys, words, message):
    assert message in mistake(capsys, run_eval.main, "eval", run[0], *words)


def test_a_drafter_without_weights_and_two_benchmarks_of_one_name_are_one_line(run, capsys, tmp_path):
    config, folder = run
    (folder / "drafter" / "model.safetensors").rename(folder / "weights")
    assert "holds no model.safetensors" in mistake(capsys, run_eval.main, "eval", config)
    (folder / "weights").rename(folder / "drafter" / "model.safetensors")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "two.jsonl").write_text((tmp_path / "two.jsonl").read_text())
    words = ["--benchmarks", str(tmp_path / "two.jsonl"), str(tmp_path / "other" / "two.jsonl")]
    assert "have the same name" in mistake(capsys, run_eval.main, "eval", config, *words)


def test_verify_passes_and_catches_a_planted_fault(run, monkeypatch, capsys):
    config, folder = run
    monkeypatch.setattr(verify, "TRAINED", (4, 12))
    # The fixture's drafter is random: what a trained one must show is tested below.
    monkeypatch.setattr(verify, "faults", lambda row, faults=verify.faults: faults({**row, "accepted": 1}))
    monkeypatch.setattr(verify, "RANDOM", (2, 4))
    words = [config, "--methods", "all"]
    assert verify.main(words) == 0
    rows = json.loads((folder / "verify.json").read_text())["rows"]
    assert {row["method"] for row in rows} >= {
        "dflash_chain",
        "domino_chain",
        "ddtree",
        "per_node_serial",
        "dartree_pruned",
    }
    assert all(row["rounds"] > 0 and not row["differences"] for row in rows)
    assert all(row["proposed"] > 0 for row in rows if row["method"] != "ar")
    assert verify.main([config, "--methods", "ar"]) == 2

    original = verify.generate

    def faulty(target, proposer, requests, temperature=0.0):
        answers = original(target, proposer, requests, temperature)
        if proposer.depth:
            answers[0].tokens[-1] = (answers[0].tokens[-1] + 1) % 64
        return answers

    monkeypatch.setattr(verify, "generate", faulty)
    assert verify.main(words) == 1
    assert "differs from AR in" in capsys.readouterr().err

    def silent(target, proposer, requests, temperature=0.0):
        answers = original(target, proposer, requests, temperature)
        answers[0].rounds = [] if proposer.depth else answers[0].rounds
        return answers

    monkeypatch.setattr(verify, "generate", silent)
    assert verify.main(words) == 1
    assert "nothing was verified" in capsys.readouterr().err


def test_a_trained_drafter_that_is_never_accepted_is_a_fault():
    row = {"drafter": "trained", "method": "ddtree", "prompts": 2, "rounds": 4, "proposed": 9, "accepted": 0}
    assert "no token accepted" in verify.faults({**row, "differences": []})[0]
    assert verify.faults({**row, "differences": [], "drafter": "random"}) == []
