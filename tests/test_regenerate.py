import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from data import answer_store, answers, engine_local, regenerate
from data.answer_store import Accounts, AnswerStore
from data.answers import AnswerRow, read_answers, read_rows
from data.chat import encode_prompt, messages_of
from data.engine_local import answer_batch
from data.engines import Question, cut_answer
from data.features import FeatureReader
from data.regenerate import main
from data.settings import RunConfig
from tiny import EOS, VOCAB, tiny_target
from tiny_tokenizer import TEMPLATE, save_tiny_target, tiny_tokenizer

TURNS = [["hi there"], ["what is 3?"], ["b", "c, then?"], ["forbidden word"], ["why? " * 20], ["x y z"], ["last one 9"]]


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory):
    return save_tiny_target(tmp_path_factory.mktemp("target"))


@pytest.fixture
def run(tmp_path, target_folder):
    """Runs the stage in tmp_path with small sizes; returns the exit code."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"turns": t, "id": f"p{i}"}) + "\n" for i, t in enumerate(TURNS)))
    config = tmp_path / "config.yaml"

    def call(**options):
        values = {
            "run_dir": str(tmp_path / "run"),
            "target": target_folder,
            "prompts": str(prompts),
            "num_prompts": 50,
            "max_prompt_length": 60,
            "max_answer_length": 12,
            "answer_batch_size": 2,
            "dtype": "fp32",
            "device": "cpu",
            "target_layer_ids": [0, 2],
            **options,
        }
        config.write_text(json.dumps(values))
        return main([str(config)])

    call.folder = str(tmp_path / "run" / "answers")
    return call


def greedy(target, prompt, count):
    ids = torch.tensor([prompt])
    for _ in range(count):
        ids = torch.cat([ids, target.forward(ids, (0,)).logits[:, -1:].argmax(-1)], dim=1)
    return ids[0, len(prompt) :].tolist()


def test_rows_are_the_targets_own_greedy_text_and_all_input_is_accounted(run, target_folder):
    assert run() == 0
    rows, manifest = read_answers(run.folder)
    assert manifest["counts"] == {"input": 8, "done": 6, "failed": 0, "skipped": 2, "left": 0}
    assert manifest["skipped"] == {"the chat template rejects the messages": 1, "longer than max_prompt_length": 1}
    outcomes = answer_store.read_outcomes(Path(run.folder, answer_store.OUTCOMES))
    details = {outcome.id: (outcome.status, outcome.detail) for outcome in outcomes}
    assert details["p3"] == ("skipped", "bad words")
    assert details["p4"][1].endswith("max_prompt_length is 60") and set(details) == {"p3", "p4"}
    target, tokenizer = regenerate.load_target(target_folder, torch.float32), tiny_tokenizer()
    by_id = {row.id: row for row in rows}
    for row in rows:
        text = greedy(target, row.prompt_ids, 12)
        assert (row.answer_ids, row.stop) == cut_answer(text, (EOS,))
    # TRAPS 28: the same function that evaluation calls, thinking off.
    assert by_id["p0"].prompt_ids == encode_prompt(tokenizer, messages_of(["hi there"], []))
    first = tokenizer.decode(by_id["p2"].answer_ids, skip_special_tokens=True)
    assert by_id["p2.turn2"].prompt_ids == encode_prompt(tokenizer, messages_of(["b", "c, then?"], [first]))


def test_the_bar_moves_to_its_end(run, capsys):
    assert run() == 0
    bar = capsys.readouterr().err.split("answers:")[-1]
    assert bar.startswith(" 100%"), bar


def test_batching_changes_no_greedy_answer(run):
    assert run(answer_batch_size=1) == 0
    alone = {row.id: row for row in read_answers(run.folder)[0]}
    assert run(answer_batch_size=7, run_dir=run.folder + "-other") == 0
    assert {row.id: row for row in read_answers(run.folder + "-other/answers")[0]} == alone


@pytest.mark.parametrize("lost", ["between batches", "before the rows", "inside a row"])
def test_a_killed_run_loses_and_repeats_nothing(run, monkeypatch, lost):
    """TRAPS 35, with the kill at each of the places that leave something half done."""
    assert run(run_dir=run.folder + "-straight") == 0
    straight = {row.id: row for row in read_answers(run.folder + "-straight/answers")[0]}

    calls, original, append = [], engine_local.answer_batch, AnswerStore.add

    def dying_batch(*args):
        calls.append(1)
        if len(calls) == 3 and lost == "between batches":
            raise KeyboardInterrupt
        return original(*args)

    def dying_append(store, rows, outcomes=()):
        if len(calls) == 3 and lost == "before the rows":
            raise KeyboardInterrupt
        append(store, rows, outcomes)
        if len(calls) == 3 and lost == "inside a row":
            path = Path(store.folder, answers.ROWS)
            path.write_bytes(path.read_bytes()[:-30])
            raise KeyboardInterrupt

    monkeypatch.setattr(engine_local, "answer_batch", dying_batch)
    monkeypatch.setattr(AnswerStore, "add", dying_append)
    with pytest.raises(KeyboardInterrupt):
        run()
    monkeypatch.undo()
    with pytest.raises(ValueError, match="not finished; run: bash launch.sh regenerate CONFIG"):
        read_answers(run.folder)
    assert run() == 0
    rows, manifest = read_answers(run.folder)
    assert {row.id: row for row in rows} == straight
    lines = Path(run.folder, answers.ROWS).read_text().splitlines()
    assert len(lines) == len(rows) == manifest["counts"]["done"]
    reader = FeatureReader(run.folder)
    assert all(len(reader.get(r.id)[0]) == len(r.prompt_ids) + len(r.answer_ids) - 1 for r in rows)
    shards = {path.name for path in Path(run.folder, "features").glob("*.safetensors*")}
    assert shards == {reader.index.place(key)[0] for key in straight}


def test_a_finished_run_returns_without_loading_the_target(run, monkeypatch, capsys):
    assert run() == 0
    monkeypatch.setattr(regenerate, "load_target", lambda *a: pytest.fail("loaded"))
    assert run() == 0
    assert "answers are finished: 6 rows" in capsys.readouterr().out


@pytest.mark.parametrize(
    "name, value",
    [("answer_temperature", 1.0), ("max_answer_length", 9), ("tap_ids", [1]), ("template", None), ("target", None)],
)
def test_rows_made_otherwise_are_never_mixed(run, tmp_path, capsys, name, value):
    """TRAPS 29 and its kin: each setting that decides a row is compared."""
    assert run() == 0
    options = {"target_layer_ids" if name == "tap_ids" else name: value}
    if name in ("template", "target"):
        seed, template = (1, TEMPLATE) if name == "target" else (0, TEMPLATE + " ")
        options = {"target": save_tiny_target(tmp_path / "other", template=template, seed=seed)}
    capsys.readouterr()
    assert run(**options) == 2
    message = capsys.readouterr().err
    assert ("target_identity" if name == "target" else name) in message and "choose another run_dir" in message
    assert message.count("\n") == 1


def test_the_same_target_elsewhere_is_the_same(run, tmp_path):
    assert run() == 0
    assert run(target=save_tiny_target(tmp_path / "copy")) == 0


def test_more_prompts_continue_and_fewer_are_refused(run, capsys):
    assert run(num_prompts=3) == 0
    assert run() == 0
    assert read_answers(run.folder)[1]["counts"]["done"] == 6
    assert run(num_prompts=1) == 2
    assert "num_prompts 1 is less than the 7 prompts" in capsys.readouterr().err


def test_a_time_budget_stops_and_says_so(run):
    assert run(time_budget=1e-9) == 0
    rows, manifest = read_answers(run.folder)
    assert len(rows) == 2 and manifest["out_of_time"] is True
    assert manifest["finished"] and manifest["counts"] == {"input": 8, "done": 2, "failed": 0, "skipped": 2, "left": 4}


def test_a_run_cut_by_its_budget_goes_on_without_or_with_another(run, monkeypatch):
    assert run(run_dir=run.folder + "-straight") == 0
    assert run(time_budget=1e-9) == 0
    with monkeypatch.context() as patch:  # the same command again is finished: training may have begun
        patch.setattr(regenerate, "load_target", lambda *a: pytest.fail("loaded"))
        assert run(time_budget=1e-9) == 0
    assert run(time_budget=2e-9) == 0
    assert len(read_answers(run.folder)[0]) == 4
    assert run() == 0
    rows, manifest = read_answers(run.folder)
    assert manifest["out_of_time"] is False
    assert manifest["counts"] == {"input": 8, "done": 6, "failed": 0, "skipped": 2, "left": 0}
    assert {r.id: r for r in rows} == read_rows(run.folder + "-straight/answers")


def test_sampling_is_repeatable(run):
    assert run(answer_temperature=1.0) == 0
    assert run(answer_temperature=1.0, run_dir=run.folder + "-again") == 0
    assert run(answer_temperature=1.0, run_dir=run.folder + "-seed", seed=5) == 0
    again, other = (read_rows(run.folder + name) for name in ("-again/answers", "-seed/answers"))
    assert read_rows(run.folder) == again != other


@pytest.mark.parametrize("extra", [[], [60]])
def test_each_of_several_eos_ids_stops(tmp_path, extra):
    """TRAPS 30: generation_config lists several."""
    target = tiny_target()
    target.tokenizer = tiny_tokenizer()
    question = Question("q", "d", [5, 6, 7])
    config = RunConfig(max_answer_length=10)
    text = greedy(target, question.prompt_ids, 10)
    assert len(set(text)) > 3
    for position in (1, 3):
        if text[position] in text[:position]:
            continue
        target.eos_ids = (VOCAB - 1, text[position], *extra)
        (row,), _ = answer_batch(target, [question], (), config)
        assert (row.answer_ids, row.stop) == (text[: position + 1], "eos")


def test_cut_answer():
    assert cut_answer([5, 1, 7, 2], (1, 2)) == ([5, 1], "eos")
    assert cut_answer([5, 2, 7, 1], (1, 2)) == ([5, 2], "eos")
    assert cut_answer([1], (1,)) == ([1], "eos")
    # TRAPS 34: cut by the limit, and the reason is kept.
    assert cut_answer([5, 6], (1,)) == ([5, 6], "length")


def test_the_targets_own_sampling_knobs_do_not_shape_the_text():
    target = tiny_target()
    target.tokenizer = tiny_tokenizer()
    expected = cut_answer(greedy(target, [5, 6, 7], 10), target.eos_ids)
    target.model.generation_config.update(do_sample=True, temperature=0.1, repetition_penalty=50.0, min_new_tokens=9)
    (row,), _ = answer_batch(target, [Question("q", "d", [5, 6, 7])], (), RunConfig(max_answer_length=10))
    assert (row.answer_ids, row.stop) == expected


def test_out_of_memory_halves_the_batch_and_fails_single_rows(run, monkeypatch):
    """What failed is tried again by the next run, what was skipped is not."""
    original = engine_local.answer_batch

    def small_device(target, batch, taps, config):
        if len(batch) > 1 or batch[0].id == "p5":
            raise torch.OutOfMemoryError
        return original(target, batch, taps, config)

    with monkeypatch.context() as patch:
        patch.setattr(engine_local, "answer_batch", small_device)
        assert run(answer_batch_size=4) == 0
    manifest = read_answers(run.folder)[1]
    assert manifest["counts"] == {"input": 8, "done": 5, "failed": 1, "skipped": 2, "left": 0}
    assert manifest["failed"] == {"out of memory": 1} and Accounts(run.folder).status("p5") == "failed"
    outcomes = Path(run.folder, answer_store.OUTCOMES).read_text()
    assert run(answer_batch_size=4) == 0
    assert read_answers(run.folder)[1]["counts"] == {"input": 8, "done": 6, "failed": 0, "skipped": 2, "left": 0}
    assert Path(run.folder, answer_store.OUTCOMES).read_text() == outcomes


def test_describe_counts_ends_and_repeats():
    repeats = AnswerRow("a", "x", [1], [1, 2, 3, 4, 1, 2, 3, 4], "length")
    rows = [repeats, AnswerRow("b", "y", [1], [9, 8, 7, 6, 0], "eos")]
    told = answers.describe(rows)
    assert told["share_eos"] == 0.5
    assert told["distinct_4grams"] == pytest.approx(6 / 7)
    assert told["distinct_4grams_in_answer"] == pytest.approx((4 / 5 + 1) / 2)
    assert told["mean_answer_tokens"] == {"x": 8, "y": 5}
    assert answers.describe([replace(repeats, answer_ids=[1])])["distinct_4grams_in_answer"] == 0


def test_4grams_are_those_of_the_first_2000_rows():
    """All of a large run's would not fit in memory; every other figure is over all rows."""
    rows = [AnswerRow(str(i), "x", [1], [i, i, i, i], "length") for i in range(2000)]
    told = answers.describe([*rows, *[replace(rows[0], id=f"again{i}", stop="eos") for i in range(500)]])
    assert told["distinct_4grams"] == 1 and told["distinct_4grams_rows"] == 2000
    assert told["answer_tokens"] == 10_000 and told["share_eos"] == 0.2
    assert answers.describe(rows[:3])["distinct_4grams_rows"] == 3


