"""What an evaluation takes for one measurement, and what it settles before it decodes an answer."""

import json
from pathlib import Path

import pytest
import torch

from data.chat import encode_prompt, messages_of
from data.options import RunConfig
from eval import budget_policy, marks, run_eval
from eval.cells import CELLS, Cell, CellStore
from eval.marks import fingerprints, measured_on
from eval.records import Plan
from eval.store import Store
from evaluation_runs import save_run, write_benchmark
from made_up import response
from mistakes import mistake
from tiny_tokenizer import tiny_tokenizer

TURNS = ["what is a fox?", "and a dog?"]
NEW = 6  # tokens of an answer
COLUMN = 2 * 4 * 2 * 8 * 4  # bytes of a token's keys and values: 4 layers, 2 heads of 8, fp32


@pytest.fixture
def run(tmp_path, monkeypatch):
    """(Config file, run folder) of a saved target, a saved drafter and a benchmark that is asked with AR alone."""
    monkeypatch.setattr(run_eval, "git_commit", lambda: "aaa")  # the clone may change while the tests run
    benchmark = ask(tmp_path / "two.jsonl", ["count to ten."], TURNS)
    alone = dict(methods=["ar"], choose_budget=False, trace_prompts=0)
    return save_run(tmp_path, benchmark, eval_prompts=4, max_new_tokens=NEW, **alone)


def ask(path, *conversations):
    return write_benchmark(path, [{"id": f"q{n}", "turns": turns} for n, turns in enumerate(conversations)])


def contents(folder):
    return {path: path.read_bytes() for path in sorted((folder / "eval").glob("*/*"))}


def results_of(folder):
    return json.loads((folder / "results.json").read_text())


def test_a_mark_holds_the_machine_and_what_auto_stands_for(run, monkeypatch):
    _, folder = run
    drafter, known = str(folder / "drafter"), marks.hardware()

    def mark(device="cpu", ranks=1, **options):
        config = RunConfig(run_dir=str(folder), target=str(folder.parent / "target"), **options)
        return fingerprints(config, drafter, measured_on(config, device, ranks))

    first = mark(dtype="fp32")
    assert first == mark(dtype="fp32") == mark(dtype="float32", device_map=[]) == mark(device="cpu", dtype="fp32")
    others = [mark(dtype="bf16"), mark("cuda", dtype="fp32"), mark(ranks=2, dtype="fp32")]
    monkeypatch.setattr("models.target.cpu_has_bf16", lambda: True)
    assert mark(dtype="auto") == mark(dtype="bf16")
    monkeypatch.setattr("models.target.cpu_has_bf16", lambda: False)
    assert mark(dtype="auto") == first
    torch.set_num_threads(2)
    others.append(mark(dtype="fp32"))
    torch.set_num_threads(1)
    for name, value in (("cpu", "another"), ("gpus", ["one"]), ("cores", 999)):
        monkeypatch.setattr(marks, "hardware", lambda n=name, v=value: known | {n: v})
        others.append(mark(dtype="fp32"))
    monkeypatch.setattr(marks, "hardware", lambda: known | {"memory_gb": 1.0})
    assert mark(dtype="fp32") == first
    monkeypatch.setattr(marks, "versions", lambda: {"torch": "1.0"})
    others.append(mark(dtype="fp32"))
    for part in (0, 1):  # of stored answers, and of results
        assert len({first[part], *(other[part] for other in others)}) == 1 + len(others)


def test_another_machine_starts_a_measurement_and_leaves_the_old_one_alone(run, monkeypatch, capsys):
    config, folder = run
    assert run_eval.main([config]) == 0
    assert "new measurement" not in capsys.readouterr().out
    before, known = contents(folder), marks.hardware()
    with monkeypatch.context() as there:
        there.setattr(marks, "hardware", lambda: known | {"threads": 4})
        assert run_eval.main([config]) == 0
    assert f"eval: starts a new measurement; 1 in {folder}/eval had other options" in capsys.readouterr().out
    after = contents(folder)
    assert before.items() < after.items() and len({path.parent for path in after}) == 2
    # Back again: everything is there, nothing is decoded.
    assert run_eval.main([config]) == 0
    out = capsys.readouterr().out
    assert "new measurement" not in out and "finished already" not in out and contents(folder) == after


def test_the_commit_is_that_of_the_start_and_all_are_listed(run, monkeypatch):
    config, folder = run
    commits, decode = ["aaa", "bbb-dirty"], run_eval.decode

    def edited_meanwhile(*args):
        decode(*args)
        del commits[:-1]

    monkeypatch.setattr(run_eval, "git_commit", lambda: commits[0])
    monkeypatch.setattr(run_eval, "decode", edited_meanwhile)
    assert run_eval.main([config, "--eval_prompts", "1"]) == 0
    settings = results_of(folder)["settings"]
    assert (settings["git_commit"], settings["git_commits"]) == ("aaa", ["aaa"])
    assert run_eval.main([config]) == 0 and run_eval.main([config, "--temperatures", "0", "1"]) == 0
    settings = results_of(folder)["settings"]
    assert (settings["git_commit"], settings["git_commits"]) == ("bbb-dirty", ["aaa", "bbb-dirty"])


