"""Tiny checkpoints as the public writers lay them out: keys, names and shapes typed from METHODS section 5.

An independent hand: nothing here uses the project's own readers or writers. Every builder returns a `Written`:
config.json, tensors under the format's names, and the same tensors under the names of z-lab's layers and of Domino's or
DeepSpec's heads.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file

VOCAB, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, MLP = 64, 32, 4, 2, 8, 64
LAYERS, TAPS, TARGET_LAYERS, MASK, RANK, STATE = 2, (0, 2), 4, 2, 8, 16
KINDS = ("vanilla", "gated", "rnn")


@dataclass
class Written:
    """A checkpoint as somebody else wrote it.

    Attributes:
        tensors: what is in the file.
        plain: the drafter's own tensors among them, under the names of METHODS section 5A and 5B.
        expected: fields of `DrafterSpec` that its config means.
        draft_ids: target ids that it can propose, or None.
    """

    config: dict
    tensors: dict[str, torch.Tensor]
    plain: dict[str, torch.Tensor]
    expected: dict
    draft_ids: list[int] | None = None

    def save(self, folder: Path, shards: int = 1, prefix: str = "") -> str:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config))
        tensors = {prefix + name: tensor.clone() for name, tensor in self.tensors.items()}
        if shards == 1:
            save_file(tensors, folder / "model.safetensors")
            return str(folder)
        files, weight_map = [f"model-{i + 1:05}-of-{shards:05}.safetensors" for i in range(shards)], {}
        for i, file in enumerate(files):
            part = dict(sorted(tensors.items())[i::shards])
            save_file(part, folder / file)
            weight_map |= dict.fromkeys(part, file)
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
        return str(folder)


def draw(seed: int, *shape: int, dtype=torch.float32, scale: float = 0.3) -> torch.Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


def backbone(dtype=torch.float32, taps: int = 2) -> dict[str, torch.Tensor]:
    shapes = {"fc.weight": (HIDDEN, taps * HIDDEN)}
    for i in range(LAYERS):
        shapes |= {
            f"layers.{i}.self_attn.q_proj.weight": (HEADS * HEAD_DIM, HIDDEN),
            f"layers.{i}.self_attn.k_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
            f"layers.{i}.self_attn.v_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
            f"layers.{i}.self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD_DIM),
            f"layers.{i}.mlp.gate_proj.weight": (MLP, HIDDEN),
            f"layers.{i}.mlp.up_proj.weight": (MLP, HIDDEN),
            f"layers.{i}.mlp.down_proj.weight": (HIDDEN, MLP),
        }
    norms = {"norm.weight": HIDDEN, "hidden_norm.weight": HIDDEN}
    for i in range(LAYERS):
        norms |= {
            f"layers.{i}.self_attn.q_norm.weight": HEAD_DIM,
            f"layers.{i}.self_attn.k_norm.weight": HEAD_DIM,
            f"layers.{i}.input_layernorm.weight": HIDDEN,
            f"layers.{i}.post_attention_layernorm.weight": HIDDEN,
        }
    tensors = {name: draw(n, *shape, dtype=dtype) for n, (name, shape) in enumerate(shapes.items())}
    return tensors | {name: 1 + draw(100 + n, size, dtype=dtype) for n, (name, size) in enumerate(norms.items())}


def domino_head(dtype=torch.float32) -> dict[str, torch.Tensor]:
    return {
        "prefix_gru.weight_ih_l0": draw(200, 3 * STATE, HIDDEN, dtype=dtype),
        "prefix_gru.weight_hh_l0": draw(201, 3 * STATE, STATE, dtype=dtype),
        "embed_proj.0.weight": draw(202, RANK, HIDDEN + STATE, dtype=dtype),
        "embed_proj.2.weight": draw(203, VOCAB, RANK, dtype=dtype),
    }


def markov_head(kind: str, draft_rows: int = VOCAB, dtype=torch.float32) -> dict[str, torch.Tensor]:
    tensors = {
        "markov_head.markov_w1.weight": draw(300, VOCAB, RANK, dtype=dtype),
        "markov_head.markov_w2.weight": draw(301, draft_rows, RANK, dtype=dtype),
    }
    if kind == "gated":
        tensors["markov_head.gate_proj.weight"] = draw(302, RANK, HIDDEN + RANK, dtype=dtype)
        tensors["markov_head.gate_proj.bias"] = draw(303, RANK, dtype=dtype)
    if kind == "rnn":
        tensors["markov_head.joint_proj.weight"] = draw(304, 3 * RANK, 2 * RANK + HIDDEN, dtype=dtype)
        tensors["markov_head.joint_proj.bias"] = draw(305, 3 * RANK, dtype=dtype)
    return tensors


def confidence_head(with_markov: bool, dtype=torch.float32) -> dict[str, torch.Tensor]:
    size = HIDDEN + (RANK if with_markov else 0)
    return {
        "confidence_head.proj.weight": draw(400, 1, size, dtype=dtype),
        "confidence_head.proj.bias": draw(401, 1, dtype=dtype),
    }


def layer_keys(**rope) -> dict:
    return {
        "model_type": "qwen3", "vocab_size": VOCAB, "hidden_size": HIDDEN, "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM, "intermediate_size": MLP,
        "hidden_act": "silu", "rms_norm_eps": 1e-6, "max_position_embeddings": 512, "attention_bias": False,
        "attention_dropout": 0.0, "initializer_range": 0.02, "layer_types": ["full_attention"] * LAYERS,
        "tie_word_embeddings": False, "use_cache": True, "bos_token_id": 0, "eos_token_id": 1, "sliding_window": None,
        "use_sliding_window": False, "max_window_layers": 28, "dtype": "float32", "transformers_version": "4.57.0",
        **(rope or {"rope_theta": 10000.0}),
    }  # fmt: skip


def zlab(head: str = "none", shift: bool = False, block: int = 5, old: bool = False, **nested) -> Written:
    """A: block_size in both places; Domino's emb_dim too. `old`: the older prefix, projector and architecture."""
    plain = backbone() | (domino_head() if head == "domino" else {})
    config = layer_keys(rope_theta=10000.0, rope_scaling=None) | {
        "architectures": ["DominoDraftModel" if old else "DFlashDraftModel"],
        "block_size": block,
        "num_target_layers": TARGET_LAYERS,
        "dflash_config": {"mask_token_id": MASK, "target_layer_ids": list(TAPS), "block_size": block},
    }
    if head == "domino":
        config["emb_dim"] = RANK
        config["dflash_config"] |= {
            "projector_type": "causal_v5" if old else "domino", "emb_dim": RANK, "gru_hidden_dim": STATE,
            "pure_draft_prefix_len": 1, "shift_label": shift,
        }  # fmt: skip
    elif shift:
        config["dflash_config"]["shift_label"] = True
    config["dflash_config"] |= nested
    tensors = {("logit_head." if old and n.split(".")[0] in ("prefix_gru", "embed_proj") else "") + n: t
               for n, t in plain.items()}  # fmt: skip
    expected = dict(
        block_size=block, shift_label=shift, head_type=head, mask_token_id=MASK, target_layer_ids=TAPS,
        num_target_layers=TARGET_LAYERS, pure_draft_prefix_len=1 if head == "domino" else 0,
    )  # fmt: skip
    return Written(config, tensors, plain, expected)


