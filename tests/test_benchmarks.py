"""Benchmarks: the public prompt forms, from the Hub (faked) or from files, and the seed's subsets."""

import json

import datasets
import pytest

from data.benchmarks import REGISTRY, load_benchmark

BOXED = "\nPlease reason step by step, and put your final answer within \\boxed{}."
ROWS = {
    "gsm8k": ({"question": "How many?", "answer": "3"}, ["How many?" + BOXED]),
    "math500": ({"problem": "Find $x$."}, ["Find $x$." + BOXED]),
    "aime25": ({"problem_idx": 1, "problem": "Find the sum.", "answer": 70}, ["Find the sum." + BOXED]),
    "humaneval": (
        {"prompt": 'def f(x):\n    """Doubles x."""\n', "test": "assert True"},
        [
            "Write a solution to the following problem and make sure that it passes the tests:\n"
            '```python\ndef f(x):\n    """Doubles x."""\n\n```'
        ],
    ),
    "mbpp": ({"prompt": "Write a function to sort.", "code": "sorted"}, ["Write a function to sort."]),
    "mt-bench": ({"prompt": ["Write a blog post.", "Start with A."], "category": "writing"}, None),
    "alpaca": ({"instruction": "Rate it.", "input": "Avengers", "output": "12"}, ["Rate it.\n\nInput:\nAvengers"]),
    "livecodebench": (
        {"question_content": "Print YES.", "starter_code": "class Solution:\n    pass\n"},
        [
            "You are an expert Python programmer. You will be given a question (problem specification) and will "
            "generate a correct Python program that matches the specification and passes all tests. You will NOT "
            "return anything except for the program\n\n### Question:\nPrint YES.\n\n### Format: Use the following "
            "code structure:\n```python\nclass Solution:\n    pass\n\n```\n\n### Answer: (use the provided format "
            "with backticks)"
        ],
    ),
}
ARGUMENTS = {
    "gsm8k": ("openai/gsm8k", "main", "test"),
    "math500": ("HuggingFaceH4/MATH-500", None, "test"),
    "aime25": ("MathArena/aime_2025", None, "train"),
    "humaneval": ("openai/openai_humaneval", None, "test"),
    "mbpp": ("google-research-datasets/mbpp", "sanitized", "test"),
    "mt-bench": ("HuggingFaceH4/mt_bench_prompts", None, "train"),
    "alpaca": ("tatsu-lab/alpaca", None, "train"),
}
COUNTS = {
    "gsm8k": 128, "math500": 128, "aime25": 30, "humaneval": 164, "mbpp": 128, "mt-bench": 80, "alpaca": 128,
    "livecodebench": 128,
}  # fmt: skip


@pytest.mark.parametrize("name", REGISTRY)
def test_hub_rows_become_the_public_prompts(name, monkeypatch):
    row, turns = ROWS[name]
    calls = []
    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **more: calls.append((args, more)) or [row])
    loaded = load_benchmark(name, 4, seed=0)
    assert [p.turns for p in loaded.prompts] == [turns or row["prompt"]]
    assert (loaded.name, loaded.count) == (name, COUNTS[name])
    if name != "livecodebench":
        hub_id, subset, split = ARGUMENTS[name]
        assert calls == [((hub_id, subset), {"split": split})]


def test_livecodebench_reads_all_files_of_the_repository_and_asks_for_a_whole_program_without_a_stub(
    monkeypatch, capsys
):
    calls = []
    rows = [{"question_content": "Add.", "starter_code": ""}]
    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **more: calls.append((args, more)) or rows)
    text = load_benchmark("livecodebench", 1, 0).prompts[0].turns[0]
    assert "### Format: Write your code in the following format:\n```python\n# YOUR CODE HERE\n```\n" in text
    ((kind,), more) = calls[0]
    files = more["data_files"]["test"]
    assert kind == "json" and len(files) == 6 and more["split"] == "test"
    assert files[0] == "hf://datasets/livecodebench/code_generation_lite/test.jsonl" and files[5].endswith(
        "test6.jsonl"
    )
    assert "4.5 GB" in capsys.readouterr().out


