"""The block-parallel diffusion drafter (DFlash, arXiv 2602.06036) and the correction head attached to it.

One forward serves training, our decoding loop and transformers' `generate(..., speculation_type="dflash")`: block
embeddings in, hidden states out. Queries come from the block only; keys and values come from the context features
followed by the block. Copied into exports, so it imports torch, transformers and its two siblings only.

Shape suffixes: R requests or rows, C context tokens given in this call, Q block slots (all blocks of a row), D hidden,
L taps, T kv length.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, Qwen3Config
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP, Qwen3RMSNorm, eager_attention_forward

from .block_attention import FULL, SLIDING, DrafterRotaryEmbedding, layer_masks, rotate
from .configuration import DrafterSpec
from .head_confidence import build_confidence
from .heads import build_head


class DrafterAttention(nn.Module):
    """Attention of block queries over [earlier context in the cache ; new context ; block]."""

    def __init__(self, config: Qwen3Config, layer_idx: int):
        super().__init__()
        self.config, self.layer_idx, self.head_dim = config, layer_idx, config.head_dim
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self.scaling = self.head_dim**-0.5
        self.is_causal = False
        queries, keys = config.num_attention_heads * self.head_dim, config.num_key_value_heads * self.head_dim
        self.q_proj = nn.Linear(config.hidden_size, queries, bias=config.attention_bias)
        self.k_proj = nn.Linear(config.hidden_size, keys, bias=config.attention_bias)
        self.v_proj = nn.Linear(config.hidden_size, keys, bias=config.attention_bias)
        self.o_proj = nn.Linear(queries, config.hidden_size, bias=config.attention_bias)
        self.q_norm = Qwen3RMSNorm(self.head_dim, eps=config.rms_norm_eps)
        self.k_norm = Qwen3RMSNorm(self.head_dim, eps=config.rms_norm_eps)

    def forward(self, block_RQD: Tensor, context_RCD: Tensor, rope, mask, cache) -> Tensor:
        rows, slots, _ = block_RQD.shape
        # Context and block go through the projections apart: joining the activations first would copy the context.
        keys = torch.cat([self.k_proj(context_RCD), self.k_proj(block_RQD)], dim=1)
        values = torch.cat([self.v_proj(context_RCD), self.v_proj(block_RQD)], dim=1)
        query = self.q_norm(self.q_proj(block_RQD).view(rows, slots, -1, self.head_dim)).transpose(1, 2)
        keys = self.k_norm(keys.view(rows, keys.shape[1], -1, self.head_dim)).transpose(1, 2)
        values = values.view(rows, values.shape[1], -1, self.head_dim).transpose(1, 2)
        cos, sin = rope
        keys = rotate(keys, cos, sin)
        query = rotate(query, cos[:, :, -slots:], sin[:, :, -slots:])
        if cache is not None:
            keys, values = cache.update(keys, values, self.layer_idx)
        implementation = self.config._attn_implementation
        attend: Callable = ALL_ATTENTION_FUNCTIONS.get_interface(implementation, eager_attention_forward)
        if mask is not None and implementation == "eager":
            # Eager attention adds its mask, so a boolean one would only shift scores by one.
            mask = torch.zeros(mask.shape, dtype=query.dtype, device=mask.device).masked_fill(
                ~mask, torch.finfo(query.dtype).min
            )
        output, _ = attend(self, query, keys, values, mask, dropout=0.0, scaling=self.scaling, is_causal=False)
        return self.o_proj(output.reshape(rows, slots, -1))


class DrafterLayer(GradientCheckpointingLayer):
    """Pre-norm block. The context gets no query, no MLP and no input norm (METHODS section 1)."""

    def __init__(self, config: Qwen3Config, layer_idx: int):
        super().__init__()
        self.self_attn = DrafterAttention(config, layer_idx)
        self.mlp = Qwen3MLP(config)
        self.input_layernorm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, block_RQD: Tensor, context_RCD: Tensor, rope, mask, cache) -> Tensor:
        block_RQD = block_RQD + self.self_attn(self.input_layernorm(block_RQD), context_RCD, rope, mask, cache)
        return block_RQD + self.mlp(self.post_attention_layernorm(block_RQD))


class DFlashDraftModel(PreTrainedModel):
    """Drafter backbone plus correction head. Embedding table and LM head are the target's and stay outside.

    Tensor names are those of the z-lab and Domino checkpoints (METHODS section 5A).
    """

    config_class = Qwen3Config
    base_model_prefix = ""
    main_input_name = "noise_embeds"
    _supports_sdpa = True
    _supports_flex_attn = True
    supports_gradient_checkpointing = True
    _no_split_modules = ["DrafterLayer"]

    def __init__(self, config: Qwen3Config):
        super().__init__(config)
        self.spec = DrafterSpec.from_config(config)
        taps = len(self.spec.target_layer_ids)
        self.fc = nn.Linear(taps * config.hidden_size, config.hidden_size, bias=False)
        self.hidden_norm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.layers = nn.ModuleList([DrafterLayer(config, i) for i in range(config.num_hidden_layers)])
        self.layer_kinds = [SLIDING if i in self.spec.sliding_layers else FULL for i in range(len(self.layers))]
        self.norm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = DrafterRotaryEmbedding(config)
        head = build_head(self.spec, config.hidden_size, config.vocab_size)
        # The head's children are attached here so that their names carry no prefix of ours; the head object itself is
        # a view of them and is kept out of the module tree, or every tensor would be saved twice.
        for name, module in head.named_children() if head is not None else ():
            self.add_module(name, module)
        object.__setattr__(self, "head", head)
        self.confidence_head = build_confidence(self.spec, config.hidden_size, head)
        self.post_init()

    def context_features(self, taps_RCLD: Tensor) -> Tensor:
        """hidden_norm(fc(taps)) for concatenated taps [R, C, L*D], in the drafter's dtype."""
        return self.hidden_norm(self.fc(taps_RCLD.to(self.fc.weight.dtype)))

    def forward(
        self,
        noise_embeds: Tensor,
        context_hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache=None,
        loss_fn: Callable[[Tensor], object] | None = None,
        **kwargs,
    ) -> BaseModelOutputWithPast:
        """Runs the backbone over one or more blocks a row.

        Args:
            noise_embeds: [R, Q, D] target embeddings of the block slots (anchor, then mask tokens).
            context_hidden_states: [R, C, L*D] taps of the context tokens that the cache does not hold yet.
            attention_mask: boolean [R, 1, Q, T], True where a slot sees a key, keys in cache order; or the
                two-dimensional [R, T] padding mask of transformers' loop; a BlockMask for flex_attention; None when
                everything is visible.
            position_ids: [R, C + Q] absolute positions of the new context and of the slots. Default: consecutive,
                after what the cache holds.
            cache: object with transformers' `update(key, value, layer_idx)`; receives context and block.
            loss_fn: if given it is called on the hidden states *inside* this forward and its result returned
                instead, so that DeepSpeed's engine sees every parameter used within one forward.

        Returns:
            `last_hidden_state` [R, Q, D], after the final norm, in the dtype of `noise_embeds`: the target's LM head is
            applied to it next.
        """
        rows, slots, _ = noise_embeds.shape
        context = self.context_features(context_hidden_states)
        if position_ids is None:
            past = cache.get_seq_length() if cache is not None else 0
            position_ids = past + torch.arange(context.shape[1] + slots, device=noise_embeds.device)[None]
        if isinstance(attention_mask, Tensor) and attention_mask.ndim == 2:
            attention_mask = attention_mask[:, None, None, :].bool().expand(rows, 1, slots, -1)
        block = noise_embeds.to(context.dtype)
        cos, sin = self.rotary_emb(block, position_ids)
        rope = cos[:, None], sin[:, None]
        if isinstance(attention_mask, Tensor) and self.config._attn_implementation == "flex_attention":
            raise ValueError("attention flex takes a BlockMask: it would add a boolean mask to the scores")
        masks = layer_masks(self.spec, attention_mask, position_ids, slots, cached=cache is not None)
        for layer, kind in zip(self.layers, self.layer_kinds, strict=True):
            block = layer(block, context, rope, masks[kind], cache)
        hidden = self.norm(block)
        if loss_fn is not None:
            return loss_fn(hidden)
        return BaseModelOutputWithPast(last_hidden_state=hidden.to(noise_embeds.dtype))

    def prediction_slots(self, hidden: Tensor) -> Tensor:
        """The slots that predict a+1, a+2, ... in order of depth: [..., B_k, D] -> [..., num_proposals, D]."""
        return hidden[..., self.spec.first_slot :, :]

    def confidence_logits(self, hidden: Tensor, anchor: Tensor, tokens: Tensor, detach: bool = False) -> Tensor:
        """Logits [..., T] of the acceptance of tokens [..., T] that follow the anchor tokens [...].

        Before the first token comes the anchor, before token t comes token t - 1 (TRAPS 8).

        Args:
            hidden: backbone output at the predicting slots [..., T, D].
            detach: no gradient flows to the backbone and to the Markov head.
        """
        rows = None
        if self.spec.confidence_with_markov:
            rows = self.head.previous_rows(torch.cat([anchor[..., None], tokens[..., :-1]], dim=-1))
        if detach:
            hidden, rows = hidden.detach(), None if rows is None else rows.detach()
        return self.confidence_head(hidden, rows)

    @property
    def plain_depths(self) -> int:
        """How many leading depths have base logits alone: the prefix, or all of them without a head."""
        depths = self.spec.num_proposals
        return depths if self.head is None else min(depths, self.spec.pure_draft_prefix_len)

    def corrected_depths(self, device=None) -> Tensor:
        """Boolean [num_proposals]: True at the depths whose logits the head corrects (those beyond the prefix)."""
        return torch.arange(self.spec.num_proposals, device=device) >= self.plain_depths
