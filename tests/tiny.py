"""Small models for tests: random targets of a few layers, a scripted target, and drafters that fit them."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from eval.decoding.tree import Tree
from models.checkpoint import Drafter
from models.configuration import DrafterSpec, build_drafter_config
from models.drafter import DFlashDraftModel
from models.target import Target, TargetOutput

EOS, PAD, MASK, VOCAB = 1, 0, 2, 64


def tiny_target(
    family: str = "qwen3", seed: int = 0, dtype=torch.float32, layers: int = 4, vocab: int = VOCAB
) -> Target:
    """A random target with enough spread in its logits that greedy text does not repeat one token."""
    torch.manual_seed(seed)
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
    model = Qwen3ForCausalLM(Qwen3Config(**sizes)) if family == "qwen3" else LlamaForCausalLM(LlamaConfig(**sizes))
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

    def __init__(self, tokens: list[int]):
        self.tokens, self.depth, self.size = tokens, len(tokens), len(tokens)

    def begin(self, taps, lengths, capacity):
        self.requests = len(lengths)

    def draft(self, anchor_R):
        return None

    def build(self, draft):
        tokens = torch.tensor([self.tokens] * self.requests)
        order = torch.arange(self.depth).expand(self.requests, -1)
        return Tree(tokens, order, order + 1, torch.zeros(tokens.shape), order, [self.depth] * self.requests)

    def commit(self, taps, counts):
        return None
