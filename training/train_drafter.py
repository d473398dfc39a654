"""Stage `train`: distils a drafter and its correction head from the target's answers, over DeepSpeed.

    python training/train_drafter.py configs/demo.yaml --max_steps 100                       one CPU or one GPU
    deepspeed training/train_drafter.py configs/qwen3-4b-domino.yaml                         all GPUs of this machine
    DS_ACCELERATOR=cpu deepspeed --num_accelerators 2 training/train_drafter.py CONFIG       two CPU ranks
    deepspeed --hostfile HOSTS training/train_drafter.py CONFIG                              several machines
    python training/train_drafter.py CONFIG --overfit_check                                  a check of minutes, first

Reads RUN/answers (and its features, if they were kept). Writes RUN/checkpoints/checkpoint-N while training, and at the
end RUN/drafter with the weights and provenance.json. A run that was interrupted continues from its newest checkpoint; a
finished one says so. No CONFIG: usage, exit code 2. A user's mistake is one line and exit code 2, found before the
process group starts; a failure is exit code 1.
"""

from __future__ import annotations

import contextlib
import io
import os
import socket
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run as a script, sys.path starts at training/

from data.settings import StageError, parse_arguments  # noqa: E402


def main(argv: list[str]) -> int:
    rank, said = int(os.environ.get("RANK", 0)), io.StringIO()
    try:
        with contextlib.nullcontext() if rank == 0 else _into(said):
            config = parse_arguments("train", argv, default=None)
            # Imported late: transformers costs seconds that usage and --help should not.
            if config.dry_run:
                from training.dry_run import describe_run

                print(describe_run(config)) if rank == 0 else None
                return 0
            from training.plan import prepare

            plan = prepare(config)
    except SystemExit as stop:
        if rank == 0 or not stop.code:
            return int(stop.code or 0)
        return _mistake(said.getvalue().removeprefix("train: "), rank)
    except ValueError as error:
        return _mistake(str(error), rank)
    except (OSError, StageError) as error:
        return _failure(error, rank)
    if plan is None:
        print(f"train: {config.path('drafter')} is finished already") if rank == 0 else None
        return 0
    return _train(plan, rank)


def _train(plan, rank: int) -> int:
    from training.session import build, train
    from training.trainer import NonFiniteLoss

    _single_process_defaults()
    try:
        if plan.config.overfit_check:
            return _check(plan, rank)
        try:
            trainer, progress = build(plan)
        except ValueError as error:  # transformers and DeepSpeed check their combined options only now
            return _mistake(str(error), rank)
        train(plan, trainer, progress)
    except NonFiniteLoss as error:  # all ranks stop together
        print(f"train: {error}", file=sys.stderr, flush=True) if rank == 0 else None
        return 1
    except (OSError, StageError) as error:  # a full disk, of this rank perhaps alone; the launcher ends the others
        return _failure(error, rank)
    return 0


def _check(plan, rank: int) -> int:
    """The overfit gate: exit code 1 when decoding does not accept what was learned. Raises what training raises."""
    from training.overfit import overfit_check

    try:
        return 0 if overfit_check(plan) else 1
    except ValueError as error:
        return _mistake(str(error), rank)


def _failure(error: Exception, rank: int) -> int:
    """Prints what the system refused as one line, and returns its exit code."""
    where = f"train (rank {rank})" if rank else "train"
    print(f"{where}: {' '.join(str(error).split())}", file=sys.stderr, flush=True)
    return 1


def _mistake(message: str, rank: int) -> int:
    """Prints a user's mistake as one line, and returns its exit code."""
    # Ranks run apart, and launchers end all of them when one fails. The others wait: of a mistake that all have made
    # only the first rank's line is seen, and one of a single machine is still told.
    if rank:
        time.sleep(20)
    where = f"train (rank {rank})" if rank else "train"
    print(f"{where}: {' '.join(message.split())}", file=sys.stderr, flush=True)
    return 2


def _single_process_defaults() -> None:
    """What a launcher would set, for `python training/train_drafter.py`."""
    if "RANK" in os.environ:
        return
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    defaults = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "LOCAL_WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1"}
    for name, value in (defaults | {"MASTER_PORT": port}).items():
        os.environ.setdefault(name, str(value))


@contextlib.contextmanager
def _into(text: io.StringIO):
    with contextlib.redirect_stderr(text), contextlib.redirect_stdout(text):
        yield


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
