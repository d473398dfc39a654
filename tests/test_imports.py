"""Imports go one way, models <- data <- eval <- training, and come from declared packages only."""

import ast
import sys
from pathlib import Path

import pytest

from eval.standalone import CUSTOM_GENERATE, DRAFTER, standalone

ROOT = Path(__file__).resolve().parents[1]
ORDER = ("models", "data", "eval", "training")
# What a package may import beside the standard library. Loaded remote code (transformers_modules), private copies of
# public checkpoints' code and anything under runs/ are thereby out.
DECLARED = {
    "models": {"torch", "transformers", "safetensors", "huggingface_hub", "accelerate"},
    "data": {
        "torch",
        "transformers",
        "safetensors",
        "datasets",
        "yaml",
        "tqdm",
        "numpy",
        "gguf",
        "huggingface_hub",
        "jinja2",
        "peft",
        "pyarrow",
        "matplotlib",
        "openai",
        "py3langid",
    },
}
DECLARED["eval"] = DECLARED["data"]
DECLARED["training"] = DECLARED["eval"] | {"deepspeed", "accelerate", "peft", "wandb"}
FILES = [path for package in ORDER for path in sorted((ROOT / package).rglob("*.py"))]


def imported(path: Path) -> list[str]:
    return imports_of(path.read_text(), path.relative_to(ROOT).parent.parts)


def imports_of(code: str, package: tuple[str, ...]) -> list[str]:
    """Absolute dotted names of everything that code of a package imports, at any depth."""
    names = []
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            names.append(".".join([*base, *([node.module] if node.module else [])]))
    return names


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_go_one_way_and_are_declared(path):
    package = path.relative_to(ROOT).parts[0]
    allowed = set(ORDER[: ORDER.index(package) + 1]) | DECLARED[package] | set(sys.stdlib_module_names)
    assert [name for name in imported(path) if name.split(".")[0] not in allowed] == []


@pytest.mark.parametrize("entry", [DRAFTER, CUSTOM_GENERATE], ids=lambda entry: entry[1])
def test_files_that_travel_with_an_export_need_nothing_of_the_project(entry):
    files = standalone(*entry)
    siblings = {f"flat.{name.removesuffix('.py')}" for name in files}
    for text in files.values():
        outside = [n for n in imports_of(text, ("flat",)) if n.split(".")[0] not in sys.stdlib_module_names]
        allowed = siblings | {"torch", "transformers", "safetensors"}
        assert [n for n in outside if n not in allowed and n.split(".")[0] not in allowed] == []


@pytest.mark.parametrize("path", [p for p in FILES if p.parent.name in ORDER], ids=lambda path: path.stem)
def test_no_script_hides_a_module_of_pythons_own(path):
    """A script's folder comes first in sys.path: `inspect.py` beside one breaks whatever imports Python's."""
    assert path.stem not in sys.stdlib_module_names


def test_relative_and_nested_imports_are_seen():
    code = "def f():\n    from eval.report import x\n    from ..records import y\n    import training.rows as z\n"
    assert imports_of(code, ("eval", "decoding")) == ["eval.report", "eval.records", "training.rows"]
    names = set(imported(ROOT / "models" / "drafter.py"))
    assert {"models.configuration", "models.heads", "models.head_confidence"} <= names
