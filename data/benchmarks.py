"""The benchmarks of the published tables: where their prompts come from and how they are asked.

Prompt forms, splits and sample counts are those of the public DFlash, DDTree and Domino harnesses (METHODS section 4):
the user's turn only, no system prompt. A benchmark comes from the Hub through `datasets`, or from a JSONL file of
{"turns": [...]}. The seed chooses the subset: prompts are ordered by a hash of seed and id, so that n prompts are the
first n of any larger subset, whatever the order of the source.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from data.local_files import SUFFIXES
from data.prompts import Prompt, load_prompts, usable_prompts

BUILTIN = "builtin"
BUILTIN_COUNT = 48  # a multiple of its three domains


def _maths(column: str) -> Callable[[dict], list[str]]:
    ending = "Please reason step by step, and put your final answer within \\boxed{}."
    return lambda row: [f"{row[column]}\n{ending}"]


def _humaneval(row: dict) -> list[str]:
    return [
        "Write a solution to the following problem and make sure that it passes the tests:\n"
        f"```python\n{row['prompt']}\n```"
    ]


def _alpaca(row: dict) -> list[str]:
    return [f"{row['instruction']}\n\nInput:\n{row['input']}" if row.get("input") else row["instruction"]]


def _livecodebench(row: dict) -> list[str]:
    if row.get("starter_code"):
        form, code = "Use the following code structure:", row["starter_code"]
    else:
        form, code = "Write your code in the following format:", "# YOUR CODE HERE"
    return [
        "You are an expert Python programmer. You will be given a question (problem specification) and will generate a "
        "correct Python program that matches the specification and passes all tests. You will NOT return anything "
        f"except for the program\n\n### Question:\n{row['question_content']}\n\n### Format: {form}\n"
        f"```python\n{code}\n```\n\n### Answer: (use the provided format with backticks)"
    ]


@dataclass(frozen=True)
class Benchmark:
    """A benchmark of the Hub.

    Attributes:
        hub_id, subset, split: arguments of `datasets.load_dataset`.
        count: prompts of the published tables.
        turns: the user's turns of a row.
        files: JSON files of the repository, where its own loading script is code that `datasets` no longer runs.
        download: size to warn about, where it is large.
    """

    hub_id: str
    split: str
    count: int
    turns: Callable[[dict], list[str]]
    subset: str | None = None
    files: tuple[str, ...] = ()
    download: str = ""


REGISTRY = {
    "gsm8k": Benchmark("openai/gsm8k", "test", 128, _maths("question"), subset="main"),
    "math500": Benchmark("HuggingFaceH4/MATH-500", "test", 128, _maths("problem")),
    "aime25": Benchmark("MathArena/aime_2025", "train", 30, _maths("problem")),
    "humaneval": Benchmark("openai/openai_humaneval", "test", 164, _humaneval),
    "mbpp": Benchmark("google-research-datasets/mbpp", "test", 128, lambda row: [row["prompt"]], subset="sanitized"),
    "mt-bench": Benchmark("HuggingFaceH4/mt_bench_prompts", "train", 80, lambda row: list(row["prompt"])),
    "alpaca": Benchmark("tatsu-lab/alpaca", "train", 128, _alpaca),
    "livecodebench": Benchmark(
        "livecodebench/code_generation_lite",
        "test",
        128,
        _livecodebench,
        files=("test.jsonl", *(f"test{n}.jsonl" for n in range(2, 7))),
        download="4.5 GB, since the rows hold their test cases",
    ),
}


@dataclass(frozen=True)
class LoadedBenchmark:
    """Attributes: name: in every row of the results; source: where the prompts came from; prompts: in the seed's order;
    count: how many the published tables use."""

    name: str
    source: str
    prompts: list[Prompt]
    count: int


def load_benchmark(source: str, count: int, seed: int, folder: str = "") -> LoadedBenchmark:
    """All usable prompts of a benchmark, in the order of the seed.

    Args:
        source: a name of `REGISTRY`, `builtin`, the path of a JSONL file, a datasets id with a test split, or the name
            of a file NAME.jsonl in `folder`.
        count: prompts wanted (only the generator of `builtin` needs to know); 0 stands for the published count.
        folder: folder of NAME.jsonl files that replace the Hub; "" for none.

    Raises ValueError, in one line, for an unknown name, a missing file, or a Hub that cannot be reached.
    """
    known = REGISTRY.get(source)
    path = os.path.join(folder, f"{source}.jsonl") if folder and "/" not in source else ""
    if source == BUILTIN:
        count = count or BUILTIN_COUNT
        return LoadedBenchmark(source, source, load_prompts(source, count, seed, "eval"), count)
    if path and not os.path.isdir(folder):
        raise ValueError(f"benchmark_dir: no such folder: {folder}")
    if path and os.path.isfile(path):
        prompts, name, origin = load_prompts(path, None), source, path
    elif known:
        if path:
            raise ValueError(f"benchmark_dir: {folder} holds no {source}.jsonl")
        prompts, name, origin = _from_hub(source, known), source, f"{known.hub_id}, {known.split}"
    elif os.path.isfile(source) or "/" in source or source.endswith(SUFFIXES):
        prompts, origin = load_prompts(source, None, split="eval"), source
        name = Path(source).stem if source.endswith(SUFFIXES) else source
    else:
        raise ValueError(
            f"benchmarks: {source!r} is unknown: choose from {', '.join([BUILTIN, *REGISTRY])}, or give the path of a "
            'JSONL file of {"turns": [...]}'
        )
    published = REGISTRY.get(name)
    return LoadedBenchmark(name, origin, in_order(prompts, seed), published.count if published else len(prompts))


def in_order(prompts: list[Prompt], seed: int) -> list[Prompt]:
    """Shuffled by the seed, each prompt's place depending on nothing but seed and id."""
    return sorted(prompts, key=lambda p: hashlib.sha256(f"{seed}/{p.id}".encode()).digest())


def _from_hub(name: str, benchmark: Benchmark) -> list[Prompt]:
    return usable_prompts(benchmark.hub_id, name, _rows(name, benchmark))


def _rows(name: str, benchmark: Benchmark) -> Iterator[tuple[str, object]]:
    from datasets import load_dataset  # imported late: benchmarks from files do not need it

    if benchmark.download:
        print(f"benchmark {name}: {benchmark.hub_id} is a download of {benchmark.download}")
    if benchmark.files:
        files = [f"hf://datasets/{benchmark.hub_id}/{file}" for file in benchmark.files]
        arguments, more = ("json",), {"data_files": {benchmark.split: files}}
    else:
        arguments, more = (benchmark.hub_id, benchmark.subset), {}
    try:
        rows = load_dataset(*arguments, split=benchmark.split, **more)
    except Exception as error:  # the library raises its own types for network, names and splits alike
        raise ValueError(
            f"benchmarks: {name} cannot be loaded from {benchmark.hub_id}: {' '.join(str(error).split())}; without the "
            f"Hub give --benchmark_dir DIR with {name}.jsonl, or the path of a JSONL file"
        ) from error
    for number, row in enumerate(rows):
        yield f"row {number}", {"turns": benchmark.turns(row)}
