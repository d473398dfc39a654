"""Which rounds the overfit check judges. The check itself runs in tests/test_resume.py."""

import random
from types import SimpleNamespace

import pytest

from data.answers import AnswerRow
from data.settings import StageError
from eval.decoding.loop import Answer
from eval.records import RoundRecord
from tiny import ScriptedTarget
from training import overfit, session, train_drafter
from training.overfit import Look, accepted_in_whole_rounds, choose_sample, varied
from training.trainer import NonFiniteLoss
from training_runs import answer_rows, write_run

LEARNED = list(range(10, 20))


def answered(tokens, *accepted) -> Answer:
    rounds = [RoundRecord(3, 3, count, count + 1, 0, 0, 0, 0) for count in accepted]
    return Answer(tokens=tokens, stop="length", rounds=rounds)


@pytest.mark.parametrize(
    ("tokens", "accepted", "expected"),
    [
        # Rounds start at tokens 1, 5 and 9; the last one's proposals reach beyond the answer.
        (LEARNED, (3, 3, 0), 3.0),
        (LEARNED, (0, 1, 3, 2), (0 + 1 + 3) / 3),
        # The target leaves the text at token 6: the round that starts at 5 is not the drafter's fault.
        ([*LEARNED[:6], 50, 51, 52, 53], (3, 1, 0), 3.0),
        ([10, 50, 51, 52], (0, 0, 0), None),
    ],
)
def test_rounds_within_the_learned_text_are_judged(tokens, accepted, expected):
    assert accepted_in_whole_rounds(answered(tokens, *accepted), LEARNED, 3) == expected


def test_a_method_that_was_not_judged_neither_passes_nor_fails():
    assert Look(1, {"a": 3.0, "b": None}).least == 3.0
    assert Look(1, {"a": 0.5, "b": 3.0}).least == 0.5
    assert Look(1, {"a": None}).least == 0.0


def sample_of(following, depth=3):
    """What is chosen of one prompt whose answer follows a rule from token to token."""
    rows = SimpleNamespace(rows=[AnswerRow("a", "x", [2], [], "length")])
    config, spec = SimpleNamespace(max_row_length=100), SimpleNamespace(num_proposals=depth)
    plan = SimpleNamespace(draft_ids=None, data=SimpleNamespace(documents=rows), config=config, spec=spec)
    plan.target = ScriptedTarget(following)
    return choose_sample(plan).answer_ids


def test_an_answer_is_cut_where_it_repeats_itself():
    """0 1 2 ... 59 without end; the same of six tokens: twice round; one token over and over: nothing to be learned."""
    assert sample_of([(t + 1) % 60 for t in range(60)]) == list(range(3, 51))
    assert sample_of([(t + 1) % 6 for t in range(6)]) == [3, 4, 5, 0, 1, 2, 3, 4, 5, 0, 1, 2]
    with pytest.raises(ValueError, match="no answer of the first 8 rows has 5 tokens to draft, half of them new ones"):
        sample_of([0, 3, 3, 3])


def test_labels_of_a_wrong_place_are_never_accepted_in_whole_rounds():
    """Over what is kept of any text, a chain that repeats the text some places further gets one token a round."""
    source = random.Random(0)
    for kinds in range(2, 20):
        text = varied([source.randrange(kinds) for _ in range(48)])
        for shift in range(1, len(text)):
            agree = [a == b for a, b in zip(text, text[shift:], strict=False)]
            assert sum(agree) <= len(text) / 2


@pytest.mark.parametrize(
    "error",
    [NonFiniteLoss("the loss is not finite at step 3"), OSError(28, "No space left on device"), StageError("x\ny")],
)
def test_a_check_that_fails_on_the_way_is_one_line_and_exit_code_1(tmp_path, monkeypatch, capsys, error):
    def stop(plan):
        raise error

    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.setattr(train_drafter, "_single_process_defaults", lambda: None)
    monkeypatch.setattr(overfit, "overfit_check", stop)
    assert train_drafter.main([str(write_run(tmp_path, answer_rows(4))), "--overfit_check"]) == 1
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("train:")]
    assert lines == [f"train: {' '.join(str(error).split())}"]


def test_a_run_folder_that_cannot_be_written_is_one_line_and_exit_code_1(tmp_path, monkeypatch, capsys):
    """Refused while the trainer is built."""

    def stop(plan):
        raise OSError(28, "No space left on device", "run.json")

    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.setattr(train_drafter, "_single_process_defaults", lambda: None)
    monkeypatch.setattr(session, "build", stop)
    assert train_drafter.main([str(write_run(tmp_path, answer_rows(4)))]) == 1
    assert capsys.readouterr().err.splitlines()[-1] == "train: [Errno 28] No space left on device: 'run.json'"
