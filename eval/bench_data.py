"""Benchmark of what turns conversations into tokens with masks, for a quiet machine.

    bash launch.sh bench [CONFIG] --data [--bench_processes 2] [--bench_repeats 9]
    python -m eval.bench_data configs/demo.yaml

masks: rendering, tokenising and masking of whole conversations (`data.masks.mask_conversations`) with the target's
tokenizer and template, in one process and in several, each with one thread. The conversations are made up of the
generator's own texts: one to three questions, answers of two to eight sentences. A table for people first; the last
line is one JSON object.
"""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from itertools import islice
from multiprocessing import get_context

from data.chat import ChatFormat, Message, require_template
from data.fetch_target import resolve_target
from data.generator import generated_prompts
from data.masks import mask_conversations
from data.settings import RunConfig, run_stage

from .bench import chosen_parts
from .measure import interleave, print_result, print_table, spread

DATA_PARTS = ("masks",)
_CONVERSATIONS, _AT_ONCE = 1024, 256  # of a process in each turn; given to the tokenizer together
_worker: Worker | None = None  # of a process of the pool


def main(argv: list[str]) -> int:
    return run_stage("bench", argv, bench)


def bench(config: RunConfig) -> None:
    """Runs the stage. Raises ValueError for a user's mistake."""
    chosen_parts(config, DATA_PARTS)
    path = resolve_target(config)
    Worker(path, config, 0)  # a target without a template is one line, before processes start
    rows = masks_part(config, path)
    print_result("data", None, "none", {"masks": rows}, target=path, repeats=config.bench_repeats)


def masks_part(config: RunConfig, path: str, conversations: int = _CONVERSATIONS) -> list[dict]:
    """A row for one process and one for several: conversations a minute, and what they consist of."""
    counts = sorted({1, config.bench_processes})
    # Fresh processes: those that are copies of one with threads could wait for ever for a lock that none holds.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    with ProcessPoolExecutor(max(counts), get_context("spawn"), _start, (path, config, conversations)) as pool:
        measured = interleave({count: _arm(pool, count) for count in counts}, config.bench_repeats)
    rows = []
    for count, turns in measured.items():
        done, tokens, supervised, refused, _ = (sum(turn[1][i] for turn in turns) for i in range(5))
        rows.append(
            {
                "processes": count,
                "conversations/min": spread([60 * turn[1][0] / turn[0] for turn in turns]),
                "CPU ms each": spread([1e3 * turn[1][4] / turn[1][0] for turn in turns]),
                "tokens/s": spread([turn[1][1] / turn[0] for turn in turns]),
                "tokens each": tokens / done,
                "supervised %": 100 * supervised / max(1, tokens),
                "without mask": refused,
            }
        )
    print_table("Conversations rendered, tokenised and masked; medians over repeats (smallest-largest)", rows)
    return rows


def _arm(pool: ProcessPoolExecutor, count: int) -> Callable[[], tuple[float, list[float]]]:
    """Seconds of `count` pieces of work at once, and their sums."""

    def arm() -> tuple[float, list[float]]:
        start = time.perf_counter()
        results = list(pool.map(_work, range(count)))
        return time.perf_counter() - start, [sum(column) for column in zip(*results, strict=True)]

    return arm


def _start(path: str, config: RunConfig, conversations: int) -> None:
    global _worker
    _worker = Worker(path, config, conversations)


def _work(piece: int) -> tuple[int, int, int, int, float]:
    return _worker.run()


class Worker:
    """A tokenizer and conversations to mask."""

    def __init__(self, path: str, config: RunConfig, conversations: int):
        """Raises ValueError for a target whose tokenizer cannot be read or has no chat template."""
        from transformers import AutoTokenizer

        try:
            self.tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=config.trust_remote_code)
        except (OSError, ValueError) as error:
            raise ValueError(f"target: no tokenizer in {path}: {str(error).splitlines()[0]}") from error
        require_template(self.tokenizer)
        self.form, self.conversations = ChatFormat.of(config), made_up(conversations, config.seed)

    def run(self) -> tuple[int, int, int, int, float]:
        """Conversations, their tokens, those that are supervised, conversations that got no mask, and seconds of CPU,
        which other programs on the same core do not stretch."""
        tokens, supervised, refused, start_time = 0, 0, 0, time.process_time()
        for start in range(0, len(self.conversations), _AT_ONCE):
            for masked in mask_conversations(self.tokenizer, self.conversations[start : start + _AT_ONCE], self.form):
                tokens, refused = tokens + len(masked.ids), refused + bool(masked.reason)
                supervised += sum(masked.supervised)
        return len(self.conversations), tokens, supervised, refused, time.process_time() - start_time


def made_up(count: int, seed: int) -> list[list[Message]]:
    """Conversations of one to three questions, each answered with two to eight sentences."""
    sentences = [prompt.turns[0] for prompt in islice(generated_prompts(seed, "train"), 500)]
    rng, found = random.Random(seed), []
    for _ in range(count):
        messages: list[Message] = []
        for _ in range(rng.randint(1, 3)):
            messages.append({"role": "user", "content": rng.choice(sentences)})
            answer = " ".join(rng.choices(sentences, k=rng.randint(2, 8)))
            messages.append({"role": "assistant", "content": answer})
        found.append(messages)
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
