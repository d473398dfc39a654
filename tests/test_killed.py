"""A process that is killed for good (SIGKILL) while it decodes: a second one goes on and reports the same."""

import json
import signal
import time

import pytest

from eval import run_eval
from eval.records import Generation
from eval.store import asking
from evaluation_runs import save_run, write_benchmark
from training_runs import start_ranks

STORED = 5  # answers before the kill


def lines_of(folder):
    return [line for path in (folder / "eval").glob("*/rank-0.jsonl") for line in path.read_bytes().splitlines(True)]


def answers(folder):
    rows = [Generation.from_dict(json.loads(line)) for line in (folder / "generations.jsonl").read_text().splitlines()]
    return {(asking(g), g.plan.id): (g.tokens, len(g.rounds)) for g in rows}


@pytest.fixture
def run(tmp_path):
    """(Config file, run folder): 3 plans on 8 prompts."""
    rows = [{"id": f"q{n}", "turns": [f"what is {n}?"]} for n in range(8)]
    asked = dict(methods=["dflash_chain", "dartree_pruned"], choose_budget=False, trace_prompts=0, max_new_tokens=12)
    return save_run(tmp_path, write_benchmark(tmp_path / "many.jsonl", rows), eval_prompts=8, **asked)


def test_a_killed_process_is_resumed(run, tmp_path):
    config, folder = run
    (process,) = start_ranks(1, "eval/run_eval.py", config)
    try:
        limit = time.monotonic() + 200
        while len(lines_of(folder)) < STORED and process.poll() is None and time.monotonic() < limit:
            time.sleep(0.005)
    finally:
        process.send_signal(signal.SIGKILL)
        _, error = process.communicate()
    assert process.returncode == -signal.SIGKILL, error
    left = [line for line in lines_of(folder) if line.endswith(b"\n")]
    assert len(left) >= STORED and not (folder / "results.json").exists()
    assert run_eval.main([config]) == 0
    after = lines_of(folder)
    assert after[: len(left)] == left
    # An answer of each plan and a time of target.generate for each prompt: nothing twice.
    decoded = [line for line in after if b'"commit"' not in line[:10]]
    assert len(decoded) == 4 * 8 and len({path.parent for path in folder.glob("eval/*/rank-0.jsonl")}) == 1
    assert run_eval.main([config, "--run_dir", str(tmp_path / "whole"), "--drafter", str(folder / "drafter")]) == 0
    assert answers(folder) == answers(tmp_path / "whole") and len(answers(folder)) == 3 * 8
