"""Key maps: one table for a format's options, read and written by the same lines."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from ..configuration import DrafterSpec

REQUIRED = object()  # a key without a documented default


@dataclass(frozen=True)
class Key:
    """One option of a format: a field of `DrafterSpec`, where it stands in config.json, and how it is spelled there.

    Attributes:
        when: from the fields known so far, whether the format has the key at all.
        default: what the format's own readers take for a missing key; without one it is an error that names the key.
    """

    field: str
    path: str
    read: Callable[[Any], Any] = lambda value: value
    write: Callable[[Any], Any] = lambda value: value
    when: Callable[[Mapping[str, Any]], bool] = lambda fields: True
    default: Any = REQUIRED


MARKOV_KEYS = (
    Key("head_rank", "markov_rank", read=int),
    Key(
        "head_type",
        "markov_head_type",
        read=lambda kind: f"markov_{kind}",
        write=lambda head: head.removeprefix("markov_"),
        when=lambda fields: fields["head_rank"] > 0,
    ),
    Key("confidence_head", "enable_confidence_head", read=bool),
    Key(
        "confidence_with_markov",
        "confidence_head_with_markov",
        read=bool,
        when=lambda fields: fields["confidence_head"],
    ),
)


def read_fields(table: tuple[Key, ...], keys: Mapping[str, Any], title: str) -> dict[str, Any]:
    """Fields of `DrafterSpec` from a config.json. Raises ValueError naming a missing key without a default."""
    fields: dict[str, Any] = {}
    for key in table:
        if key.when(fields):
            value = keys.get(key.path)
            if value is None and key.default is REQUIRED:
                raise ValueError(f"the drafter's config.json lacks {key.path!r}, which {title} checkpoints have")
            fields[key.field] = key.default if value is None else key.read(value)
    return fields


def write_fields(table: tuple[Key, ...], spec: DrafterSpec) -> dict[str, Any]:
    """The inverse of `read_fields`."""
    fields = asdict(spec)
    return {key.path: key.write(fields[key.field]) for key in table if key.when(fields)}
