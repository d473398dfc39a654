"""The field of a documented option."""

from __future__ import annotations

from dataclasses import field
from typing import Any


def option(default: Any, help: str, stages: str = "all"):
    """A documented option; `stages` names the commands whose --help lists it."""
    metadata = {"help": help, "stages": stages.split()}
    if isinstance(default, (list, dict)):
        return field(default_factory=lambda: type(default)(default), metadata=metadata)
    return field(default=default, metadata=metadata)
