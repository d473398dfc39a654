"""Engines beside the server: ranks, seeds of rows, sampling, recorded answers."""

import json
import os
import signal

import pytest
import torch
from transformers.generation import TopKLogitsWarper

from answering import LIMIT, Run, forked
from data.answers import answer_files, iterate_rows, read_answers, read_rows
from data.engine_local import DrawByRow, answer_batch, drawing
from data.engines import Question, Sampling
from data.features import FeatureReader
from data.regenerate import main
from data.settings import RunConfig
from tiny import EOS, tiny_target
from tiny_tokenizer import TEMPLATE, save_tiny_target, tiny_tokenizer

TALKS = [["hi there"], ["b", "c, then?"], ["what is 3?", "why", "how"]]


def on_ranks(monkeypatch, ranks, run, **options):
    """Runs the stage as each rank in turn; none waits for another, so that one process can be all of them."""
    for rank in range(ranks):
        with monkeypatch.context() as place:
            for name, value in (("RANK", rank), ("WORLD_SIZE", ranks), ("MASTER_PORT", 29000)):
                place.setenv(name, str(value))
            assert run(**options) == 0


@pytest.mark.parametrize("sampled", [{}, {"answer_temperature": 1.0, "top_p": 0.9}])
def test_rows_do_not_depend_on_ranks_or_batches(tmp_path, monkeypatch, sampled):
    """TRAPS 48 without processes: 2 ranks, 3 conversations; and features, an index for each rank."""
    run = Run(tmp_path, TALKS, keep_features=True, target_layer_ids=[0, 2], **sampled)
    assert run(run_dir=str(tmp_path / "alone"), answer_batch_size=1) == 0
    alone = read_rows(str(tmp_path / "alone" / "answers"))
    assert len(alone) == 6
    on_ranks(monkeypatch, 2, run)
    assert [path.name for path in answer_files(str(run.answers))] == ["answers.jsonl", "answers-rank-1.jsonl"]
    assert [len(list(open(path))) for path in answer_files(str(run.answers))] == [4, 2]
    rows, manifest = read_answers(str(run.answers))
    assert {row.id: row for row in rows} == alone and manifest["finished"]
    assert manifest["counts"] == {"input": 6, "done": 6, "failed": 0, "skipped": 0, "left": 0}
    reader = FeatureReader(str(run.answers))
    assert all(reader.length(row.id) == len(row.prompt_ids) + len(row.answer_ids) - 1 for row in rows)


def test_another_number_of_ranks_repeats_nothing(tmp_path, monkeypatch):
    """Four ranks begin, one process goes on, two ranks end it: with more prompts each time."""
    talks = [[f"talk {n}", "and?"] for n in range(12)]
    run = Run(tmp_path, talks)
    on_ranks(monkeypatch, 4, run, num_prompts=5)
    on_ranks(monkeypatch, 1, run, num_prompts=8)
    on_ranks(monkeypatch, 2, run, num_prompts=12)
    ids = [row.id for row in iterate_rows(str(run.answers))]
    assert len(ids) == len(set(ids)) == 24
    assert run(run_dir=str(tmp_path / "alone")) == 0
    assert read_rows(str(run.answers)) == read_rows(str(tmp_path / "alone" / "answers"))


def test_two_ranks_with_three_prompts_do_not_hang(tmp_path):
    """TRAPS 48 as processes at the same time."""
    run = Run(tmp_path, TALKS)
    config = str(run.config())

    def as_rank(rank):
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "MASTER_PORT": "29001"}
        signal.alarm(60)
        return main([config])

    children = [forked(lambda rank=rank: as_rank(rank)) for rank in (1, 0)]
    assert [os.waitpid(child, 0)[1] for child in children] == [0, 0]
    manifest = read_answers(str(run.answers))[1]
    assert manifest["counts"]["done"] == 6
    assert [len(list(open(path))) for path in answer_files(str(run.answers))] == [4, 2]


def test_a_drawn_text_is_the_rows_own(monkeypatch):
    """Neither neighbours in the batch nor their order change what is drawn; the seed and the row do."""
    target = tiny_target()
    target.tokenizer = tiny_tokenizer()
    config = RunConfig(max_answer_length=10, answer_temperature=1.0, seed=4)
    questions = [Question(f"q{n}", "d", [5 + n, 6, 7][: 2 + n % 2]) for n in range(4)]
    together, _ = answer_batch(target, questions, (), config)
    backwards, _ = answer_batch(target, questions[::-1], (), config)
    alone = [answer_batch(target, [question], (), config)[0][0] for question in questions]
    assert together == backwards[::-1] == alone
    same_prompt = [Question(name, "d", [5, 6, 7]) for name in ("a", "b")]
    rows, _ = answer_batch(target, same_prompt, (), config)
    other, _ = answer_batch(target, same_prompt, (), RunConfig(max_answer_length=10, answer_temperature=1.0, seed=5))
    assert len({tuple(row.answer_ids) for row in (*rows, *other)}) == 4


