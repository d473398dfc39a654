"""Variants of the drafter's attention that public checkpoints use: partial rotary embeddings, causal blocks, windows.

Sources: METHODS section 1. A block of plain DFlash is bidirectional. `causal` drafters (JetSpec's `causal_head`,
`is_causal`) let a slot see only the slots up to its own. Sliding-window layers see a window of the context, and are
causal inside the block unless the checkpoint says `sliding_window_non_causal`. Copied into exports: torch and
transformers only.

Shape suffixes: R rows, C context tokens given in this call, Q block slots (all blocks of a row), P = C + Q, T keys.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding, rotate_half

FULL, SLIDING = "full_attention", "sliding_attention"


class DrafterRotaryEmbedding(Qwen3RotaryEmbedding):
    """Qwen3's, with two differences.

    transformers heeds `partial_rotary_factor` for its scaled kinds of rope, this one for the plain too. And frequencies
    stay fp32 whatever dtype the module is cast to, as they do in DeepSpeed and in `from_pretrained`: rounded to bf16
    they are off by up to 0.4 %, radians after some hundred tokens, so that a drafter would decode with other angles
    than it was trained with.
    """

    def _apply(self, fn, recurse: bool = True):
        kept = {name: buffer for name, buffer in self.named_buffers(recurse=False) if not buffer.is_meta}
        super()._apply(fn, recurse)
        for name, buffer in kept.items():
            setattr(self, name, buffer.to(getattr(self, name).device))
        return self

    @staticmethod
    def compute_default_rope_parameters(config, **kwargs) -> tuple[Tensor, float]:
        rope = config.rope_parameters
        size = int(config.head_dim * rope.get("partial_rotary_factor", 1.0))
        return 1.0 / (rope["rope_theta"] ** (torch.arange(0, size, 2, dtype=torch.float) / size)), 1.0


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turns the first entries of each head, as many as `cos` has; a partial rotary embedding leaves the others."""
    size = cos.shape[-1]
    if size == heads.shape[-1]:
        return heads * cos + rotate_half(heads) * sin
    turned = heads[..., :size]
    return torch.cat([turned * cos + rotate_half(turned) * sin, heads[..., size:]], dim=-1)


def layer_masks(spec, mask: Tensor | None, positions_RP: Tensor, slots: int, cached: bool) -> dict[str, Tensor | None]:
    """The boolean mask of each kind of layer: the one given, narrowed by the causal and window rules of the spec.

    Args:
        spec: the drafter's `DrafterSpec`.
        mask: [R, 1, Q, T] or None (everything is visible); it already keeps blocks, rows and padding apart.
        positions_RP: absolute positions of the context and of the Q = `slots` block slots.
        cached: keys come from a cache, whose columns are positions; else they are context and slots as given.
    """
    if not spec.causal and not spec.sliding_layers:
        return {FULL: mask}
    if mask is not None and not isinstance(mask, Tensor):
        raise ValueError("attention flex: causal blocks and sliding windows of a drafter need --attention sdpa")
    slots_RQ1 = positions_RP[:, -slots:, None]
    device = positions_RP.device
    anchors_RQ1 = slots_RQ1 - (torch.arange(slots, device=device) % spec.block_size)[None, :, None]
    width = mask.shape[-1] if mask is not None else int(positions_RP.max()) + 1
    keys_R1T = torch.arange(width, device=device)[None, None] if cached else positions_RP[:, None]
    earlier = (keys_R1T <= slots_RQ1)[:, None]
    if spec.window_floor == "slot":
        inside = (keys_R1T >= slots_RQ1 - ((spec.sliding_window or 0) - 1))[:, None]
    else:
        inside = (keys_R1T >= anchors_RQ1 - (spec.sliding_window or 0))[:, None]
    seen = torch.ones_like(earlier) if mask is None else mask
    full = seen & earlier if spec.causal else mask
    sliding = seen & inside & earlier if spec.causal or spec.sliding_causal else seen & inside
    return {FULL: full, SLIDING: sliding}
