"""Two drafters on the same prompts: right figures, paired by prompt, and no comparison of what is no pair."""

import json

import pytest

from eval import compare
from eval.results import build_results
from made_up import plan_of, response

SETTINGS = {"target_name": "t", "dtype": "bfloat16", "max_new_tokens": 8, "seed": 0, "num_proposals": 4}


def save(folder, accepted, chain=4, **settings):
    """An evaluation in which chain and tree accept so many draft tokens in the only round of each prompt."""
    answers = [
        response([0] * 4, prompt=f"p{i}", method="ar", seconds=1.0, tokens=[1, 2, 3, 4, 5])
        for i in range(len(accepted))
    ]
    for plan in (plan_of("dflash_chain", chain), plan_of("ddtree", 4)):
        answers += [response([n], prompt=f"p{i}", plan=plan, seconds=0.5) for i, n in enumerate(accepted)]
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
    ("key", "other"), [("max_new_tokens", 16), ("target_name", "u"), ("dtype", "float32"), ("seed", 1)]
)
def test_other_conditions_are_no_pairs(tmp_path, capsys, key, other):
    runs = [save(tmp_path / "a", [1, 2]), save(tmp_path / "b", [1, 2], **{key: other})]
    assert compare.main(runs) == 2
    assert f"compare: {key} is {SETTINGS[key]!r} in a and {other!r} in b" in capsys.readouterr().err


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
