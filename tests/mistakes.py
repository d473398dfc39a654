"""What a user sees of a mistake: one line on stderr and exit code 2."""

from __future__ import annotations

from collections.abc import Callable


def mistake(capsys, main: Callable[[list[str]], int], stage: str, *words) -> str:
    """Runs a stage's main, expects exit code 2 and one line that names the stage; returns that line."""
    try:
        code = main([str(word) for word in words])
    except SystemExit as error:
        code = error.code
    error = capsys.readouterr().err
    lines = [line for line in error.splitlines() if line.startswith(f"{stage}:")]
    assert code == 2 and len(lines) == 1 and "Traceback" not in error, error
    return lines[0]
