"""Which format a folder has: decided by the keys of its config.json and its tensors, never by its name.

Several writers use the same architecture string for different formats, so that it decides last.
"""

from __future__ import annotations

from collections.abc import Mapping

from .deepspec import ARCHITECTURE, OTHER_LAYERS, DeepSpec
from .format import Format
from .modelopt import ModelOpt
from .speculators import Speculators
from .zlab import Own, ZLab

FORMATS: dict[str, Format] = {f.name: f for f in (Own(), ZLab(), DeepSpec(), Speculators(), ModelOpt())}
# Written by z-lab, Domino's releases and their forks for one and the same format.
ZLAB_ARCHITECTURES = ("DFlashDraftModel", "DominoDraftModel", "Qwen3DFlashDraftModel")


def detect(keys: dict, shapes: Mapping[str, tuple[int, ...]]) -> Format:
    """The format of a checkpoint. Raises ValueError, with what was looked for, when it is none of them."""
    nested, architectures = keys.get("dflash_config") or {}, keys.get("architectures") or ()
    if "speculators_model_type" in keys or "speculators_config" in keys:
        return FORMATS["speculators"]
    if {ARCHITECTURE, OTHER_LAYERS} & set(architectures) or "markov_rank" in keys:
        return FORMATS["deepspec"]
    if nested.get("projector_type") == "dspark":
        return FORMATS["modelopt" if any(n.removeprefix("model.") == "markov_w1.weight" for n in shapes) else Own.name]
    if nested or set(ZLAB_ARCHITECTURES) & set(architectures):
        return FORMATS["zlab"]
    raise ValueError(
        "config.json is no drafter's that is known here: it has neither speculators_model_type nor dflash_config, and "
        f"architectures {list(architectures)}"
    )