def deepspec(
    kind: str | None = "vanilla", confidence: bool | None = True, taps: tuple[int, ...] = TAPS, block: int = 4
):
    """B: flat keys, rope under rope_parameters only, with embedding and LM head. kind None: rank 0, plain DFlash.

    confidence: None for no confidence head, else whether it sees the previous token.
    """
    plain = backbone(taps=len(taps))
    config = layer_keys(rope_parameters={"rope_type": "default", "rope_theta": 10000.0}) | {
        "architectures": ["Qwen3DSparkModel"],
        "block_size": block, "mask_token_id": MASK, "target_layer_ids": list(taps), "num_target_layers": TARGET_LAYERS,
        "num_anchors": 512, "markov_rank": RANK if kind else 0, "enable_confidence_head": confidence is not None,
    }  # fmt: skip
    if kind:
        config["markov_head_type"] = kind
        plain |= markov_head(kind)
    if confidence is not None:
        config["confidence_head_with_markov"] = confidence
        plain |= confidence_head(confidence)
    tables = {"embed_tokens.weight": draw(500, VOCAB, HIDDEN), "lm_head.weight": draw(501, VOCAB, HIDDEN)}
    expected = dict(
        block_size=block, shift_label=True, head_type=f"markov_{kind}" if kind else "none", mask_token_id=MASK,
        target_layer_ids=taps, num_target_layers=TARGET_LAYERS, pure_draft_prefix_len=0,
        confidence_head=confidence is not None, confidence_with_markov=bool(confidence),
    )  # fmt: skip
    return Written(config, plain | tables, plain, expected)


def specforge() -> Written:
    """B as SpecForge normalises it: the same name, ids in dflash_config, neither embedding nor LM head."""
    made = deepspec("vanilla", None)
    ids = {name: made.config.pop(name) for name in ("mask_token_id", "target_layer_ids")}
    made.config["dflash_config"] = ids
    made.tensors = dict(made.plain)
    return made


