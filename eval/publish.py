"""Which files of a repository on the Hub are ours: an upload (data/hub.py) of a new export removes them where it has
none of that name. A stale draft vocabulary or module would be read with the new weights.
"""

from __future__ import annotations

from models.checkpoint import DRAFT_VOCABULARY
from models.formats.folder import INDEX, WEIGHTS

from .standalone import CUSTOM_GENERATE, DRAFTER, standalone

# A number of five digits, in the names of shards. `*` would match folders too.
_NUMBER = "[0-9]" * 5


def own_files() -> list[str]:
    """Patterns of the files that an export may hold, but for those that every export writes.

    What others put into the repository stays: no pattern reaches further than our names.
    """
    code = [*standalone(*DRAFTER), *(f"custom_generate/{name}" for name in standalone(*CUSTOM_GENERATE))]
    weights = [WEIGHTS, INDEX, f"model-{_NUMBER}-of-{_NUMBER}.safetensors", DRAFT_VOCABULARY]
    return [*weights, "provenance.json", "export.json", *code]
