"""Small models for tests: random targets of a few layers, a scripted target, and drafters that fit them."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
)

from eval.decoding.tree import Tree
from models.checkpoint import Drafter
from models.configuration import DrafterSpec, build_drafter_config
from models.drafter import DFlashDraftModel
from models.target import Target, TargetOutput

EOS, PAD, MASK, VOCAB = 1, 0, 2, 64


WINDOW = 6
_SOME_SLIDE = ["sliding_attention", "full_attention"] * 2
_QWEN_WINDOW = dict(use_sliding_window=True, sliding_window=WINDOW, max_window_layers=2)
# Each family with what sets it apart; a query scale and caps small enough to change the text of a tiny model.
FAMILIES = {
    "qwen3": (Qwen3Config, {}),
    "llama": (LlamaConfig, {}),
    "llama-tied": (LlamaConfig, dict(tie_word_embeddings=True)),
    "qwen2": (Qwen2Config, {}),
    "qwen2-window": (Qwen2Config, _QWEN_WINDOW),
    "qwen3-window": (Qwen3Config, _QWEN_WINDOW),
    "mistral": (MistralConfig, dict(sliding_window=WINDOW)),
    "gemma3": (
        Gemma3TextConfig,
        dict(
            sliding_window=WINDOW,
            layer_types=_SOME_SLIDE,
            query_pre_attn_scalar=8,
            final_logit_softcapping=30.0,
            tie_word_embeddings=True,
        ),
    ),
    "gemma2": (
        Gemma2Config,
        dict(sliding_window=WINDOW, layer_types=_SOME_SLIDE, query_pre_attn_scalar=8, attn_logit_softcapping=0.5),
    ),
    "granite": (GraniteConfig, dict(logits_scaling=8.0, embedding_multiplier=3.0)),
}


def tiny_target(
    family: str = "qwen3", seed: int = 0, dtype=torch.float32, layers: int = 4, vocab: int = VOCAB, **more
) -> Target:
    """A random target with enough spread in its logits that greedy text does not repeat one token.

    Args:
        family: one of `FAMILIES`.
        more: options of the configuration that override the family's.
    """
    torch.manual_seed(seed)
    config_class, special = FAMILIES[family]
    sizes = dict(
        vocab_size=vocab,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=512,
        eos_token_id=EOS,
        pad_token_id=PAD,
        bos_token_id=None,
        tie_word_embeddings=False,
        initializer_range=0.3,
    )
    model = AutoModelForCausalLM.from_config(config_class(**{**sizes, **special, **more}))
    if model.config.tie_word_embeddings:
        # Else a random model repeats its last token: the residual stream is close to that token's own embedding.
        for parameter in model.parameters():
            if parameter.ndim == 1:
                torch.nn.init.normal_(parameter, std=3)
    return Target(model.to(dtype), path="tiny")


def tiny_drafter(target: Target, seed: int = 1, layers: int = 2, scale: float = 1.0, **spec) -> Drafter:
    """A random drafter for the target. `spec` overrides fields of DrafterSpec."""
    torch.manual_seed(seed)
    options = dict(
        block_size=5,
        mask_token_id=MASK,
        target_layer_ids=(0, 2),
        num_target_layers=target.num_layers,
        head_type="domino",
        head_rank=8,
        gru_hidden_dim=16,
    )
    model = DFlashDraftModel(build_drafter_config(target.config, DrafterSpec(**{**options, **spec}), layers))
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.3 * scale)
    return Drafter(model.to(target.dtype).eval().requires_grad_(False))


class ScriptedTarget:
    """A stand-in for `Target`: the next token is a fixed function of the current one; taps encode the token."""

    def __init__(self, following: list[int], eos_ids: tuple[int, ...] = (), max_length: int = 4096):
        self.following = torch.tensor(following)
        self.eos_ids, self.max_length = eos_ids, max_length
        self.device, self.dtype, self.vocab_size = torch.device("cpu"), torch.float32, len(following)
        self.config = SimpleNamespace(num_hidden_layers=1, num_attention_heads=1, hidden_size=1)
        self.layer_devices = [self.device]
        self.forwards = 0

    def embed(self, ids):
        return torch.nn.functional.one_hot(ids, self.vocab_size).float()

    def logits(self, hidden, ids=None):
        return 10 * hidden if ids is None else 10 * hidden[..., ids]

    def causal_masks(self, lengths_R, width):
        return None

    def tree_masks(self, parents_RM, depths_RM, lengths_R, width):
        return None

    def forward(self, input_ids, tap_ids, with_final=False, **kwargs):
        self.forwards += 1
        final = self.embed(self.following[input_ids])
        taps = self.embed(input_ids) if tap_ids else final[..., :0]
        return TargetOutput(self.logits(final), taps, final if with_final else None)


class ScriptedProposer:
    """Proposes the same chain in every round."""

    tap_ids: tuple[int, ...] = ()
    column_bytes = 0
    samples = False

    def __init__(self, tokens: list[int]):
        self.tokens, self.depth, self.size = tokens, len(tokens), len(tokens)

    def begin(self, slots, capacity):
        self.requests = 0

    def join(self, taps, lengths):
        self.requests += len(lengths)

    def draft(self, anchor_R):
        return None

    def build(self, draft):
        tokens = torch.tensor([self.tokens] * self.requests)
        order = torch.arange(self.depth).expand(self.requests, -1)
        return Tree(tokens, order, order + 1, torch.zeros(tokens.shape), order, [self.depth] * self.requests)

    def commit(self, taps, counts):
        return None

    def keep(self, rows):
        self.requests = len(rows)
