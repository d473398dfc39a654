"""Stage `data-status`."""

import json

import pytest

from answering import Run
from data import status
from data.answer_store import AnswerStore, Outcome
from data.answers import AnswerRow
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


def test_a_folder_without_data_is_a_mistake(tmp_path, capsys):
    config = tmp_path / "c.yaml"
    config.write_text("")
    assert "neither prompts nor answers" in mistake(capsys, status.main, "data-status", config, "--run_dir", tmp_path)
