"""What a checkpoint format is: a map of keys, a map of tensor names, and what it has no words for.

A format module (`zlab`, `deepspec`, `speculators`, `modelopt`) holds one map of keys and one of tensor names, each used
in both directions. What it reads becomes a `DrafterSpec` and transformers' `Qwen3Config`; tensor names become those of
`DFlashDraftModel`, with four names beside them that belong to no module: `EXTRA_TENSORS`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from transformers import Qwen3Config

from ..configuration import DrafterSpec, spec_difference
from .backbone import ROPE, WINDOW
from .keys import Key

EMBED, LM_HEAD = "embed_tokens.weight", "lm_head.weight"
TO_TARGET, TO_DRAFT = "d2t", "t2d"  # speculators: offset of each draft id, and which target ids have one
EXTRA_TENSORS = (EMBED, LM_HEAD, TO_TARGET, TO_DRAFT)
# What transformers writes into any config.json and what says nothing about a drafter's proposals.
HARMLESS = frozenset(Qwen3Config().to_dict()) | {
    "_name_or_path", "_attn_implementation", "attn_implementation", "auto_map", "dtype", "torch_dtype",
    "transformers_version", "tie_word_embeddings", "use_cache", "num_anchors", "max_anchors", "pruned_heads",
    "loss_decay_gamma", "ce_loss_alpha", "l1_loss_alpha", "confidence_head_alpha",
}  # fmt: skip


class Format:
    """One public format. Subclasses say what is special about it; everything works in both directions.

    Attributes:
        name: what `--format` calls it.
        title: what messages call it.
        heads: the correction heads that it can hold.
        fixed: fields of `DrafterSpec` that every checkpoint of the format has, so that no key says them.
        keys: the format's key map; empty for formats that spell options as `DrafterSpec.to_config_keys` does.
        known: top-level keys, and keys of dflash_config, beyond transformers' own.
        tensor_names: (prefix there, our prefix), the first that fits; aliases that are only read come last.
        tables: whether the embedding and the LM head are in the file.
    """

    name: str
    title: str
    heads: tuple[str, ...] = ()
    fixed: Mapping[str, Any] = {}
    keys: tuple[Key, ...] = ()
    known: tuple[frozenset[str], frozenset[str]] = (frozenset(), frozenset())
    tensor_names: tuple[tuple[str, str], ...] = ()
    tables = False

    def read(self, keys: dict, shapes: Mapping[str, tuple[int, ...]]) -> Qwen3Config:
        """The drafter's configuration in our keys. Raises ValueError naming a missing or contradicting key."""
        raise NotImplementedError

    def write(self, spec: DrafterSpec, config: Qwen3Config) -> dict:
        """config.json of a drafter that the format can hold, every default spelled out."""
        raise NotImplementedError

    def unknown_keys(self, keys: dict) -> list[str]:
        """Keys of config.json whose meaning is not known here."""
        flat, nested = self.known
        found = sorted(keys.keys() - HARMLESS - flat - set(ROPE) - set(WINDOW))
        return found + [f"dflash_config.{name}" for name in sorted((keys.get("dflash_config") or {}).keys() - nested)]

    def our_name(self, name: str) -> str | None:
        """The name of a tensor in `DFlashDraftModel` or in `EXTRA_TENSORS`; None for one that nothing needs."""
        if name.endswith("rotary_emb.inv_freq"):
            return None
        name = name.removeprefix("model.")
        for theirs, ours in self.tensor_names:
            if name.startswith(theirs):
                return ours + name.removeprefix(theirs)
        return name

    def their_name(self, name: str) -> str:
        """The inverse of `our_name`."""
        for theirs, ours in self.tensor_names:
            if ours and name.startswith(ours):
                return theirs + name.removeprefix(ours)
        return name

    def check_can_hold(self, spec: DrafterSpec) -> None:
        """Raises ValueError for a drafter that the format has no words for."""
        if spec.head_type not in self.heads:
            known = ", ".join(self.heads)
            raise ValueError(f"format {self.name} cannot hold head {spec.head_type!r}, only {known}: choose another")
        for name, (own, fixed) in spec_difference(spec, replace(spec, **self.fixed)).items():
            raise ValueError(
                f"format {self.name} means {name} {fixed}, this drafter has {own}: choose another --format"
            )
