"""The options of Qwen3 layers, which every format spells in transformers' way, and rope in either place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import Qwen3Config

# Options of the layers that every format spells in transformers' way.
BACKBONE = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "head_dim", "hidden_act", "max_position_embeddings", "rms_norm_eps", "attention_bias", "layer_types",
)  # fmt: skip
ROPE = ("rope_theta", "rope_parameters", "rope_scaling", "partial_rotary_factor")
# Options of the layers' sliding windows; they matter only when layer_types names such layers.
WINDOW = ("use_sliding_window", "sliding_window", "max_window_layers")


def window_fields(keys: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of `DrafterSpec` that transformers' layer options decide."""
    kinds = keys.get("layer_types") or ()
    sliding = tuple(i for i, kind in enumerate(kinds) if kind == "sliding_attention")
    return {"sliding_layers": sliding, "sliding_window": keys.get("sliding_window")} if sliding else {}


def build_config(keys: Mapping[str, Any], options: Mapping[str, Any]) -> Qwen3Config:
    """transformers' configuration of the layers, with a drafter's own keys beside it.

    Raises ValueError naming a size that is missing: transformers would fill in those of some Qwen3 model.
    """
    missing = [name for name in BACKBONE[:7] if keys.get(name) is None]
    if missing:
        raise ValueError(f"the drafter's config.json lacks {', '.join(map(repr, missing))}")
    kept = {name: keys[name] for name in (*BACKBONE, *WINDOW) if keys.get(name) is not None}
    kept.setdefault("layer_types", ["full_attention"] * keys["num_hidden_layers"])
    if "sliding_attention" in kept["layer_types"]:
        # transformers forgets the window unless told that it is used; the layer types tell that already.
        kept.setdefault("use_sliding_window", True)
    rope = merge_rope(dict(keys))
    if int(kept["head_dim"] * rope.get("partial_rotary_factor", 1.0)) % 2:
        raise ValueError(f"partial_rotary_factor {rope['partial_rotary_factor']} rotates an odd part of a head")
    return Qwen3Config(
        **kept | {"rope_parameters": rope, "tie_word_embeddings": False, "architectures": ["DFlashDraftModel"]},
        **{name: value for name, value in options.items() if name not in kept},
    )


def backbone_keys(config: Qwen3Config) -> dict[str, Any]:
    """The inverse of `build_config` without a drafter's own keys; rope in both places, for older and newer readers."""
    values = config.to_dict()
    rope = dict(values["rope_parameters"])
    # Older clients read the scaling apart from theta, and "default" is no scaling.
    scaling = {name: value for name, value in rope.items() if name != "rope_theta"}
    keys = {name: values[name] for name in (*BACKBONE, *WINDOW) if values.get(name) is not None}
    return keys | {
        "model_type": "qwen3",
        "rope_theta": rope["rope_theta"],
        "rope_parameters": rope,
        "rope_scaling": None if rope["rope_type"] == "default" else {"type": rope["rope_type"], **scaling},
        "tie_word_embeddings": False,
    }


def merge_rope(keys: dict) -> dict:
    """The one `rope_parameters` of a config.json, which may also stand in `rope_scaling` and `rope_theta`.

    transformers lets `rope_scaling` replace `rope_parameters` and falls back to a default theta, so a checkpoint that
    gives theta in one place and YaRN in another would load with other frequencies than it was trained with.
    Raises ValueError for two different values of one option and for no theta.
    """
    merged: dict = {}
    flat = {name: keys[name] for name in ("rope_theta", "partial_rotary_factor") if keys.get(name) is not None}
    for source in (keys.get("rope_parameters") or {}, keys.get("rope_scaling") or {}, flat):
        for name, value in source.items():
            name = "rope_type" if name == "type" else name
            if merged.setdefault(name, value) != value:
                raise ValueError(f"config.json gives {name!r} twice with different values: {merged[name]} and {value}")
    if merged.get("rope_theta") is None:
        raise ValueError("the drafter's config.json lacks 'rope_theta'")
    return {"rope_type": "default"} | merged