def speculators(
    kind: str | None = None, anchor: bool | None = None, draft_ids: list[int] | None = None, block: int = 5
) -> Written:
    """C: dispatch on speculators_model_type, sizes in transformer_layer_config, ids plus one, d2t as an offset.

    anchor: sample_from_anchor; None leaves the key out, which means True for DSpark and False for DFlash.
    """
    rows, algorithm = len(draft_ids) if draft_ids else VOCAB, "dspark" if kind else "dflash"
    plain = backbone()
    shift = anchor if anchor is not None else kind is not None
    config = {
        "architectures": ["DSparkDraftModel" if kind else "DFlashDraftModel"],
        "speculators_model_type": algorithm,
        "speculators_version": "0.5.0",
        "transformer_layer_config": layer_keys(rope_parameters={"rope_type": "default", "rope_theta": 10000.0}),
        "draft_vocab_size": rows,
        "block_size": block,
        "mask_token_id": MASK,
        "target_hidden_size": HIDDEN,
        "aux_hidden_state_layer_ids": [i + 1 for i in TAPS],
        "sliding_window_non_causal": False,
        "tie_word_embeddings": False,
        "speculators_config": {
            "algorithm": algorithm,
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": block - 1}],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": "Qwen/Qwen3-8B", "architectures": ["Qwen3ForCausalLM"]},
        },
    }
    if anchor is not None:
        config["sample_from_anchor"] = anchor
    if kind:
        config |= {"markov_rank": RANK, "markov_head_type": kind, "enable_confidence_head": True,
                   "confidence_head_with_markov": True}  # fmt: skip
        plain |= markov_head(kind, rows) | confidence_head(True)
    tensors = plain | {
        "embed_tokens.weight": draw(500, VOCAB, HIDDEN), "lm_head.weight": draw(501, rows, HIDDEN),
        "verifier_lm_head.weight": draw(502, VOCAB, HIDDEN), "verifier_norm.weight": draw(503, HIDDEN),
    }  # fmt: skip
    if draft_ids:
        tensors["d2t"] = torch.tensor([token - i for i, token in enumerate(draft_ids)])
        tensors["t2d"] = torch.tensor([token in draft_ids for token in range(VOCAB)])
    expected = dict(
        block_size=block, shift_label=shift, head_type=f"markov_{kind}" if kind else "none", mask_token_id=MASK,
        target_layer_ids=TAPS, num_target_layers=None, pure_draft_prefix_len=0, confidence_head=kind is not None,
        draft_vocab_size=rows if draft_ids else None,
    )  # fmt: skip
    return Written(config, tensors, plain, expected, draft_ids)


def modelopt(kind: str = "vanilla", confidence: bool | None = True, shift: bool = True, block: int = 5) -> Written:
    """D: z-lab's architecture string and keys, heads flat at the top level."""
    plain = backbone() | markov_head(kind) | (confidence_head(confidence) if confidence is not None else {})
    config = layer_keys(rope_parameters={"rope_type": "default", "rope_theta": 10000.0}, rope_theta=10000.0) | {
        "architectures": ["DFlashDraftModel"],
        "block_size": block,
        "num_target_layers": TARGET_LAYERS,
        "dflash_config": {
            "mask_token_id": MASK, "target_layer_ids": list(TAPS), "projector_type": "dspark", "shift_label": shift,
            "markov_rank": RANK, "markov_head_type": kind, "use_confidence_head": confidence is not None,
        },
    }  # fmt: skip
    flat = {n.replace("markov_head.", "").replace("confidence_head.proj.", "confidence_proj."): t
            for n, t in plain.items()}  # fmt: skip
    expected = dict(
        block_size=block, shift_label=shift, head_type=f"markov_{kind}", mask_token_id=MASK, target_layer_ids=TAPS,
        num_target_layers=TARGET_LAYERS, pure_draft_prefix_len=0, confidence_head=confidence is not None,
        confidence_with_markov=bool(confidence),
    )  # fmt: skip
    return Written(config, flat, plain, expected)


CASES = {
    "zlab dflash": zlab,
    "zlab dflash shifted": lambda: zlab(shift=True),
    "zlab domino fill-in": lambda: zlab("domino"),
    "zlab domino shifted": lambda: zlab("domino", shift=True),
    "zlab domino old": lambda: zlab("domino", shift=True, old=True),
    "deepspec dflash": lambda: deepspec(None, None),
    "deepspec vanilla": deepspec,
    "deepspec gated": lambda: deepspec("gated", False),
    "deepspec rnn": lambda: deepspec("rnn", None),
    "deepspec embedding tap": lambda: deepspec("vanilla", True, taps=(-1, 1)),
    "specforge": specforge,
    "speculators dflash": speculators,
    "speculators dflash anchored": lambda: speculators(anchor=True),
    "speculators dflash reduced": lambda: speculators(draft_ids=list(range(3, 63, 4))),
    "speculators vanilla": lambda: speculators("vanilla"),
    "speculators gated reduced": lambda: speculators("gated", draft_ids=list(range(3, 63, 4))),
    "speculators rnn fill-in": lambda: speculators("rnn", anchor=False),
    "modelopt vanilla": modelopt,
    "modelopt gated": lambda: modelopt("gated", False),
    "modelopt rnn": lambda: modelopt("rnn", None),
}