@pytest.mark.parametrize(
    "words", [["--choose_budget", "true"], ["--budget_policy", "cost-aware", "--temperatures", "1"]]
)
def test_a_prompt_that_the_budget_was_found_on_is_never_evaluated_later(run, monkeypatch, capsys, tmp_path, words):
    config, folder = run
    monkeypatch.setattr(budget_policy, "verify_cost", lambda *args, **more: dict.fromkeys(args[2], 1e-3))
    training = ask(tmp_path / "training.jsonl", ["what is ten?"], ["a fox and a dog?"])
    words = [config, "--methods", "dartree_pruned", "--prompts", training, *words]
    assert run_eval.main(words) == 0
    before = contents(folder)
    other = ask(tmp_path / "other.jsonl", ["count to nine."])
    assert run_eval.main([*words, "--benchmarks", str(tmp_path / "two.jsonl"), other]) == 0
    (store,) = (folder / "eval").iterdir()
    used = [json.loads(line)["used"] for line in before[store / "rank-0.jsonl"].splitlines() if b'"used"' in line]
    assert [len(digests) for digests in used] == [2]
    known = contents(folder)
    overlapping = ask(tmp_path / "overlapping.jsonl", ["a fox and a dog?"])
    more = ["--benchmarks", str(tmp_path / "two.jsonl"), overlapping]
    error = mistake(capsys, run_eval.main, "eval", *words, *more)
    assert error.startswith("eval: benchmarks: prompt 'q0' is one of the training prompts") and str(store) in error
    assert contents(folder) == known


def test_a_request_beyond_the_memory_limit_is_refused_before_anything_is_decoded(run, capsys):
    """A later turn counts as long as any prompt may be, several at once with as many caches."""
    config, folder = run
    ask(folder.parent / "two.jsonl", ["count to ten."], TURNS, ["count to nine."])
    longest = 60 + NEW + 2  # prompt, its answer, two columns of a round
    first = max(len(encode_prompt(tiny_tokenizer(), messages_of([t], []))) for t in ("count to ten.", TURNS[0]))

    def limit(columns):
        return ["--max_cache_gb", str((columns + 0.5) * COLUMN / 1e9)]

    training = ask(folder.parent / "training.jsonl", ["what is ten?"])
    words = [config, "--max_prompt_length", "60", "--prompts", training]
    error = mistake(capsys, run_eval.main, "eval", *words, *limit(longest - 1))
    assert f"request 'q1 of two, a later turn' needs {longest} cache columns, but max_cache_gb" in error
    loaded = ["--concurrency", "1", "4", "--concurrency_prompts", "3"]
    alone = first + NEW + 2
    error = mistake(capsys, run_eval.main, "eval", *words, *loaded, *limit(3 * alone - 1))
    assert f"of two' needs {alone} cache columns" in error and f"{alone - 1} for each of 3 requests at once" in error
    assert not (folder / "eval").exists() and not (folder / "results.json").exists()
    assert run_eval.main([*words, *loaded, *limit(3 * alone)]) == 0


def test_the_report_stands_before_several_at_once_are_measured(run, monkeypatch, capsys):
    config, folder = run
    words = [config, "--concurrency", "2", "--concurrency_prompts", "2"]
    with monkeypatch.context() as broken:
        broken.setattr(run_eval, "measure_concurrency", lambda *_: (_ for _ in ()).throw(OSError("no space")))
        assert run_eval.main(words) == 1
    results = results_of(folder)
    assert results["summary"] and results["concurrency"] == [] and results["settings"]["fingerprint"] is None
    assert (folder / "report.md").is_file()
    assert run_eval.main(words) == 0
    results = results_of(folder)
    assert [r["concurrency"] for r in results["concurrency"]] == [2] and results["settings"]["fingerprint"]
    assert "2 at once" in (folder / "report.md").read_text()
    capsys.readouterr()
    assert run_eval.main(words) == 0 and "finished already" in capsys.readouterr().out


class Killed(BaseException):
    """Stands for kill -9."""


def test_a_kill_while_the_half_line_is_cut_loses_nothing(tmp_path, monkeypatch):
    def dying(self, data):
        self.open("wb").close()
        raise Killed

    monkeypatch.setattr(Path, "write_bytes", dying)
    config = RunConfig(run_dir=str(tmp_path))
    store = Store(config, "mark", 0)
    store.add(response([1, 2], "p0", "ar"), [5, 6])
    cells = CellStore(tmp_path / CELLS)
    cells.add(
        Cell("b", 0.0, Plan("ar"), 1, 0, "x", 1, [[3, 4]], 2, 1.0, 0.5, 1, 1, [1.0], 0, {}, {"length": 1}, 0.1, None)
    )
    for path, read in (
        (store.path, lambda: Store(config, "mark", 0).generations),
        (cells.path, lambda: CellStore(tmp_path / CELLS).cells),
    ):
        whole = path.read_bytes()
        with path.open("ab") as file:
            file.write(whole[:30])
        assert len(read()) == 1 and path.read_bytes() == whole