def test_tokens_are_drawn_from_the_distribution(monkeypatch):
    """V=4, 20k rows: total variation from softmax(logits / T) < 0.01, and top_k, top_p, min_p cut what they should."""
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    rows = [str(n) for n in range(20_000)]

    def shares(**knobs):
        sampling = Sampling(**{**dict(temperature=0.7, top_p=1.0, top_k=0, min_p=0.0, max_length=2, seed=0), **knobs})
        scores = logits.repeat(len(rows), 1)
        for step in drawing(sampling, rows, 3):
            scores = step(torch.zeros(len(rows), 4, dtype=torch.long), scores)
        return torch.bincount(scores.argmax(-1), minlength=4) / len(rows)

    expected = (logits[0] / 0.7).softmax(-1)
    assert (shares() - expected).abs().sum() / 2 < 0.01
    for knobs, kept in ((dict(top_k=2), 2), (dict(top_p=0.8), 2), (dict(min_p=0.02), 3), (dict(top_k=1), 1)):
        cut = torch.where(torch.arange(4) < kept, expected, 0)
        found = shares(**knobs)
        assert (found - cut / cut.sum()).abs().sum() / 2 < 0.01 and found[kept:].sum() == 0


def test_no_token_of_probability_zero_is_drawn():
    sampling = Sampling(1.0, 1.0, 0, 0.0, 1, 0)
    draw = DrawByRow(sampling, ["a", "b"], 1)
    draw._draws_RT = torch.tensor([[0.0], [1.0 - 2**-53]], dtype=torch.float64)
    scores = TopKLogitsWarper(2)(None, torch.tensor([[-5.0, 3.0, 2.0, -9.0]] * 2))
    assert draw(torch.zeros(2, 1), scores).argmax(-1).tolist() == [1, 2]


def test_recorded_answers_are_rows_when_the_target_wrote_them(tmp_path):
    closing = "{{ m.content }}{% if m.role == 'assistant' %}<eos>{% endif %}/"
    save_tiny_target(tmp_path / "target", template=TEMPLATE.replace("{{ m.content }}/", closing))
    run, long = Run(tmp_path, [["x"]], engine="recorded", num_prompts=9), "q" * (LIMIT + 5)
    talks = {
        "a": [("user", "hi"), ("assistant", "hello"), ("user", "why"), ("assistant", "so")],
        "b": [("user", "long"), ("assistant", long), ("user", "more"), ("assistant", "yes")],
        "c": [("user", "no answer")],
        "d": [("user", "empty"), ("assistant", " ")],
    }
    lines = [{"id": k, "messages": [{"role": r, "content": c} for r, c in talk]} for k, talk in talks.items()]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert run() == 0
    rows, manifest = read_answers(str(run.answers))
    by_id = {row.id: row for row in rows}
    encode = run.tokenizer.encode
    assert by_id["a"].answer_ids == [*encode("hello"), EOS] and by_id["a"].stop == "eos"
    assert by_id["a"].prompt_ids == encode("u:hi/a:")
    assert by_id["a.turn2"].prompt_ids == encode("u:hi/a:hello<eos>/u:why/a:")
    assert by_id["a.turn2"].answer_ids == [*encode("so"), EOS] and not by_id["a"].exact
    assert (by_id["b"].answer_ids, by_id["b"].stop) == (encode("q" * LIMIT), "length")
    # What follows a cut answer came after the whole of it.
    assert by_id["b.turn2"].prompt_ids == encode(f"u:long/a:{long}<eos>/u:more/a:")
    assert manifest["counts"]["done"] == 4 and manifest["counts"]["left"] == 0
    assert set(manifest["skipped"]) <= {"the data set has no answer", "an empty answer"}
    assert run(engine="local") == 2


def test_prompts_of_another_run_are_refused(tmp_path, capsys):
    run = Run(tmp_path, TALKS)
    run.answers.mkdir(parents=True)
    (run.answers / "answers.jsonl").write_text(
        json.dumps({"id": "other", "domain": "d", "prompt_ids": [1], "answer_ids": [2], "stop": "length"}) + "\n"
    )
    assert run() == 2
    assert "holds 1 answers to other prompts" in capsys.readouterr().err
