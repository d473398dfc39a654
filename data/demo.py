"""Stage `demo`: all stages in order, each a command of launch.sh in a process of its own, then the table.

    bash launch.sh demo [CONFIG] [--key value ...]

Every stage finds out by itself what is finished and what continues, so a second run is quick and an interrupted one
goes on. RUN/stages.json keeps each stage's seconds and peak memory of the run that did its work, and what was cut for a
slow machine.
"""

from __future__ import annotations

import json
import os
import resource
import shlex
import subprocess
import sys
import time
from pathlib import Path

from data.answers import make_folder
from data.environment import choose_device, cut_for_speed, slow_down
from data.settings import RunConfig, parse_arguments

STAGES = ("target", "regenerate", "train", "eval", "export")
ROOT = Path(__file__).resolve().parents[1]


def main(argv: list[str]) -> int:
    config = parse_arguments("demo", argv)
    try:
        make_folder(config.run_dir, "run_dir")
        record = _read_record(config)
        words = argv + _cut(config, record, argv)
    except ValueError as error:
        print(f"demo: {error}", file=sys.stderr)
        return 2
    started = time.monotonic()
    for stage in STAGES:
        print(f"\n== {stage}", flush=True)
        code, seconds, peak = run_measured(["bash", str(ROOT / "launch.sh"), stage, *words])
        if code:
            print(f"demo: stage {stage} ended with exit code {code}", file=sys.stderr)
            return code
        if stage not in record["stages"] or seconds > record["stages"][stage]["seconds"]:
            record["stages"][stage] = {"seconds": round(seconds, 1), "peak_gb": round(peak, 2)}
        _write_record(config, record)
    _print_results(config, record, time.monotonic() - started)
    return 0


def run_measured(command: list[str]) -> tuple[int, float, float]:
    """Runs a command: exit code, seconds, and the largest resident memory of one of its processes in GB.

    The measurement sits in a child of its own, because the system counts all ended children of a process together.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        start = time.monotonic()
        code = subprocess.run(command, check=False).returncode
        peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024 / 1e9
        os.write(writer, json.dumps([code if code >= 0 else 128 - code, time.monotonic() - start, peak]).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    code, seconds, peak = json.loads(text or "[1, 0, 0]")
    return code, seconds, peak


def _cut(config: RunConfig, record: dict, argv: list[str]) -> list[str]:
    """Options for a slow machine, decided once for a run folder: a second measurement must not change a run."""
    if "cut" not in record:
        record["cut"] = cut_for_speed(config, slow_down(choose_device(config.device), config.dtype))
        _write_record(config, record)
    given = {word[2:].split("=")[0] for word in argv if word.startswith("--")}
    cut = {name: value for name, value in record["cut"].items() if name not in given}
    words = [word for name, value in cut.items() for word in (f"--{name}", str(value))]
    if cut:
        print(f"this machine is slow: {cut} instead of the config's sizes (name them on the command line to keep them)")
        print(f"a single stage of this run: bash launch.sh STAGE {shlex.join([*argv, *words])}")
    return words


def _read_record(config: RunConfig) -> dict:
    path = Path(config.path("stages.json"))
    return json.loads(path.read_text()) if path.is_file() else {"stages": {}}


def _write_record(config: RunConfig, record: dict) -> None:
    partial = Path(config.path("stages.json.partial"))
    partial.write_text(json.dumps(record, indent=1) + "\n")
    partial.replace(config.path("stages.json"))


def _print_results(config: RunConfig, record: dict, seconds: float) -> None:
    print("\n" + Path(config.path("summary.md")).read_text())
    print("stage       seconds   peak memory (one process)")
    for stage in STAGES:
        measured = record["stages"][stage]
        print(f"{stage:11} {measured['seconds']:7.1f}   {measured['peak_gb']:.2f} GB")
    print(f"this run {seconds:.0f} seconds; everything is in {config.run_dir}, all tables in report.md")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
