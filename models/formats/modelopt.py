"""Model-Optimizer's DSpark (METHODS section 5D): z-lab's keys, with tensors of the heads at the top level."""

from __future__ import annotations

from collections.abc import Mapping

from transformers import Qwen3Config

from ..configuration import DrafterSpec
from .backbone import backbone_keys, build_config
from .format import Format
from .zlab import FLAT, NESTED

CONFIDENCE, WEIGHT = "use_confidence_head", "confidence_proj.weight"
OURS = ("enable_confidence_head", "confidence_head_with_markov", "pure_draft_prefix_len")


class ModelOpt(Format):
    """Nothing has a default. Whether the confidence head sees the previous token, its size tells."""

    name, title = "modelopt", "Model-Optimizer DSpark"
    heads = ("markov_vanilla", "markov_gated", "markov_rnn")
    fixed = {"pure_draft_prefix_len": 0, "draft_vocab_size": None, "window_floor": "slot"}
    known = (FLAT, NESTED | {CONFIDENCE})
    tensor_names = (
        ("markov_w1.", "markov_head.markov_w1."),
        ("markov_w2.", "markov_head.markov_w2."),
        ("gate_proj.", "markov_head.gate_proj."),
        ("joint_proj.", "markov_head.joint_proj."),
        ("confidence_proj.", "confidence_head.proj."),
    )

    def read(self, keys: dict, shapes: Mapping[str, tuple[int, ...]]) -> Qwen3Config:
        nested = dict(keys["dflash_config"])
        for name in ("shift_label", "markov_rank", "markov_head_type", CONFIDENCE):
            if nested.get(name) is None:
                raise ValueError(f"the drafter's config.json lacks dflash_config.{name}, which {self.title} has")
        if nested.pop(CONFIDENCE):
            size = shapes.get(WEIGHT, (0, 0))[-1]
            nested |= {
                "enable_confidence_head": True,
                "confidence_head_with_markov": size == keys.get("hidden_size", 0) + nested["markov_rank"],
            }
        keys = keys | {"dflash_config": nested}
        return build_config(keys, {name: keys[name] for name in FLAT if name in keys})

    def write(self, spec: DrafterSpec, config: Qwen3Config) -> dict:
        keys = spec.to_config_keys()
        nested = {name: value for name, value in keys["dflash_config"].items() if name not in OURS}
        nested[CONFIDENCE] = spec.confidence_head
        return backbone_keys(config) | keys | {"dflash_config": nested, "architectures": ["DFlashDraftModel"]}
