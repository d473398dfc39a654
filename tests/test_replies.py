"""What replies of servers are worth in tokens."""

import json

import pytest

from data.answers import AnswerRow
from data.engines import Question
from data.replies import AnswerReader, BadReply, parse_reply
from tiny import EOS, VOCAB
from tiny_tokenizer import tiny_tokenizer

QUESTION = Question("q", "d", [5, 6, 7])


def reader(eos=(EOS,), closing=EOS, limit=6):
    return AnswerReader(tiny_tokenizer(), eos, closing, limit, VOCAB)


def reply(text="abc", ids=None, finish="stop", prompt=3, wrote=4, **more):
    choice = {"text": text, "finish_reason": finish} | ({} if ids is None else {"token_ids": ids}) | more
    usage = {"prompt_tokens": prompt, "completion_tokens": wrote}
    return parse_reply(json.dumps({"choices": [choice], "usage": usage}).encode())


A, B, C = 4, 5, 6


@pytest.mark.parametrize(
    "given, ids, stop, exact",
    [
        (dict(ids=[A, B, EOS], wrote=3), [A, B, EOS], "eos", True),
        (dict(ids=[A, B], wrote=3), [A, B, EOS], "eos", True),  # the server keeps the end to itself
        (dict(ids=[A, B], stop_reason=60), [A, B, 60], "eos", True),  # and says which one it was
        (dict(ids=[A, B], stop_reason=None), [A, B, EOS], "eos", True),
        (dict(ids=[A, B], stop_reason="<eos>"), [A, B, EOS], "eos", True),
        (dict(ids=[A, B], matched_stop=60), [A, B, 60], "eos", True),
        (dict(ids=[A, EOS], stop_reason="b"), [A, EOS], "eos", True),  # nothing is added, whatever it says
        (dict(ids=[A, B, 60, C], wrote=4, finish="length"), [A, B, 60], "eos", True),  # it knew one end of two only
        (dict(ids=[A] * 6, wrote=6, finish="length"), [A] * 6, "length", True),
        (dict(), [A, B, C, EOS], "eos", False),
        (dict(wrote=3), [A, B, C, EOS], "eos", False),
        (dict(wrote=None, prompt=None), [A, B, C, EOS], "eos", False),
        (dict(text="abc<eos>"), [A, B, C, EOS], "eos", False),
        (dict(finish="length", wrote=3), [A, B, C], "length", False),
        (dict(text="abcab", finish="length", wrote=6), [A, B, C, A, B], "length", False),  # the end came at the limit
        (dict(text="", wrote=1), [EOS], "eos", False),
    ],
)
def test_what_a_reply_is_worth(given, ids, stop, exact):
    """TRAPS 30, 34: any end token stops; a cut answer carries none."""
    row = reader(eos=(EOS, 60)).row(QUESTION, reply(**given))
    assert row == AnswerRow("q", "d", [5, 6, 7], ids, stop, exact)


@pytest.mark.parametrize(
    "given, reason",
    [
        (dict(finish="content_filter"), "finish_reason content_filter"),
        (dict(finish="tool_calls"), "finish_reason tool_calls"),
        (dict(finish=None), "finish_reason None"),
        (dict(finish="x" * 99), "finish_reason " + "x" * 40),
        (dict(finish="\ud800"), "finish_reason \\ud800"),
        (dict(ids=[A, B], stop_reason="END"), "stopped at a stop string"),
        (dict(ids=[A, B], matched_stop="END"), "stopped at a stop string"),
        (dict(stop_reason="END"), "stopped at a stop string"),
        (dict(ids=[A, B, C], stop_reason=C), "stopped at a token that is no end of the target's"),
        (dict(text="ab\ud83d"), "the text does not survive tokenising"),
        (dict(prompt=4), "the server read another prompt"),
        (dict(text=""), "an empty answer"),
        (dict(text=None), "a reply without text"),
        (dict(wrote=6), "the text has another number of tokens"),
        (dict(wrote=2), "the text has another number of tokens"),
        (dict(finish="length", wrote=5), "the text has another number of tokens"),
        (dict(text="ABC"), "the text does not survive tokenising"),
        (dict(text="ab\ufffd"), "the text does not survive tokenising"),
        (dict(ids=[A, VOCAB]), "token ids outside the target's vocabulary"),
        (dict(ids=[A] * 9, finish="length"), "more tokens than max_answer_length"),
    ],
)
def test_a_reply_whose_tokens_are_not_certain_is_no_row(given, reason):
    with pytest.raises(BadReply) as caught:
        reader().row(QUESTION, reply(**given))
    assert caught.value.reason == reason


@pytest.mark.parametrize(
    "content",
    [b"", b"null", b"[1]", b'{"choices": null}', b'{"choices": [1]}', b'{"choices": []}', b"[" * 99_999, b"1" * 9_999],
)
def test_what_is_no_reply_says_so(content):
    with pytest.raises(BadReply, match="not JSON|exactly one answer"):
        parse_reply(content)
