"""Stage `data-status`."""

import json

import pytest

from answering import Run
from data import status
from data.answer_store import AnswerStore, Outcome
from data.answers import AnswerRow
from data.settings import load_config
from mistakes import mistake


@pytest.fixture
def run(tmp_path):
    """4 turns of 3 prompts, of which one is answered, one failed, one skipped; a run is at work."""
    run = Run(tmp_path, [["a"], ["b", "c"], ["d"]])
    (tmp_path / "prompts.jsonl").open("a").write('{"nothing": 1}\n')
    from data.prepare import main

    assert main([str(run.config(num_prompts=9))]) == 0
    run.answers.mkdir()
    store = AnswerStore(str(run.answers))
    store.add(
        [AnswerRow("c0", "d", [1], [2], "length")],
        [Outcome("c1", "failed", "HTTP 500"), Outcome("c2", "skipped", "long")],
    )
    yield run
    store.close()


def test_everything_is_accounted_for_while_a_run_is_at_work(run, capsys):
    capsys.readouterr()
    with open(run.answers / "answers.jsonl", "a") as file:  # a line on its way
        file.write('{"id": "c1", "dom')
    before = {path.name: path.read_bytes() for path in run.answers.iterdir()}
    assert status.main([str(run.config()), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["turns"] == {"input": 4, "done": 1, "failed": 1, "skipped": 1, "left": 1}
    assert told["failed"] == {"HTTP 500": 1} and told["skipped"] == {"long": 1} and told["writing"] == [0]
    assert (
        told["prompts"]["read"] == 4 and told["prompts"]["kept"] == 3 and sum(told["prompts"]["skipped"].values()) == 1
    )
    assert status.main([str(run.config())]) == 0
    text = capsys.readouterr().out
    assert "turns    4 = 1 done + 1 failed + 1 skipped + 1 left\n" in text and "answers  being written\n" in text
    assert "prompts  4 rows read = 3 kept + 1 skipped\n" in text and "  failed         1  HTTP 500\n" in text
    assert {path.name: path.read_bytes() for path in run.answers.iterdir()} == before


def test_answers_that_belong_to_no_prompt_are_said_and_not_counted(run, capsys):
    run.answers.joinpath("outcomes.jsonl").open("a").write('{"id": "y", "status": "failed", "reason": "gone"}\n')
    for file in run.answers.glob("lock*"):
        file.unlink()
    rows = [
        json.dumps({"id": f"x{n}", "domain": "d", "prompt_ids": [1], "answer_ids": [2], "stop": "length"})
        for n in range(9)
    ]
    run.answers.joinpath("answers-rank-1.jsonl").write_text("".join(row + "\n" for row in rows))
    found = status.status(load_config(str(run.config())))
    assert found["turns"] == {"input": 4, "done": 1, "failed": 1, "skipped": 1, "left": 1}
    assert (found["strange"], found["failed"], found["finished"]) == (10, {"HTTP 500": 1}, False)
    status._print(found)
    assert "\n         10 more in RUN/answers belong to no prompt of RUN/prompts" in capsys.readouterr().out


def test_a_run_that_its_time_budget_cut_is_not_finished(run, capsys):
    run.answers.joinpath("manifest.json").write_text('{"finished": true, "out_of_time": true}')
    for file in run.answers.glob("lock*"):
        file.unlink()
    assert status.main([str(run.config())]) == 0
    assert "1 left\n" in (text := capsys.readouterr().out) and text.endswith("answers  cut by time_budget\n")
    run.answers.joinpath("outcomes.jsonl").open("a").write('{"id": "c1.turn2", "status": "skipped", "reason": "x"}\n')
    assert status.main([str(run.config())]) == 0
    assert " 0 left\n" in (text := capsys.readouterr().out) and text.endswith("answers  finished\n")


@pytest.mark.parametrize("content", ["[]", "null", "{", '{"kept": 3}', "\udcff"])
@pytest.mark.parametrize("folder", ["prompts", "answers"])
def test_a_broken_manifest_is_named(run, capsys, folder, content):
    path = run.answers.parent / folder / "manifest.json"
    path.write_bytes(content.encode("utf-8", "surrogateescape"))
    if folder == "answers" and content.startswith('{"'):  # a run of before may have written less
        assert status.main([str(run.config())]) == 0
    else:
        said = mistake(capsys, status.main, "data-status", run.config())
        assert f"{path} is no manifest (" in said and "delete it and run the stage that writes it again" in said


def test_a_folder_without_data_is_a_mistake(tmp_path, capsys):
    config = tmp_path / "c.yaml"
    config.write_text("")
    assert "neither prompts nor answers" in mistake(capsys, status.main, "data-status", config, "--run_dir", tmp_path)
