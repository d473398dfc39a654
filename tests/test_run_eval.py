"""The stages eval and verify on a tiny saved target: report, resume after a kill, one-line errors."""

import json

import pytest
import torch
import yaml

from eval import run_eval, verify
from models.target import Target, load_target
from tiny import MASK, tiny_drafter
from tiny_tokenizer import save_tiny_target
from training_runs import run_ranks


@pytest.fixture
def run(tmp_path):
    """A config file with a saved target, a saved drafter and a two-turn benchmark."""
    folder = save_tiny_target(tmp_path / "target")
    target: Target = load_target(folder, torch.float32)
    drafter = tiny_drafter(target)
    drafter.model.save_pretrained(tmp_path / "run" / "drafter")
    (tmp_path / "run" / "drafter" / "provenance.json").write_text(json.dumps({"engine": "DeepSpeedEngine"}))
    benchmark = tmp_path / "two.jsonl"
    rows = [{"turns": ["what is a fox?", "and a dog?"]}, {"turns": ["count to ten."]}]
    benchmark.write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = dict(
        run_dir=str(tmp_path / "run"),
        target=folder,
        device="cpu",
        dtype="fp32",
        mask_token_id=MASK,
        prompts=str(benchmark),
        benchmarks=[str(benchmark)],
        eval_prompts=4,
        max_prompt_length=200,
        max_new_tokens=8,
        methods=["dflash_chain", "dartree_pruned"],
        temperatures=[0.0, 1.0],
        budget=8,
        width=3,
        candidates=8,
    )
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(options))
    return str(config), tmp_path / "run"


def test_eval_reports_resumes_and_stops_when_done(run, capsys):
    config, folder = run
    assert run_eval.main([config]) == 0
    results = json.loads((folder / "results.json").read_text())
    rows = {(r["temperature"], r["method"], r["budget"]): r for r in results["summary"]}
    assert {key[1] for key in rows} == {"ar", "dflash_chain", "dartree_pruned"}
    # Three turns in two conversations; both temperatures for every method.
    assert all(row["prompts"] == 3 for row in rows.values())
    assert rows[(0.0, "ar", 0)]["tau_mean"] == 1.0
    assert all(r["diverged"] == 0 for (temperature, *_), r in rows.items() if temperature == 0)
    assert results["quality"][0]["ar_over_generate"] > 0
    assert results["settings"]["budget_choice"]["budget"] in (4, 8)
    assert "has the most expected tokens per measured second" in (folder / "report.md").read_text()
    # The second turn follows AR's own answer: its prompt is longer for everyone.
    lines = [json.loads(line) for line in next((folder / "eval").glob("*/rank-0.jsonl")).read_text().splitlines()]
    turns = {line["key"][1]: line["prompt_ids"] for line in lines if "generation" in line}
    assert any(name.endswith("/2") for name in turns)

    # A kill in the middle of a line: the half line is cut, and only what is missing is decoded again.
    (folder / "results.json").unlink()
    store = next((folder / "eval").glob("*/rank-0.jsonl"))
    whole = store.read_bytes().splitlines(keepends=True)
    kept = whole[: len(whole) // 2]
    store.write_bytes(b"".join(kept) + b'{"key": ["half')
    assert run_eval.main([config]) == 0
    again = store.read_bytes().splitlines(keepends=True)
    assert again[: len(kept)] == kept
    assert len(again) == len(whole)
    new = json.loads((folder / "results.json").read_text())
    for old_row, new_row in zip(results["summary"], new["summary"], strict=True):
        assert old_row["tau_mean"] == new_row["tau_mean"]

    capsys.readouterr()
    assert run_eval.main([config]) == 0
    assert "finished already" in capsys.readouterr().out
    # Other settings start anew, and leave what was decoded before.
    assert run_eval.main([config, "--max_new_tokens", "4", "--temperatures", "0"]) == 0
    assert json.loads((folder / "results.json").read_text())["settings"]["max_new_tokens"] == 4
    assert store.read_bytes().splitlines(keepends=True) == again


def test_results_do_not_depend_on_the_number_of_ranks(run):
    """TRAP 48: two ranks and three turns in two conversations; each request has its own random stream."""
    config, folder = run
    words = ["--choose_budget", "false"]
    assert run_eval.main([config, *words]) == 0
    alone = generations_of(folder)
    (folder / "results.json").unlink()
    for path in (folder / "eval").glob("*/*"):
        path.unlink()
    for code, _, err in run_ranks(2, "eval/run_eval.py", config, *words):
        assert code == 0, err
    assert sorted(path.name for path in (folder / "eval").glob("*/*")) == ["rank-0.jsonl", "rank-1.jsonl"]
    assert generations_of(folder) == alone


def generations_of(folder):
    rows = [json.loads(line) for line in (folder / "generations.jsonl").read_text().splitlines()]
    return {(r["prompt_id"], r["temperature"], r["method"], r["budget"]): r["tokens"] for r in rows}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--methods", "beam"], "methods: 'beam' is not among ar"),
        (["--run_dir", "/nowhere/at/all"], "bash launch.sh train"),
        (["--benchmarks", "/no/such.jsonl"], "/no/such.jsonl"),
        (["--max_prompt_length", "2"], "no prompt is left to evaluate"),
        (["--drafter", "/no/drafter"], "/no/drafter"),
        (["--budget", "0"], "budget must be at least 1"),
        (["--max_new_tokens", "510"], "no prompt is left to evaluate"),
    ],
)
def test_user_mistakes_are_one_line(run, capsys, words, message):
    with_exit = 0
    try:
        with_exit = run_eval.main([run[0], *words])
    except SystemExit as error:
        with_exit = error.code
    lines = [line for line in capsys.readouterr().err.strip().splitlines() if "it/s" not in line]
    assert with_exit == 2
    assert message in lines[-1]
    assert "Traceback" not in " ".join(lines)


def test_a_drafter_without_weights_and_two_benchmarks_of_one_name_are_one_line(run, capsys, tmp_path):
    config, folder = run
    (folder / "drafter" / "model.safetensors").rename(folder / "weights")
    assert run_eval.main([config]) == 2
    assert "holds no model.safetensors" in capsys.readouterr().err
    (folder / "weights").rename(folder / "drafter" / "model.safetensors")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "two.jsonl").write_text((tmp_path / "two.jsonl").read_text())
    words = ["--benchmarks", str(tmp_path / "two.jsonl"), str(tmp_path / "other" / "two.jsonl")]
    assert run_eval.main([config, *words]) == 2
    assert "have the same name" in capsys.readouterr().err


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
