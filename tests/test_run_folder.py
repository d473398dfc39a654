"""What binds a run folder: prompts that the user prepared, and answers, but no run that answered nothing."""

import json
import shutil

import pytest

from answering import Run
from data import prepare, regenerate
from data.answers import read_answers, read_manifest
from data.prepare import prepared
from data.prompt_store import Prepared
from data.settings import load_config
from mistakes import mistake
from test_prepare import answered, questions, write


@pytest.fixture
def config(tmp_path):
    """A function from options to a RunConfig over a run folder of this test."""
    path = tmp_path / "config.yaml"
    path.write_text(f"run_dir: {tmp_path / 'run'}\nnum_prompts: 0\n")
    return lambda **options: load_config(str(path), options)


@pytest.fixture
def run(tmp_path):
    """Three conversations of four turns."""
    return Run(tmp_path, [["hi there"], ["b", "c, then?"], ["x y z"]], num_prompts=0)


def test_prompts_of_other_options_are_not_replaced_by_another_stage(tmp_path, config):
    mine, other = write(tmp_path / "mine.jsonl", questions(9)), write(tmp_path / "other.jsonl", questions(20))
    prepared(config(prompts=[mine], max_prompt_characters=500))
    with pytest.raises(ValueError) as error:
        prepared(config(prompts=[other], num_prompts=6, prompt_column="p"), replaces=False)
    assert str(error.value) == (
        f"{tmp_path}/run/prompts was prepared with prompts ['{mine}'] (this run has ['{other}']), "
        "max_prompt_characters 500 (this run has 0), prompt_column '' (this run has 'p'), "
        "num_prompts 0 (this run has 6): give the same here too or write it into CONFIG, "
        "or replace these prompts by: bash launch.sh prepare CONFIG with the options of this run"
    )
    with pytest.raises(ValueError, match=r"with num_prompts 0 \(this run has 6\): give"):
        prepared(config(prompts=[mine], max_prompt_characters=500, num_prompts=6), replaces=False)
    assert len(Prepared(str(tmp_path / "run/prompts"))) == 9
    prepared(config(prompts=[mine], num_prompts=6))  # the stage itself replaces
    assert len(prepared(config(prompts=[mine], num_prompts=8), replaces=False)) == 8
    write(tmp_path / "mine.jsonl", questions(11))  # the options are the same, and nothing is answered
    assert len(prepared(config(prompts=[mine]), replaces=False)) == 11


def test_answers_bind_their_prompts_when_the_store_is_gone(tmp_path, config):
    source = write(tmp_path / "mine.jsonl", questions(20))
    store = prepared(config(prompts=[source], num_prompts=6))
    answered(tmp_path / "run")
    manifest = {"prompts": {"fingerprint": store.fingerprint, "counts": store.counts}}
    (tmp_path / "run/answers/manifest.json").write_text(json.dumps(manifest))
    shutil.rmtree(tmp_path / "run/prompts")
    with pytest.raises(ValueError, match="num_prompts 2 is less than the 6 prompts that .*answers holds answers to"):
        prepared(config(prompts=[source], num_prompts=2))
    with pytest.raises(ValueError, match="answers holds answers to other prompts: "):
        prepared(config(prompts=[source], num_prompts=6, min_prompt_characters=3))
    assert not read_manifest(str(tmp_path / "run/prompts"))
    assert [p.id for p in prepared(config(prompts=[source], num_prompts=7))] == [f"q{n}" for n in range(7)]


def test_a_store_without_its_prompts_is_written_again(tmp_path, config):
    source = write(tmp_path / "mine.jsonl", questions(5))
    prepared(config(prompts=[source]))
    path = tmp_path / "run/prompts/prompts.arrow"
    whole = path.read_bytes()
    path.unlink()
    with pytest.raises(ValueError, match="no prepared prompts in .*; run: bash launch.sh prepare CONFIG"):
        Prepared(str(tmp_path / "run/prompts"))
    assert len(prepared(config(prompts=[source]))) == 5 and path.read_bytes() == whole
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match="prompts.arrow is damaged .*: delete it and run: bash launch.sh prepare"):
        Prepared(str(tmp_path / "run/prompts"))
    (tmp_path / "run/prompts/manifest.json").write_text('{"finished": true}')
    with pytest.raises(
        ValueError, match="manifest.json is no manifest .no 'turns', .*no 'sources'.*: delete it and run"
    ):
        prepared(config(prompts=[source]))


def test_prompts_that_the_user_prepared_are_not_replaced(run, tmp_path, capsys):
    own = write(tmp_path / "own.jsonl", [{"prompt": "mine"}])
    assert prepare.main([str(run.config(num_prompts=2)), "--prompts", own, "--num_prompts", "0"]) == 0
    said = mistake(capsys, regenerate.main, "regenerate", run.config(num_prompts=2))
    assert (
        f"was prepared with prompts ['{own}'] (this run has ['{tmp_path}/prompts.jsonl']), num_prompts 0 (this" in said
    )
    assert len(Prepared(str(tmp_path / "run/prompts"))) == 1 and not run.answers.exists()
    assert run(prompts=own) == 0
    assert read_answers(str(run.answers))[1]["counts"]["done"] == 1


def test_answers_are_not_finished_when_the_prompts_are_others(run, tmp_path, capsys):
    assert run() == 0
    assert run() == 0 and "answers are finished: 4 rows" in capsys.readouterr().out
    said = mistake(capsys, regenerate.main, "regenerate", run.config(min_prompt_characters=3))
    assert "holds answers to prompts prepared with min_prompt_characters = 0, this run has 3" in said
    with open(tmp_path / "prompts.jsonl", "a") as file:
        file.write('{"prompt": "one more"}\n')
    said = mistake(capsys, regenerate.main, "regenerate", run.config())
    assert "holds answers to prompts prepared with prompts = " in said
    # Answers of before the stage `prepare` say nothing of prompts.
    manifest = run.answers / "manifest.json"
    manifest.write_text(json.dumps({k: v for k, v in json.loads(manifest.read_text()).items() if k != "prompts"}))
    shutil.rmtree(tmp_path / "run/prompts")
    (tmp_path / "prompts.jsonl").unlink()
    assert run() == 0 and "answers are finished: 4 rows" in capsys.readouterr().out
    manifest.write_text('{"finished": true}')  # says too little to go by
    write(tmp_path / "prompts.jsonl", [{"id": name, "turns": turns} for name, turns in run.conversations.items()])
    assert run() == 0
    assert read_manifest(str(run.answers))["counts"] == {"input": 4, "done": 4, "failed": 0, "skipped": 0, "left": 0}


def test_a_run_that_answered_nothing_binds_nobody(tmp_path):
    run = Run(tmp_path, [["why? " * 20]], num_prompts=0)
    assert run(max_prompt_length=50) == 2
    assert run.turns()["skipped"] == 1
    assert run(max_prompt_length=60) == 2  # another setting: asked anew
    assert "max_prompt_length is 60" in (run.answers / "outcomes.jsonl").read_text()
    write(tmp_path / "prompts.jsonl", [{"id": "c0", "prompt": "why?"}])  # another prompt of the same id
    assert run(max_prompt_length=60) == 0
    assert run.turns() == {"input": 1, "done": 1, "failed": 0, "skipped": 0, "left": 0}
    said = (run.answers / "answers.jsonl").read_text()
    assert run(max_prompt_length=50) == 2 and (run.answers / "answers.jsonl").read_text() == said
