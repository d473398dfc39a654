"""The append-only store: nothing lost, nothing twice, one writer."""

import os

import pytest

from data.answer_store import (
    FAILED,
    SKIPPED,
    Accounts,
    AnswerStore,
    Outcome,
    drop_outcomes,
    holds_answers,
    read_outcomes,
    writers,
)
from data.answers import AnswerRow, drop_half_line, read_rows
from data.settings import StageError


def row(key, token=5):
    return AnswerRow(key, "d", [1], [token], "length")


def test_the_store_keeps_the_first_answer_and_the_last_outcome(tmp_path):
    folder = str(tmp_path)
    store = AnswerStore(folder)
    outcomes = [Outcome("b", FAILED, "x"), Outcome("c", SKIPPED, "y", "z")]
    store.add([row("a"), row("a", 6), row('quo"te\\ \u2028é')], outcomes)
    store.add([row("a", 7), row("b")], [Outcome("a", FAILED, "x"), Outcome("c", SKIPPED, "y", "z")])
    assert store.counts(6) == {"input": 6, "done": 3, "failed": 0, "skipped": 1, "left": 2}
    store.close()
    again = Accounts(folder)
    assert (again.places, again.dropped) == (store.places, {"c": (SKIPPED, "y")})
    assert again.row("a") == row("a") and again.row("b") == row("b") and again.row('quo"te\\ \u2028é').answer_ids == [5]
    assert [line.id for line in read_outcomes(tmp_path / "outcomes.jsonl")] == ["b", "c"]


def test_outcomes_alone_bind_nobody_unless_their_writer_is_at_work(tmp_path):
    folder = str(tmp_path)
    store = AnswerStore(folder)
    store.add([], [Outcome("b", SKIPPED, "x")])
    assert not holds_answers(folder)
    drop_outcomes(folder)
    assert [line.id for line in read_outcomes(tmp_path / "outcomes.jsonl")] == ["b"]
    store.close()
    drop_outcomes(folder)
    assert Accounts(folder).dropped == {} and not (tmp_path / "outcomes.jsonl").exists()
    store = AnswerStore(folder)
    store.add([row("a")])
    store.close()
    assert holds_answers(folder)


def test_one_writer_at_a_time(tmp_path):
    store = AnswerStore(str(tmp_path))
    assert writers(str(tmp_path)) == [0]
    with pytest.raises(ValueError, match=f"process {os.getpid()} is writing"):
        AnswerStore(str(tmp_path))
    store.close()
    assert writers(str(tmp_path)) == []
    AnswerStore(str(tmp_path)).close()


def test_a_full_disk_leaves_whole_lines_only(tmp_path, monkeypatch):
    store = AnswerStore(str(tmp_path))
    store.add([row("a")])

    def full(descriptor, data):
        os.write(descriptor, data[:20])
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("data.answer_store._write", full)
        with pytest.raises(StageError, match="No space left on device.*is safe"):
            store.add([row("b")])
    store.add([row("c")])
    store.close()
    assert list(read_rows(str(tmp_path))) == ["a", "c"]


@pytest.mark.parametrize("content, whole", [(b"", b""), (b"abc", b""), (b"a\nb", b"a\n"), (b"a\nb\n", b"a\nb\n")])
def test_half_a_line_is_cut(tmp_path, content, whole):
    (tmp_path / "answers.jsonl").write_bytes(content)
    drop_half_line(str(tmp_path))
    assert (tmp_path / "answers.jsonl").read_bytes() == whole
    long = b"x" * 200_000  # longer than what is read at once
    (tmp_path / "answers.jsonl").write_bytes(content[: content.rfind(b"\n") + 1] + long)
    drop_half_line(str(tmp_path))
    assert (tmp_path / "answers.jsonl").read_bytes() == content[: content.rfind(b"\n") + 1]
