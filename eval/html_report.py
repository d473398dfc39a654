"""The page for people: RUN/report.html, one file with every table, picture and setting of a run, and a tree viewer.

    python -m eval.html_report RUN_DIR      # again, from RUN/results.json and RUN/traces.json

The file asks nothing of any network: style, script and data stand in it, and its content policy allows only these by
their hashes. Data are JSON that the script turns into text nodes, so that no prompt or token becomes markup. The parts
are the files of eval/page/.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from .report import read_results, write_whole
from .traces import read_traces

PAGE = "report.html"
FOLDER = Path(__file__).parent / "page"
# In this order: later files use what earlier ones define.
SCRIPTS = (
    "dom.js", "table.js", "plot.js", "tree.js", "round.js", "viewer.js", "overview.js", "details.js", "isolation.js",
    "runs.js", "settings.js", "main.js",
)  # fmt: skip
STYLES = ("theme.css", "frame.css", "tables.css", "plots.css", "viewer.css")


def main(argv: list[str]) -> int:
    """Writes the page of a finished run again. Exit code 2 and one line for a user's mistake, 1 for the system's."""
    if len(argv) != 1 or argv[0].startswith("-"):
        print("usage: python -m eval.html_report RUN_DIR", file=sys.stderr)
        return 2
    run = Path(argv[0])
    try:
        if not (run / "results.json").is_file():
            raise ValueError(f"{run} holds no results.json: run first: bash launch.sh eval CONFIG")
        print(write_page(argv[0], read_results(run / "results.json"), read_traces(argv[0])))
    except ValueError as error:
        print(f"html_report: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"html_report: {error}", file=sys.stderr)
        return 1
    return 0


def write_page(run_dir: str, results: dict, traces: dict | None) -> Path:
    """Writes RUN/report.html, whole or not at all, and returns its path."""
    path = Path(run_dir) / PAGE
    write_whole(path, page(results, traces))
    return path


def page(results: dict, traces: dict | None) -> str:
    """The whole file, for results as in docs/results.md and traces as in eval/traces.py (None: no tree viewer)."""
    style, script = _joined(STYLES), _joined(SCRIPTS)
    settings = results["settings"]
    parts = {
        "title": html.escape(f"Evaluation: {settings.get('target_name') or settings.get('target') or ''}"),
        "style": style,
        "style_hash": _digest(style),
        "script": script,
        "script_hash": _digest(script),
        "data": embedded({"results": results, "traces": traces}),
    }
    template = (FOLDER / "page.html").read_text(encoding="utf-8")
    # One pass, so that nothing in the data is taken for a place of the template.
    return re.sub(r"{{(\w+)}}", lambda match: parts[match[1]], template)


def embedded(data: dict) -> str:
    """JSON that can stand inside a <script> element: no `<`, so that neither a tag nor a comment can begin or end."""
    return json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def _joined(names: Sequence[str]) -> str:
    return "\n".join((FOLDER / name).read_text(encoding="utf-8") for name in names)


def _digest(text: str) -> str:
    """SHA-256 as a content policy writes it."""
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
