"""--help of a stage lists every option that the stage reads: found in the source, by following what it calls."""

import ast
from dataclasses import fields
from functools import cache
from pathlib import Path

import pytest

from data.options import RunConfig

ROOT = Path(__file__).resolve().parents[1]
OPTIONS = {f.name: f.metadata["stages"] for f in fields(RunConfig) if f.name != "training"}
# The stages' programs. `demo` runs all of them, and lists what is worth changing there.
STAGES = {
    "setup": ["data/environment.py"],
    "target": ["data/fetch_target.py"],
    "prepare": ["data/prepare.py"],
    "regenerate": ["data/regenerate.py"],
    "dataset": ["data/dataset.py"],
    "data-status": ["data/status.py"],
    "features": ["data/make_features.py"],
    "train": ["training/train_drafter.py"],
    "eval": ["eval/run_eval.py"],
    "calibrate": ["eval/calibrate.py"],
    "export": ["eval/export.py"],
    "inspect": ["eval/inspection.py"],
    "verify": ["eval/verify.py"],
    "bench": ["eval/bench.py", "eval/bench_data.py", "training/bench.py"],
}
# Read by what these stages share with eval, but without effect: they decode chains, or trees of a fixed policy.
NO_EFFECT = {
    "setup": {"engine", "endpoints"},
    "train": {"adaptive_budget", "confidence_threshold"},
    "calibrate": {"budget", "width", "candidates", "beta", "adaptive_budget", "confidence_threshold"},
    "inspect": {"confidence_threshold"},
    "verify": {"adaptive_budget"},
    "bench": {"adaptive_budget", "confidence_threshold"},
}


@cache
def module(path):
    """(functions and methods by name, imported name -> file) of a source file of this project."""
    tree, functions, origin = ast.parse((ROOT / path).read_text()), {}, {}
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            functions.setdefault(node.name, []).append(node)
        elif isinstance(node, ast.ClassDef):
            # Another maker than the class's own name is called by its own name; a Session's methods by theirs.
            methods = [n for n in node.body if isinstance(n, ast.FunctionDef) and not n.decorator_list]
            functions.setdefault(node.name, []).extend(methods if node.name != "Session" else [])
        elif isinstance(node, ast.ImportFrom) and node.module:
            package = path.split("/")[0] + "/" if node.level else ""
            file = package + node.module.replace(".", "/") + ".py"
            if (ROOT / file).is_file():
                origin.update((alias.name, file) for alias in node.names)
    return functions, origin


def called(path, node):
    """(file, function) of what may run when a function does: names that it uses, and what is called on a name."""
    functions, origin = module(path)
    for part in ast.walk(node):
        if isinstance(part, ast.Name) and part.id in functions:
            yield path, part.id
        elif isinstance(part, ast.Name) and part.id in origin and isinstance(part.ctx, ast.Load):
            yield origin[part.id], part.id
        elif isinstance(part, ast.Attribute):
            if part.attr in functions:
                yield path, part.attr
            elif owner(part).lower() == "session":
                yield "eval/session.py", part.attr
            elif owner(part) in origin:
                yield origin[owner(part)], part.attr


def owner(attribute):
    """The last name before the dot: `session` in x.session.proposer, `Session` in Session(...).usable_ids."""
    value = attribute.value.func if isinstance(attribute.value, ast.Call) else attribute.value
    return getattr(value, "attr", getattr(value, "id", ""))


def without_annotations(node):
    """A function's statements: a type that is only named is not called."""
    return ast.Module(body=node.body, type_ignores=[])


def options_read(paths):
    """Options that the programs read as `config.NAME`, `c.NAME` or `x.config.NAME`."""
    found, done = set(), set()
    waiting = [(path, name) for path in paths for name in ("main", "verify_run", "report", "launcher")]
    while waiting:
        place = waiting.pop()
        if place in done or place[0].startswith("models/"):
            continue
        done.add(place)
        for function in module(place[0])[0].get(place[1], ()):
            body = without_annotations(function)
            waiting += called(place[0], body)
            for part in ast.walk(body):
                if isinstance(part, ast.Attribute) and part.attr in OPTIONS and owner(part) in ("config", "c"):
                    found.add(part.attr)
    return found


@pytest.mark.parametrize("stage", STAGES)
def test_help_lists_what_the_stage_reads(stage):
    read = options_read(STAGES[stage])
    assert read & {"num_prompts", "run_dir", "target", "device"}  # the search found the stage at all
    unlisted = {name for name in read if not {"all", stage} & set(OPTIONS[name])}
    assert unlisted == NO_EFFECT.get(stage, set())


def test_every_option_names_stages_that_exist():
    known = {"all", "demo", *STAGES}
    assert {name: set(stages) - known for name, stages in OPTIONS.items() if set(stages) - known} == {}
