"""What a target's configuration says about its family: which layers see a window, and what cannot be verified at all.

Families are told apart by their configuration alone; nothing here names a model. Whatever a configuration does not say
is found by `models.target.Target.check`, which runs the target on a small tree when it is loaded.
"""

from __future__ import annotations

FULL, SLIDING = "full_attention", "sliding_attention"

# Parts of layer kinds and model types whose state cannot be rolled back or masked as a tree.
_RECURRENT = ("linear_attention", "mamba", "recurrent", "rwkv", "xlstm", "conv", "gated_delta", "hybrid")
# Where configurations name the kind of each layer.
_KINDS = ("layer_types", "layers_block_type", "block_types")
# Options of attention that the masks, positions or caches here do not fit: `TreeCache` stores one pair of keys and
# values of one size for every layer.
_OTHER_ATTENTION = {
    "kv_lora_rank": "latent attention (MLA)",
    "num_kv_shared_layers": "layers that share keys and values",
    "attention_k_eq_v": "layers without values of their own",
    "global_head_dim": "heads of two sizes",
    "alibi": "position biases in the place of position ids",
}


def layer_kinds(config) -> tuple[str, ...]:
    """The attention kind of each layer; empty for families whose layers are all alike.

    An instance may carry `layer_types` from its file although its family ignores them (Mistral), so the class decides.
    """
    known = hasattr(type(config), "layer_types")
    return tuple(config.layer_types) if known and config.layer_types else ()


def window_of(config) -> int | None:
    """Positions that a sliding layer sees, itself included; None when no layer of the target slides.

    transformers counts alike for every family: a key is seen while query position - key position < window.
    """
    window, kinds = getattr(config, "sliding_window", None), layer_kinds(config)
    if not window or getattr(config, "use_sliding_window", True) is False:
        return None
    return window if SLIDING in kinds or not kinds else None


def refuse_unsupported(config) -> None:
    """Raises ValueError, in one line, for a target whose proposals cannot be verified as a tree."""
    name = f"target {config.model_type!r}"
    stated = [kind for option in _KINDS for kind in (getattr(config, option, None) or ())]
    recurrent = [kind for kind in [*stated, config.model_type] if any(part in kind for part in _RECURRENT)]
    if recurrent:
        raise ValueError(
            f"{name} has recurrent layers ({recurrent[0]}): its state cannot be rolled back after a rejected draft, "
            "so it cannot be verified; choose one with attention only"
        )
    strange = [kind for kind in layer_kinds(config) if kind not in (FULL, SLIDING)]
    if strange:
        raise ValueError(f"{name} has {strange[0]} layers, which cannot be verified as a tree yet")
    for option, what in _OTHER_ATTENTION.items():
        if getattr(config, option, None):
            raise ValueError(f"{name} has {what} ({option}), which is not supported")
