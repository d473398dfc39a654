"""Stage `train`: distils a drafter and its correction head from the target's answers, over DeepSpeed.

    python training/train_drafter.py configs/demo.yaml --max_steps 100                       one CPU or one GPU
    deepspeed training/train_drafter.py configs/qwen3-4b-domino.yaml                         all GPUs of this machine
    DS_ACCELERATOR=cpu deepspeed --num_accelerators 2 training/train_drafter.py CONFIG       two CPU ranks
    deepspeed --hostfile HOSTS training/train_drafter.py CONFIG                              several machines

Reads RUN/answers (and its features, if they were kept). Writes RUN/checkpoints/checkpoint-N while training, and at the
end RUN/drafter with the weights and provenance.json. A run that was interrupted continues from its newest checkpoint; a
finished one says so. No CONFIG: usage, exit code 2. A user's mistake is one line and exit code 2, found before the
process group starts; a failure is exit code 1.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run as a script, sys.path starts at training/

from data.settings import parse_arguments  # noqa: E402


def main(argv: list[str]) -> int:
    # DeepSpeed's launcher puts its own option before ours; the rank is read from the environment.
    words = [word for word in argv if not word.startswith("--local_rank")]
    first = int(os.environ.get("RANK", 0)) == 0
    try:
        with contextlib.nullcontext() if first else _silence():
            config = parse_arguments("train", words, default=None)
            # Imported late: transformers costs seconds that usage and --help should not.
            from training.plan import prepare

            plan = prepare(config)
    except SystemExit as stop:
        return _leave(int(stop.code or 0), first)
    except ValueError as error:
        return _leave(_fail(error, 2, first), first)
    if plan is None:
        print(f"train: {config.path('drafter')} is finished already") if first else None
        return 0
    return _train(plan, first)


def _train(plan, first: bool) -> int:
    from training.session import train
    from training.trainer import NonFiniteLoss

    _single_process_defaults()
    try:
        train(plan)
    except ValueError as error:  # transformers and DeepSpeed check their combined options only now
        return _fail(error, 2, first)
    except NonFiniteLoss as error:
        return _fail(error, 1, first)
    return 0


def _fail(error: Exception, code: int, first: bool) -> int:
    if first:
        print(f"train: {' '.join(str(error).split())}", file=sys.stderr, flush=True)
    return code


def _leave(code: int, first: bool) -> int:
    # Before the process group exists ranks run apart, and launchers end all ranks when one fails: the others wait, so
    # that the first has time to print its line.
    if code and not first:
        time.sleep(20)
    return code


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
def _silence():
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stderr(nowhere), contextlib.redirect_stdout(nowhere):
        yield


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
