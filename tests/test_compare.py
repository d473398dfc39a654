"""Two drafters on the same prompts: right figures, paired by prompt, and no comparison of what is no pair."""

import json
import os
import shutil
import subprocess
import sys

import pytest

from data.answers import target_identity
from data.settings import RunConfig
from eval import compare, marks
from eval.report import collect_settings
from eval.results import build_results
from eval.store import Store, prompt_digest
from made_up import plan_of, response
from tiny import tiny_drafter, tiny_target

SETTINGS = {"target_name": "t", "dtype": "bfloat16", "max_new_tokens": 8, "seed": 0, "num_proposals": 4}


def save(folder, accepted, chain=4, digests=None, **settings):
    """An evaluation in which chain and tree accept so many draft tokens in the only round of each prompt.

    digests: of the prompts, "" where the file is of an older evaluation.
    """
    answers = [
        response([0] * 4, prompt=f"p{i}", method="ar", seconds=1.0, tokens=[1, 2, 3, 4, 5])
        for i in range(len(accepted))
    ]
    for plan in (plan_of("dflash_chain", chain), plan_of("ddtree", 4)):
        answers += [response([n], prompt=f"p{i}", plan=plan, seconds=0.5) for i, n in enumerate(accepted)]
    for answer in answers:
        answer.prompt = digests[int(answer.prompt_id[1:])] if digests else ""
    folder.mkdir(parents=True)
    (folder / "results.json").write_text(json.dumps(build_results(answers, SETTINGS | settings)))
    (folder / "generations.jsonl").write_text("".join(json.dumps(g.to_dict()) + "\n" for g in answers))
    return str(folder)


def test_differences_are_paired_and_over_shared_prompts(tmp_path, capsys):
    """tau is 1 + accepted: 2, 3, 4 against 3, 4, 5, 9; the fourth prompt has no pair. Every pair differs by one."""
    runs = [save(tmp_path / "a", [1, 2, 3]), save(tmp_path / "b", [2, 3, 4, 8], chain=7)]
    rows = compare.compare(compare.load_runs(runs))
    assert [(r["label"], r["run"], r["prompts"]) for r in rows] == [
        ("dflash_chain", "a", 3), ("dflash_chain", "b", 3), ("ddtree (B=4)", "a", 3), ("ddtree (B=4)", "b", 3),
    ]  # fmt: skip
    assert [r["tau"] for r in rows] == pytest.approx([3.0, 4.0, 3.0, 4.0])
    first, second = rows[:2]
    assert first["difference"] is None
    assert second["difference"] == pytest.approx(1.0)
    assert second["difference_interval"] == pytest.approx([1.0, 1.0])
    # AR: 4 tokens in 1 s; the method: 1 + accepted tokens in 0.5 s.
    assert [r["speedup"] for r in rows[:2]] == pytest.approx([9 / 1.5 / (12 / 3.0), 12 / 1.5 / (12 / 3.0)])
    assert compare.main(runs) == 0
    assert (
        "| ddtree (B=4) | b | 3 | 4.00 (3.00–5.00) | +1.00 (+1.00 to +1.00), p 0.500 | 2.00 |"  # 2 tests of p 1/4
        in capsys.readouterr().out
    )


def test_plans_of_one_run_alone_are_left_out(tmp_path):
    runs = [save(tmp_path / "a", [1, 2, 3]), save(tmp_path / "b", [1, 2, 3])]
    lines = (tmp_path / "b" / "generations.jsonl").read_text().splitlines()
    kept = [line for line in lines if json.loads(line)["plan"]["method"] != "ddtree"]
    (tmp_path / "b" / "generations.jsonl").write_text("\n".join(kept) + "\n")
    assert {r["label"] for r in compare.compare(compare.load_runs(runs))} == {"dflash_chain"}


