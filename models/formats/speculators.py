"""speculators' DFlash and DSpark, served by vLLM (METHODS section 5C).

Sizes of the layers stand in `transformer_layer_config`; the file holds embedding and LM head, and with a reduced
vocabulary the maps between draft and target ids.
"""

from __future__ import annotations

from collections.abc import Mapping

from transformers import Qwen3Config

from ..configuration import DrafterSpec
from .backbone import backbone_keys, build_config, window_fields
from .format import HARMLESS, Format
from .keys import MARKOV_KEYS, Key, read_fields, write_fields

LAYERS = "transformer_layer_config"
KEYS = (
    Key("block_size", "block_size", read=int),
    Key("mask_token_id", "mask_token_id", read=int),
    # Theirs count from the embedding's output, as transformers' hidden_states do.
    Key(
        "target_layer_ids",
        "aux_hidden_state_layer_ids",
        read=lambda ids: tuple(i - 1 for i in ids),
        write=lambda ids: [i + 1 for i in ids],
    ),
    Key("num_target_layers", "num_target_layers", read=int, default=None),
    Key("sliding_causal", "sliding_window_non_causal", read=lambda x: not x, write=lambda x: not x, default=True),
)
# What a checkpoint means that does not say where its first prediction stands.
SAMPLE_FROM_ANCHOR = {"dflash": False, "dspark": True}
NAMES = frozenset(key.path for key in (*KEYS, *MARKOV_KEYS))
OTHERS = {
    LAYERS, "speculators_version", "speculators_model_type", "speculators_config", "draft_vocab_size",
    "target_hidden_size", "sample_from_anchor", "has_no_defaults_at_init",
}  # fmt: skip


class Speculators(Format):
    """A sliding layer's window starts at a-w for the whole block, which is causal there unless said otherwise."""

    name, title = "speculators", "speculators (vLLM)"
    heads = ("none", "markov_vanilla", "markov_gated", "markov_rnn")
    fixed = {"pure_draft_prefix_len": 0, "causal": False, "window_floor": "anchor"}
    keys = KEYS
    known = (NAMES | OTHERS, frozenset())
    tables = True

    def read(self, keys: dict, shapes: Mapping[str, tuple[int, ...]]) -> Qwen3Config:
        kind, layers = keys.get("speculators_model_type"), keys.get(LAYERS) or {}
        if kind not in SAMPLE_FROM_ANCHOR:
            raise ValueError(
                f"config.json has speculators_model_type {kind!r}; known are {', '.join(SAMPLE_FROM_ANCHOR)}"
            )
        hidden, target_hidden = layers.get("hidden_size"), keys.get("target_hidden_size")
        if target_hidden not in (None, hidden):
            raise ValueError(f"config.json has target_hidden_size {target_hidden}, but hidden_size {hidden}")
        shifted = Key("shift_label", "sample_from_anchor", read=bool, default=SAMPLE_FROM_ANCHOR[kind])
        table = (*KEYS, shifted, *(MARKOV_KEYS if kind == "dspark" else ()))
        fields = {"head_type": "none", **self.fixed, **read_fields(table, keys, self.title)}
        vocabulary = keys.get("draft_vocab_size")
        fields["draft_vocab_size"] = None if vocabulary == layers.get("vocab_size") else vocabulary
        spec = DrafterSpec(**fields, **window_fields(layers))
        return build_config(layers, spec.to_config_keys())

    def write(self, spec: DrafterSpec, config: Qwen3Config) -> dict:
        kind = "dflash" if spec.head_type == "none" and not spec.confidence_head else "dspark"
        method = {"proposal_type": "greedy", "speculative_tokens": spec.num_proposals}
        return {
            "architectures": [{"dflash": "DFlashDraftModel", "dspark": "DSparkDraftModel"}[kind]],
            "speculators_model_type": kind,
            "speculators_version": "0.5.0",
            LAYERS: backbone_keys(config),
            "draft_vocab_size": spec.draft_vocab_size or config.vocab_size,
            "target_hidden_size": config.hidden_size,
            "sample_from_anchor": spec.shift_label,
            "tie_word_embeddings": False,
            **write_fields((*KEYS, *(MARKOV_KEYS if kind == "dspark" else ())), spec),
            "speculators_config": {
                "algorithm": kind,
                "proposal_methods": [method],
                "default_proposal_method": "greedy",
                "verifier": {"name_or_path": None, "architectures": []},
            },
        }

    def unknown_keys(self, keys: dict) -> list[str]:
        layers = keys.get(LAYERS) or {}
        inside = sorted(layers.keys() - HARMLESS - {"rope_theta", "rope_scaling", "partial_rotary_factor"})
        return super().unknown_keys(keys) + [f"{LAYERS}.{name}" for name in inside]

    def our_name(self, name: str) -> str | None:
        # Copies of the target's own head and norm, for its training loss.
        return None if name.removeprefix("model.").startswith("verifier_") else super().our_name(name)