def test_a_hub_targets_identity_is_its_commit_in_the_cache(tmp_path, monkeypatch):
    """Read from the cache alone: code that comes with a model must not run for it."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert answers.target_identity("org/model") == "org/model@None"
    folder, commit = tmp_path / "models--org--model", "0123456789abcdef0123456789abcdef01234567"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text(commit)
    (folder / "snapshots" / commit).mkdir(parents=True)
    (folder / "snapshots" / commit / "config.json").write_text('{"auto_map": {"AutoConfig": "code.Config"}}')
    assert answers.target_identity("org/model") == f"org/model@{commit}"


def identity_of(folder, **changed):
    """Identity of a model of eight tensors of 256 KiB each, some of them replaced."""
    folder.mkdir(parents=True)
    tensors = {f"layers.{i}.weight": torch.full((256, 256), float(i)) for i in range(8)} | {"norm": torch.ones(7)}
    save_file(tensors | changed, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text("{}")
    return answers.target_identity(str(folder))


def test_a_targets_identity_changes_with_any_one_tensor(tmp_path):
    """A fine-tune may touch a few projections in the middle of the file only. The place of the folder is no matter."""
    base = identity_of(tmp_path / "base")
    assert identity_of(tmp_path / "copy") == base
    changed = {f"layers.{i}.weight": torch.full((256, 256), i + 0.5) for i in range(8)} | {"norm": torch.zeros(7)}
    changed |= {"layers.8.weight": torch.ones(2, 2)}
    others = {name: identity_of(tmp_path / "other" / name, **{name: value}) for name, value in changed.items()}
    assert len({base, *others.values()}) == 1 + len(changed) == 11


@pytest.mark.parametrize("content", [b"", b"0123456", b"\xff" * 64, (2).to_bytes(8, "little") + b"[]"])
def test_a_file_that_is_no_safetensors_has_no_identity(tmp_path, content):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ValueError, match="model.safetensors is no safetensors file"):
        answers.target_identity(str(tmp_path))


def test_user_mistakes_are_one_line(run, tmp_path, capsys):
    """TRAPS 53 for this stage: exit code 2, one line, the option's name."""
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "file").write_text("")
    for options, word in (
        ({"prompts": str(tmp_path / "empty.jsonl")}, "no usable row"),
        ({"run_dir": str(tmp_path / "file" / "run")}, "run_dir: cannot create"),
        ({"target": str(tmp_path / "nowhere")}, "target: no such folder"),
        ({"target": str(tmp_path)}, "target: cannot read"),
        ({"target": str(tmp_path / "no.gguf")}, "no such GGUF file"),
        ({"target": "smollm2-135m-instruct", "cache_dir": str(tmp_path)}, "run: bash launch.sh target"),
        ({"target_layer_ids": [3]}, "the target's last"),
        ({"device": "tpu"}, "device must be"),
        ({"max_prompt_length": 2}, "no prompt could be answered"),
    ):
        capsys.readouterr()
        assert run(**options) == 2, options
        error = capsys.readouterr().err.splitlines()
        assert word in error[-1] and error[-1].startswith("regenerate: "), (options, error)
        assert not any("Traceback" in line for line in error)


def test_a_target_without_chat_template_is_refused(run, tmp_path, capsys):
    assert run(target=save_tiny_target(tmp_path / "plain", template=None)) == 2
    assert "no chat_template" in capsys.readouterr().err


def test_a_broken_row_is_named(run):
    assert run() == 0
    path = Path(run.folder, answers.ROWS)
    path.write_text("{}\n" + path.read_text())
    with pytest.raises(ValueError, match="line 1 is no answer row"):
        read_answers(run.folder)
