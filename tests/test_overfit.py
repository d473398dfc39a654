"""Which rounds the overfit check judges. The check itself runs in tests/test_resume.py."""

import pytest

from eval.decoding.loop import Answer
from eval.records import RoundRecord
from training.overfit import Look, accepted_in_whole_rounds

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
