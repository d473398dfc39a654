"""Runs of the stage `regenerate` against fake servers, and what must stand in the store afterwards."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from data.answers import AnswerRow, iterate_rows
from data.chat import encode_prompt, messages_of
from data.dialogues import turn_id
from data.settings import load_config
from data.status import status
from fake_server import answer_of
from tiny_tokenizer import save_tiny_target, tiny_tokenizer

LIMIT = 12  # of an answer; some of the fake's are longer


class Run:
    """A run folder with prompts and a config; calling it runs the stage and returns the exit code."""

    def __init__(self, folder: Path, conversations: list[list[str]], **options):
        self.folder, self.tokenizer = folder, tiny_tokenizer()
        self.conversations = {f"c{n}": turns for n, turns in enumerate(conversations)}
        rows = [{"id": name, "turns": turns} for name, turns in self.conversations.items()]
        (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        if not (folder / "target").exists():
            save_tiny_target(folder / "target")
        self.options = {
            "run_dir": str(folder / "run"),
            "target": str(folder / "target"),
            "prompts": str(folder / "prompts.jsonl"),
            "num_prompts": len(rows),
            "max_answer_length": LIMIT,
            "device": "cpu",
            "dtype": "fp32",
            "keep_features": False,
            **options,
        }
        self.answers = folder / "run" / "answers"

    def config(self, **options) -> Path:
        path = self.folder / "config.yaml"
        path.write_text(json.dumps(self.options | options))
        return path

    def __call__(self, **options) -> int:
        from data.regenerate import main

        return main([str(self.config(**options))])

    def turns(self) -> dict[str, int]:
        """The accounts, which must add up."""
        counts = status(load_config(str(self.config())))["turns"]
        assert counts["input"] == counts["done"] + counts["failed"] + counts["skipped"] + counts["left"], counts
        assert min(counts.values()) >= 0 and counts["input"] == sum(map(len, self.conversations.values()))
        return counts

    def expected(self) -> dict[str, tuple[list[int], list[int], str]]:
        """Row id -> (prompt ids, answer ids, stop) as the fake target answers turn by turn."""
        rows = {}
        for name, turns in self.conversations.items():
            texts: list[str] = []
            for turn in range(len(turns)):
                ids = encode_prompt(self.tokenizer, messages_of(turns[: turn + 1], texts))
                rows[turn_id(name, turn)] = (ids, *answer_of(ids, LIMIT))
                texts.append(self.tokenizer.decode(rows[turn_id(name, turn)][1], skip_special_tokens=True))
        return rows

    def rows(self) -> dict[str, AnswerRow]:
        """All answered rows, each of which must be there once and as the fake target writes it."""
        rows = list(iterate_rows(str(self.answers)))
        assert max(Counter(row.id for row in rows).values(), default=1) == 1
        expected = self.expected()
        for row in rows:
            assert (row.prompt_ids, row.answer_ids, row.stop) == expected[row.id], row
        return {row.id: row for row in rows}


def forked(work: Callable[[], int]) -> int:
    """A child process that does the work and ends with its exit code: seconds faster than a new interpreter."""
    child = os.fork()
    if child == 0:
        code = 99
        try:
            code = work()
        finally:
            os._exit(code)
    return child
