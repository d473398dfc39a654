"""DeepSpec's DSpark and DFlash, and SpecForge's normalised DSpark (METHODS section 5B). Always shifted.

DeepSpec's keys are flat and its files hold the target's embedding and LM head; SpecForge's have the same architecture
name, keep some keys in `dflash_config`, and hold neither table.
"""

from __future__ import annotations

from collections.abc import Mapping

from transformers import Qwen3Config

from ..configuration import DrafterSpec
from .backbone import backbone_keys, build_config, window_fields
from .format import Format
from .keys import MARKOV_KEYS, Key, read_fields, write_fields

ARCHITECTURE = "Qwen3DSparkModel"
OTHER_LAYERS = "Gemma4DSparkModel"
KEYS = (
    Key("block_size", "block_size", read=int),
    Key("mask_token_id", "mask_token_id", read=int),
    Key("target_layer_ids", "target_layer_ids", read=tuple, write=list),
    Key("num_target_layers", "num_target_layers", read=int),
    Key("causal", "is_causal", read=bool, default=False),
    *MARKOV_KEYS,
)
NAMES = frozenset(key.path for key in KEYS)


class DeepSpec(Format):
    """A rank of 0 is plain DFlash. There is no missing key with a default but `is_causal` (bidirectional)."""

    name, title = "deepspec", "DeepSpec DSpark/DFlash"
    heads = ("none", "markov_vanilla", "markov_gated", "markov_rnn")
    fixed = {
        "shift_label": True,
        "pure_draft_prefix_len": 0,
        "draft_vocab_size": None,
        "sliding_causal": True,
        "window_floor": "slot",
    }
    keys = KEYS
    known = (NAMES | {"dflash_config"}, NAMES | {"projector_type", "shift_label"})
    tables = True

    def read(self, keys: dict, shapes: Mapping[str, tuple[int, ...]]) -> Qwen3Config:
        if OTHER_LAYERS in (keys.get("architectures") or ()):
            raise ValueError(f"drafter: {OTHER_LAYERS} has layers of Gemma 4, not of Qwen3: not supported")
        nested = dict(keys.get("dflash_config") or {})
        if nested.get("shift_label") is False:
            raise ValueError("config.json has architecture Qwen3DSparkModel, always shifted, but shift_label false")
        for name in NAMES & nested.keys() & keys.keys():
            if nested[name] != keys[name]:
                raise ValueError(
                    f"config.json gives {name!r} twice with different values: {keys[name]}, {nested[name]}"
                )
        given = nested | {name: value for name, value in keys.items() if value is not None}
        fields = {"head_type": "none", **self.fixed, **read_fields(KEYS, given, self.title)}
        spec = DrafterSpec(**fields, **window_fields(keys))
        return build_config(keys, spec.to_config_keys())

    def write(self, spec: DrafterSpec, config: Qwen3Config) -> dict:
        return backbone_keys(config) | write_fields(KEYS, spec) | {"architectures": [ARCHITECTURE]}