def test_alpaca_without_an_input_is_the_instruction_alone(monkeypatch):
    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **more: [{"instruction": "Sing.", "input": ""}])
    assert load_benchmark("alpaca", 1, 0).prompts[0].turns == ["Sing."]


def write(path, count, turns=1):
    rows = [{"turns": [f"question {n}, turn {t}" for t in range(turns)]} for n in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return rows


def test_the_seed_orders_the_prompts_whatever_the_order_and_the_length_of_the_source(tmp_path):
    rows = write(tmp_path / "mine.jsonl", 40)
    prompts = load_benchmark(str(tmp_path / "mine.jsonl"), 8, seed=1).prompts
    assert len(prompts) == 40 and prompts[:8] != [p for p in prompts if p.turns in [r["turns"] for r in rows[:8]]]
    # The same rows in another order, and without the last prompt of the first order.
    rest = [{"turns": p.turns} for p in reversed(prompts[:39])]
    (tmp_path / "other.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rest))
    again = load_benchmark(str(tmp_path / "other.jsonl"), 8, seed=1).prompts
    assert [p.id for p in again] == [p.id for p in prompts[:39]]
    assert [p.id for p in load_benchmark(str(tmp_path / "mine.jsonl"), 8, seed=2).prompts] != [p.id for p in prompts]


def test_a_folder_of_files_stands_for_the_hub(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **more: pytest.fail("the Hub was asked"))
    write(tmp_path / "mt-bench.jsonl", 3, turns=2)
    write(tmp_path / "own.jsonl", 2)
    loaded = load_benchmark("mt-bench", 0, 0, str(tmp_path))
    assert (loaded.name, loaded.count, {len(p.turns) for p in loaded.prompts}) == ("mt-bench", 80, {2})
    assert loaded.source.endswith("mt-bench.jsonl")
    assert (load_benchmark("own", 0, 0, str(tmp_path)).name, load_benchmark("own", 0, 0, str(tmp_path)).count) == (
        "own",
        2,
    )
    # The same prompts have the same ids from wherever they come.
    by_path = load_benchmark(str(tmp_path / "mt-bench.jsonl"), 0, 0)
    assert by_path.prompts == loaded.prompts and by_path.count == 80
    with pytest.raises(ValueError, match="benchmark_dir: .* holds no gsm8k.jsonl"):
        load_benchmark("gsm8k", 0, 0, str(tmp_path))
    with pytest.raises(ValueError, match="benchmark_dir: no such folder: /nowhere"):
        load_benchmark("gsm8k", 0, 0, "/nowhere")


def test_an_unknown_name_lists_the_known_ones_and_the_way_by_path():
    with pytest.raises(ValueError) as error:
        load_benchmark("gsm9k", 4, 0)
    for word in ("'gsm9k' is unknown", *REGISTRY, "builtin", 'JSONL file of {"turns": [...]}'):
        assert word in str(error.value)
    with pytest.raises(ValueError, match="no such file: missing.jsonl"):
        load_benchmark("missing.jsonl", 4, 0)


def test_a_hub_that_cannot_be_reached_is_one_line_with_the_way_out(monkeypatch):
    def offline(*args, **more):
        raise ConnectionError("no\nroute")

    monkeypatch.setattr(datasets, "load_dataset", offline)
    with pytest.raises(
        ValueError, match="gsm8k cannot be loaded from openai/gsm8k: no route; .*--benchmark_dir DIR"
    ) as error:
        load_benchmark("gsm8k", 4, 0)
    assert "\n" not in str(error.value)


def test_builtin_keeps_the_generators_prompts():
    assert len(load_benchmark("builtin", 5, 0).prompts) == 5
    assert load_benchmark("builtin", 0, 0).count == 48
