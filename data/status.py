"""Stage `data-status`: what became of every row and every turn so far. Nothing is changed; a run may be at work.

    bash launch.sh data-status [CONFIG] [--key value ...] [--json]

Turns: input == done + failed + skipped + left. Failed ones are tried again by the next `regenerate`, skipped ones are
not. Exit code 0 whatever the numbers are, 2 when there is nothing to report on.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from data.answer_store import FAILED, SKIPPED, Accounts, writers
from data.answers import read_manifest as read_answers_manifest
from data.prompt_store import read_manifest as read_prompts_manifest
from data.settings import RunConfig, run_stage

_SHOWN = 20  # reasons


def main(argv: list[str]) -> int:
    words = [word for word in argv if word != "--json"]
    show = _print_json if len(words) < len(argv) else _print
    return run_stage("data-status", words, lambda config: show(status(config)))


def status(config: RunConfig) -> dict:
    """What is known of the run's data.

    Returns {"run_dir", "prompts": {"read", "kept", "skipped": {reason: rows}} or None, "turns": {"input", "done",
    "failed", "skipped", "left"} or None, "failed": {reason: turns}, "skipped": {reason: turns}, "writing": [rank, ...],
    "finished"}. Raises ValueError when there is neither.
    """
    prompts = read_prompts_manifest(config.path("prompts"))
    manifest = read_answers_manifest(config.path("answers"))
    if not prompts and not manifest:
        raise ValueError(
            f"run_dir: {config.run_dir} holds neither prompts nor answers; run: bash launch.sh regenerate CONFIG"
        )
    # Answers of before the stage `prepare` know their number of turns themselves.
    turns = prompts.get("turns", manifest.get("counts", {}).get("input"))
    accounts = Accounts(config.path("answers"))
    return {
        "run_dir": config.run_dir,
        "prompts": prompts.get("counts"),
        "turns": None if turns is None else accounts.counts(turns),
        FAILED: accounts.reasons(FAILED),
        SKIPPED: accounts.reasons(SKIPPED),
        "writing": writers(config.path("answers")) if Path(config.path("answers")).is_dir() else [],
        "finished": bool(manifest.get("finished")),
    }


def _print_json(found: dict) -> None:
    print(json.dumps(found, ensure_ascii=False))


def _print(found: dict) -> None:
    prompts, turns = found["prompts"], found["turns"]
    print(found["run_dir"])
    if prompts is not None:
        skipped = sum(prompts["skipped"].values())
        print(f"prompts  {prompts['read']} rows read = {prompts['kept']} kept + {skipped} skipped")
        _print_reasons("skipped", prompts["skipped"])
    if turns is not None:
        done, failed, skipped, left = (turns[name] for name in ("done", FAILED, SKIPPED, "left"))
        print(f"turns    {turns['input']} = {done} done + {failed} failed + {skipped} skipped + {left} left")
        _print_reasons(FAILED, found[FAILED])
        _print_reasons(SKIPPED, found[SKIPPED])
    ranks = f" by {len(found['writing'])} ranks" if len(found["writing"]) > 1 else ""
    state = f"being written{ranks}" if found["writing"] else "finished" if found["finished"] else "not finished"
    print(f"answers  {state}")


def _print_reasons(kind: str, reasons: dict[str, int]) -> None:
    for reason, count in list(reasons.items())[:_SHOWN]:
        print(f"  {kind} {count:>9}  {reason}")
    if len(reasons) > _SHOWN:
        print(f"  and {len(reasons) - _SHOWN} other reasons")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
