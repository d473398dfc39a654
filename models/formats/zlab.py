"""z-lab's DFlash and Domino (METHODS section 5A), and our own folders, which use the same keys for every head.

`DrafterSpec.to_config_keys` and `from_config` are the key map: exports carry them, so that they are written once.
"""

from __future__ import annotations

from collections.abc import Mapping

from transformers import Qwen3Config

from ..configuration import DrafterSpec
from ..heads import head_types
from .backbone import backbone_keys, build_config
from .format import Format

FLAT = frozenset(
    {
        "block_size", "mask_token_id", "target_layer_ids", "num_target_layers", "dflash_config", "emb_dim",
        "gru_hidden_dim", "draft_vocab_size", "is_causal", "sliding_window_non_causal",
    }
)  # fmt: skip
NESTED = frozenset(
    {
        "block_size", "mask_token_id", "target_layer_ids", "num_target_layers", "shift_label", "causal", "causal_head",
        "window_floor", "projector_type", "emb_dim", "gru_hidden_dim", "pure_draft_prefix_len", "markov_rank",
        "markov_head_type", "enable_confidence_head", "confidence_head_with_markov",
    }
)  # fmt: skip


class ZLab(Format):
    """What a missing key means: shift_label false for plain DFlash (an error for Domino, where both layouts are in
    use), pure_draft_prefix_len 0, bidirectional blocks. Everything else must be said."""

    name, title = "zlab", "z-lab DFlash/Domino"
    heads = ("none", "domino")
    fixed = {"confidence_head": False, "draft_vocab_size": None, "window_floor": "slot"}
    known = (FLAT, NESTED)
    # Older Domino releases keep the head under a prefix of its own; it is never written.
    tensor_names = (("logit_head.", ""),)

    def read(self, keys: dict, shapes: Mapping[str, tuple[int, ...]]) -> Qwen3Config:
        return build_config(keys, {name: keys[name] for name in FLAT if name in keys})

    def write(self, spec: DrafterSpec, config: Qwen3Config) -> dict:
        return backbone_keys(config) | spec.to_config_keys() | {"architectures": ["DFlashDraftModel"]}


class Own(ZLab):
    """The folders that this project trains and exports for transformers: z-lab's keys, with words for every drafter."""

    name, title = "transformers", "this project's DFlash"
    fixed = {}

    @property
    def heads(self) -> tuple[str, ...]:
        return head_types()