@pytest.mark.parametrize(
    ("key", "other"),
    [("max_new_tokens", 16), ("target_name", "u"), ("dtype", "float32"), ("seed", 1)]
    + [("confidence_threshold", 0.5), ("adaptive_budget", ["1:8:4"])],
)
def test_other_conditions_are_no_pairs(tmp_path, capsys, key, other):
    runs = [save(tmp_path / "a", [1, 2]), save(tmp_path / "b", [1, 2], **{key: other})]
    assert compare.main(runs) == 2
    assert f"compare: {key} is {SETTINGS.get(key)!r} in a and {other!r} in b" in capsys.readouterr().err


def test_mistakes_are_one_line(tmp_path, capsys):
    run = save(tmp_path / "a", [1, 2])
    assert compare.main([run]) == 2
    assert compare.main([run, str(tmp_path / "none")]) == 2
    assert [line[:9] for line in capsys.readouterr().err.splitlines()] == ["compare: ", "compare: "]
    other = save(tmp_path / "b", [])
    (tmp_path / "b" / "generations.jsonl").write_text("")
    assert compare.main([run, other]) == 1
    assert "no answer of one method is in two of a, b" in capsys.readouterr().err


def test_runs_of_one_folder_name_are_told_apart(tmp_path):
    runs = [save(tmp_path / "x" / "run", [1, 2]), save(tmp_path / "y" / "run", [1, 2])]
    assert [run.name for run in compare.load_runs(runs)] == runs


def test_weights_tell_targets_apart_where_both_runs_know_them(tmp_path, capsys):
    known = save(tmp_path / "a", [1], target_identity="w1")
    moved = save(tmp_path / "b", [1], target_identity="w1", target_name="elsewhere/t")
    other = save(tmp_path / "c", [1], target_identity="w2")
    older = save(tmp_path / "d", [1])
    assert compare.main([known, moved]) == 0
    assert compare.main([known, older]) == 0
    assert compare.main([known, other]) == 2
    assert "compare: target_identity is 'w1' in a and 'w2' in c: no pairs" in capsys.readouterr().err


def test_settings_name_the_weights_wherever_they_lie(tmp_path):
    target = tiny_target()
    target.model.save_pretrained(tmp_path / "here")
    shutil.copytree(tmp_path / "here", tmp_path / "there")
    target.model.lm_head.weight.data += 1
    target.model.save_pretrained(tmp_path / "other")
    found = []
    for name in ("here", "there", "other"):
        target.path = str(tmp_path / name)
        settings = collect_settings(RunConfig(), target, tiny_drafter(target), str(tmp_path))
        found.append(settings["target_identity"])
    assert found[0] == found[1] == target_identity(str(tmp_path / "here")) != found[2]


def test_other_prompts_under_one_id_are_no_pairs(tmp_path, capsys):
    """p1 has changed; the third prompt of the first run is of an older evaluation and goes by its id."""
    runs = [
        save(tmp_path / "a", [1, 2, 3], digests=["x", "y", ""]),
        save(tmp_path / "b", [1, 5, 5], digests=["x", "Y", "z"]),
    ]
    assert compare.main(runs) == 0
    out = capsys.readouterr().out
    assert out.endswith("(Left out, other prompts under the same ids: 1 of builtin, temperature 0)\n")
    assert "| dflash_chain | b | 2 | 4.00 (2.00–6.00) | +1.00 " in out  # tau 2 and 6 against 2 and 4
    runs[1] = save(tmp_path / "c", [1, 2, 3], digests=["1", "2", "3"])
    runs[0] = save(tmp_path / "d", [1, 2, 3], digests=["4", "5", "6"])
    assert compare.main(runs) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "3 of builtin, temperature 0" in error


