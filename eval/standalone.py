"""The project's own modules as files that work without it: what an export carries to run under transformers.

transformers loads the code of a model's folder from flat files that import each other relatively. The modules that an
entry needs are followed through their imports, and their imports of each other are rewritten; nothing else changes, so
that no second copy is kept by hand.
"""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("models", "data", "eval", "training")
DRAFTER = ("models.drafter", "drafter.py")
CUSTOM_GENERATE = ("eval.custom_generate", "generate.py")


def standalone(entry: str, name: str) -> dict[str, str]:
    """Source text by flat file name: the module `entry` as `name`, and all of ours that it imports, directly or not.

    Raises ValueError for two modules of one file name, and for an import that flat files cannot express.
    """
    names, texts, queue = {entry: name}, {}, [entry]
    while queue:
        module = queue.pop()
        source = _path(module).read_text(encoding="utf-8")
        for node, imported in own_imports(module, source):
            file = f"{imported.rsplit('.', 1)[-1]}.py"
            if imported not in names:
                if file in names.values():
                    raise ValueError(f"{imported} and another module would both be {file}")
                names[imported] = file
                queue.append(imported)
            source = _rewritten(source, node, names[imported].removesuffix(".py"))
        texts[names[module]] = source
    return texts


def own_imports(module: str, source: str) -> list[tuple[ast.ImportFrom, str]]:
    """`from ... import` statements of our own modules, with the modules' full names."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import) and any(alias.name.split(".")[0] in PACKAGES for alias in node.names):
            raise ValueError(f"{module}: write `from ... import`, not `import {node.names[0].name}`")
        if not isinstance(node, ast.ImportFrom):
            continue
        name = node.module or ""
        if node.level:
            package = module.split(".")[: -node.level]
            name = ".".join([*package, name] if name else package)
        if name.split(".")[0] in PACKAGES:
            found.append((node, name))
    return found


def _path(module: str) -> Path:
    path = ROOT.joinpath(*module.split(".")).with_suffix(".py")
    if not path.is_file():
        raise ValueError(f"{module} is no single file: import from the module that defines the name")
    return path


def _rewritten(source: str, node: ast.ImportFrom, name: str) -> str:
    """The source with the module of one import statement, which stands on its first line, made relative and flat."""
    lines = source.splitlines(keepends=True)
    line = lines[node.lineno - 1]
    lines[node.lineno - 1] = f"{line[: node.col_offset]}from .{name} import{line.split(' import', 1)[1]}"
    return "".join(lines)
