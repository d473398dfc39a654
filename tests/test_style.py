"""ruff's lint and format, with the rules of pyproject.toml."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize("words", [("check", "--quiet"), ("format", "--check", "--quiet")])
def test_ruff_has_nothing_to_say(words):
    result = subprocess.run([sys.executable, "-m", "ruff", *words, "."], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