def test_the_store_writes_down_which_prompt_was_answered(tmp_path):
    config = RunConfig(run_dir=str(tmp_path))
    Store(config, "0" * 64, 0).add(response([1]), [3, 1, 2])
    (stored,) = Store(config, "0" * 64, 1).generations.values()
    assert stored.prompt == prompt_digest([3, 1, 2]) != prompt_digest([3, 1])
    (row,) = (tmp_path / "eval" / ("0" * 12) / "rank-0.jsonl").read_text().splitlines()
    assert json.loads(row)["generation"]["prompt"] == stored.prompt


BROKEN = {
    "results.json": ["[]", '{"schema_version": 2, "sett', "\xff", '{"schema_version": 2}', None],
    "generations.jsonl": ["[]\n", "[1]\n", '{"benchmark": "b", "prom', '{"rounds": []}\n', "7\n", "\xff\n"],
}


@pytest.mark.parametrize(("name", "text"), [(name, text) for name, texts in BROKEN.items() for text in texts])
def test_a_broken_file_is_one_line_that_names_it(tmp_path, capsys, name, text):
    runs = [save(tmp_path / "a", [1]), save(tmp_path / "b", [1])]
    if text is None:
        results = json.loads((tmp_path / "b" / name).read_text())
        del results["settings"]["seed"]
        text = json.dumps(results)
    (tmp_path / "b" / name).write_text(text, encoding="latin-1")
    assert compare.main(runs) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and os.path.join("b", name) in error


def test_answers_that_are_not_there_are_an_error_of_the_system(tmp_path, capsys):
    runs = [save(tmp_path / "a", [1]), save(tmp_path / "b", [1])]
    (tmp_path / "b" / "generations.jsonl").unlink()
    assert compare.main(runs) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and os.path.join("b", "generations.jsonl") in error


def test_a_run_is_not_compared_with_itself(tmp_path, capsys):
    run = save(tmp_path / "a", [1])
    assert compare.main([run, os.path.join(run, "..", "a")]) == 2
    assert capsys.readouterr().err == f"compare: {run}/../a is the same run as {run}\n"


def test_runs_are_looked_for_where_it_was_typed_then_in_the_project(tmp_path, monkeypatch):
    here, project = tmp_path / "here", tmp_path / "project"
    save(here / "runs" / "a", [1])
    for name in ("a", "b"):
        save(project / "runs" / name, [3])
    monkeypatch.chdir(here)
    monkeypatch.setattr(marks, "ROOT", project)
    rows = compare.compare(compare.load_runs(["runs/a", "runs/b"]))
    assert [(r["run"], r["tau"]) for r in rows[:2]] == [("a", 2.0), ("b", 4.0)]


def test_help_is_the_projects_own_and_loads_no_model_code(tmp_path):
    """As launch.sh calls it: -P, since Python would prefer an `eval` of the folder where the command was typed."""
    (tmp_path / "eval").mkdir()
    (tmp_path / "eval" / "compare.py").write_text("print('foreign')")
    code = "import sys; sys.modules['torch'] = sys.modules['transformers'] = None; import eval.compare as c; "
    launched = next(line for line in (marks.ROOT / "launch.sh").read_text().splitlines() if "-m eval.compare" in line)
    assert launched.split()[:5] == ["exec", '"$py"', "-P", "-m", "eval.compare"]
    result = subprocess.run(
        [sys.executable, "-P", "-c", code + "sys.exit(c.main(['--help']))"],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(marks.ROOT)}, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.startswith("Stage `compare`")


@pytest.mark.parametrize(
    ("text", "done"),
    [
        ('{"settings": {"fingerprint": "f"}}', True),
        ('{"settings": {"fingerprint": "g"}}', False),
        ('{"settings": {"finger', False),
        ("[]", False),
        ('{"settings": []}', False),
        ("\xff", False),
        (None, False),
    ],
)
def test_an_evaluation_with_broken_results_is_not_done(tmp_path, text, done):
    if text is not None:
        (tmp_path / "results.json").write_text(text, encoding="latin-1")
    assert marks.already_done(RunConfig(run_dir=str(tmp_path)), "f") is done
