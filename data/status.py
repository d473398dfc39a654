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
from data.dialogues import turn_ids
from data.prompt_store import PROMPTS, Prepared
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
    "finished": nothing is left, "cut": the time budget ended the run before, "strange": accounts that belong to no
    prompt of RUN/prompts, in none of the other numbers}. Raises ValueError when there is neither.
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
    strange = _leave_out_strange(accounts, config.path("prompts")) if prompts else 0
    counts = None if turns is None else accounts.counts(turns)
    ended, left = bool(manifest.get("finished")), bool(counts and counts["left"])
    return {
        "run_dir": config.run_dir,
        "prompts": prompts.get("counts"),
        "turns": counts,
        FAILED: accounts.reasons(FAILED),
        SKIPPED: accounts.reasons(SKIPPED),
        "writing": writers(config.path("answers")) if Path(config.path("answers")).is_dir() else [],
        "finished": ended and not left,
        "cut": ended and left and bool(manifest.get("out_of_time")),
        "strange": strange,
    }


def _leave_out_strange(accounts: Accounts, folder: str) -> int:
    """Takes what belongs to no prompt out of the accounts and says how much it was."""
    if not Path(folder, PROMPTS).is_file():
        return 0
    known = set(turn_ids(Prepared(folder)))
    strange = [key for key in (*accounts.places, *accounts.dropped) if key not in known]
    for key in strange:
        accounts.places.pop(key, None)
        accounts.dropped.pop(key, None)
    return len(strange)


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
    ended = "finished" if found["finished"] else "cut by time_budget" if found["cut"] else "not finished"
    print(f"answers  {f'being written{ranks}' if found['writing'] else ended}")
    if found["strange"]:
        print(
            f"         {found['strange']} more in RUN/answers belong to no prompt of RUN/prompts: prepare the prompts "
            "that they answer, or delete RUN/answers"
        )


def _print_reasons(kind: str, reasons: dict[str, int]) -> None:
    for reason, count in list(reasons.items())[:_SHOWN]:
        print(f"  {kind} {count:>9}  {reason}")
    if len(reasons) > _SHOWN:
        print(f"  and {len(reasons) - _SHOWN} other reasons")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
