"""Checkpoints for another number of ranks: DeepSpeed's universal form, beside the checkpoint's own.

    python -m training.universal RUN/checkpoints/checkpoint-N

ZeRO's optimizer state is cut into a piece for each rank. The universal form holds it by parameter, so that any number
of ranks and any ZeRO stage read it. `train` names this command when it meets a checkpoint of another layout, and
continues from what it writes. Weights, moments, learning rate and data position are kept; sums over ranks take another
order.

The checkpoint's files are pickles of DeepSpeed: convert only what you trained yourself.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

LATEST = "latest_universal"


def main(argv: list[str]) -> int:
    if len(argv) != 1 or argv[0].startswith("-"):
        print("usage: python -m training.universal RUN/checkpoints/checkpoint-N", file=sys.stderr)
        return 0 if argv[:1] in (["-h"], ["--help"]) else 2
    try:
        print(f"universal: {convert(argv[0])}")
    except ValueError as error:
        print(f"universal: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"universal: {error}", file=sys.stderr)
        return 1
    return 0


def convert(checkpoint: str) -> str:
    """Writes the universal form and returns its folder. Raises ValueError for a folder without DeepSpeed's state."""
    latest = Path(checkpoint, "latest")
    if not latest.is_file():
        raise ValueError(f"{checkpoint} holds no DeepSpeed checkpoint (no file `latest`)")
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    from deepspeed.checkpoint import ds_to_universal

    source = Path(checkpoint, latest.read_text().strip())
    output = Path(f"{source}_universal")
    ds_to_universal.main(
        argparse.Namespace(
            input_folder=str(source),
            output_folder=str(output),
            num_extract_workers=1,
            num_merge_workers=1,
            keep_temp_folder=False,
            strict=True,
            inject_missing_state=True,
        )
    )
    return str(output)


def wants_universal(checkpoint: str, deepspeed: str, layout: str) -> dict:
    """DeepSpeed's configuration, told to read the universal form. Raises ValueError with the command that makes it."""
    if not Path(checkpoint, LATEST).is_file():
        raise ValueError(
            f"{checkpoint} was written under another layout ({layout}); convert it first: "
            f"python -m training.universal {checkpoint}"
        )
    return json.loads(Path(deepspeed).read_text()) | {"checkpoint": {"load_universal": True}}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
