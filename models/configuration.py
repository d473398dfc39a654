"""What a drafter is: its block, its mask token, its taps, its label layout and its head, resolved once from a config.

The configuration object itself is transformers' `Qwen3Config` (the layers are Qwen3's) with the extra keys that public
DFlash and Domino checkpoints use: `block_size`, `mask_token_id` and `target_layer_ids` flat and inside `dflash_config`.
`DrafterSpec` is the typed view of those keys that the rest of the project reads. This module is copied into exports, so
it imports torch and transformers only.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields

from transformers import Qwen3Config

from .heads import HEADS

HEAD_TYPES = ("none", *HEADS)
# `causal_v5` is the older public name of the Domino projector.
_PROJECTORS = {None: "none", "causal_v5": "domino"} | {name: name for name in HEAD_TYPES}


@dataclass(frozen=True)
class DrafterSpec:
    """The semantic options of a drafter. A change of any of them makes another drafter.

    Attributes:
        block_size: input slots B_k of a block: the anchor and B_k - 1 mask slots.
        mask_token_id: id whose embedding fills the mask slots.
        target_layer_ids: 0-based target layers whose outputs are the taps, in id order.
        num_target_layers: number of layers of the target that the drafter belongs to.
        shift_label: slot j predicts the token at a+j+1 (True, "shifted") or at a+j (False, "fill-in").
        head_type: one of `HEAD_TYPES`.
        pure_draft_prefix_len: P, number of leading predicted tokens scored by base logits alone.
        head_rank: rank of the correction (Domino's `emb_dim`, Markov's rank).
        gru_hidden_dim: G, size of Domino's recurrent state.
        draft_vocab_size: number of tokens that the drafter can propose; None means all of them.
        confidence_head: whether a confidence head predicts the acceptance of each drafted token.
        confidence_with_markov: whether it looks at the Markov head's row of the previous token too.
    """

    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    num_target_layers: int
    shift_label: bool = False
    head_type: str = "domino"
    pure_draft_prefix_len: int = 1
    head_rank: int = 256
    gru_hidden_dim: int = 1024
    draft_vocab_size: int | None = None
    confidence_head: bool = False
    confidence_with_markov: bool = False

    def __post_init__(self):
        if self.block_size < 2:
            raise ValueError(f"block_size must be at least 2, got {self.block_size}")
        if self.head_type not in HEAD_TYPES:
            raise ValueError(f"head_type must be one of {', '.join(HEAD_TYPES)}, got {self.head_type!r}")
        if self.pure_draft_prefix_len < 0:
            raise ValueError(f"pure_draft_prefix_len must be >= 0, got {self.pure_draft_prefix_len}")
        check_taps(self.target_layer_ids, self.num_target_layers)
        # Options that the head does not have are zero, so that equal drafters have equal specs.
        if self.head_type != "domino":
            object.__setattr__(self, "gru_hidden_dim", 0)
        if self.head_type == "none":
            object.__setattr__(self, "head_rank", 0)
            object.__setattr__(self, "pure_draft_prefix_len", 0)
        if not self.confidence_head:
            object.__setattr__(self, "confidence_with_markov", False)
        if self.confidence_with_markov and not self.head_type.startswith("markov_"):
            raise ValueError(f"confidence_head_with_markov needs a Markov head, the head is {self.head_type!r}")
        if self.head_type != "none" and self.pure_draft_prefix_len >= self.num_proposals:
            raise ValueError(
                f"pure_draft_prefix_len {self.pure_draft_prefix_len} leaves the head none of the "
                f"{self.num_proposals} predicted tokens of block_size {self.block_size}"
            )

    @property
    def num_proposals(self) -> int:
        """Tokens proposed by one pass, the depth of the tree: B_k when shifted, B_k - 1 when fill-in."""
        return self.block_size if self.shift_label else self.block_size - 1

    @property
    def first_slot(self) -> int:
        """Slot that predicts the token at a+1."""
        return 0 if self.shift_label else 1

    @property
    def layout(self) -> str:
        return "shifted" if self.shift_label else "fill-in"

    def to_config_keys(self) -> dict:
        """The keys of `config.json` (METHODS section 5A: both the flat and the nested form)."""
        nested = {
            "block_size": self.block_size,
            "mask_token_id": self.mask_token_id,
            "target_layer_ids": list(self.target_layer_ids),
            "shift_label": self.shift_label,
        }
        if self.head_type.startswith("markov_"):
            nested |= {
                "projector_type": "dspark",
                "markov_rank": self.head_rank,
                "markov_head_type": self.head_type.removeprefix("markov_"),
                "pure_draft_prefix_len": self.pure_draft_prefix_len,
            }
        elif self.head_type != "none":
            state = {"gru_hidden_dim": self.gru_hidden_dim} if self.gru_hidden_dim else {}
            nested |= {
                "projector_type": self.head_type,
                "emb_dim": self.head_rank,
                **state,
                "pure_draft_prefix_len": self.pure_draft_prefix_len,
            }
        if self.confidence_head:
            nested["enable_confidence_head"] = True
            nested["confidence_head_with_markov"] = self.confidence_with_markov
        keys = {
            "block_size": self.block_size,
            "mask_token_id": self.mask_token_id,
            "target_layer_ids": list(self.target_layer_ids),
            "num_target_layers": self.num_target_layers,
            "dflash_config": nested,
        }
        if self.head_type == "domino":
            keys["emb_dim"] = self.head_rank
        if self.draft_vocab_size is not None:
            keys["draft_vocab_size"] = self.draft_vocab_size
        return keys

    @classmethod
    def from_config(cls, config) -> DrafterSpec:
        """Reads the spec of a z-lab DFlash, Domino or own checkpoint.

        Raises ValueError for a missing key that has no documented default, for two different values of the same key,
        and for variants of the attention that this drafter does not compute (causal or sliding-window blocks).
        """
        nested = dict(getattr(config, "dflash_config", None) or {})
        flat = config.to_dict()

        def required(name):
            values = [d[name] for d in (flat, nested) if d.get(name) is not None]
            if not values:
                raise ValueError(
                    f"the drafter's config.json lacks {name!r} (looked at the top level and in dflash_config)"
                )
            if any(value != values[0] for value in values):
                raise ValueError(f"config.json gives {name!r} twice with different values: {values[0]} and {values[1]}")
            return values[0]

        causal = [k for k in ("causal_head", "causal") if nested.get(k)] + (
            ["is_causal"] if flat.get("is_causal") else []
        )
        if causal:
            raise ValueError(f"config.json sets {causal[0]!r}: blocks with causal attention are not supported")
        if any(kind != "full_attention" for kind in flat.get("layer_types") or ()):
            raise ValueError("config.json has sliding-window drafter layers: not supported")

        projector = nested.get("projector_type")
        if projector == "dspark":
            head = {
                "head_type": f"markov_{nested.get('markov_head_type', 'vanilla')}",
                "head_rank": nested["markov_rank"],
            }
        elif projector in _PROJECTORS:
            head = {"head_type": _PROJECTORS[projector]}
        else:
            raise ValueError(f"unknown dflash_config.projector_type {projector!r}")
        if head["head_type"] in HEADS and projector != "dspark":
            head["head_rank"] = nested["emb_dim"] if "emb_dim" in nested else required("emb_dim")
        if head["head_type"] == "domino":
            state = "gru_hidden_dim"
            head[state] = nested[state] if state in nested else required(state)
            if "shift_label" not in nested:
                raise ValueError("a Domino checkpoint must say dflash_config.shift_label: both layouts are in use")
        return cls(
            block_size=required("block_size"),
            mask_token_id=required("mask_token_id"),
            target_layer_ids=tuple(required("target_layer_ids")),
            num_target_layers=required("num_target_layers"),
            shift_label=bool(nested.get("shift_label", False)),
            pure_draft_prefix_len=int(nested.get("pure_draft_prefix_len", 0)),
            draft_vocab_size=flat.get("draft_vocab_size"),
            confidence_head=bool(nested.get("enable_confidence_head", False)),
            confidence_with_markov=bool(nested.get("confidence_head_with_markov", False)),
            **head,
        )


def default_taps(num_target_layers: int, count: int) -> tuple[int, ...]:
    """Tap ids spread over the target (METHODS section 1): `[L//2]` for one, else round(1 + j (L-4)/(n-1))."""
    if count == 1:
        return (num_target_layers // 2,)
    return tuple(round(1 + j * (num_target_layers - 4) / (count - 1)) for j in range(count))


def check_taps(target_layer_ids: tuple[int, ...], num_target_layers: int) -> None:
    """Raises ValueError for taps that no engine can serve the same way as Hugging Face computes them."""
    ids = tuple(target_layer_ids)
    if not ids or list(ids) != sorted(set(ids)):
        raise ValueError(f"target_layer_ids must be distinct and ascending, got {list(ids)}")
    if ids[0] < 0 or ids[-1] >= num_target_layers:
        raise ValueError(f"target_layer_ids must lie in 0..{num_target_layers - 2}, got {list(ids)}")
    if ids[-1] == num_target_layers - 1:
        raise ValueError(
            f"target_layer_ids taps layer {ids[-1]}, the target's last: Hugging Face stores it after the final norm, "
            f"serving engines before it; tap layer {num_target_layers - 2} or lower"
        )


def build_drafter_config(target_config, spec: DrafterSpec, num_layers: int) -> Qwen3Config:
    """A drafter configuration with the target's sizes, so that its layers can start from the target's own."""
    heads = target_config.num_attention_heads
    text = target_config.to_dict()
    config = Qwen3Config(
        vocab_size=target_config.vocab_size,
        hidden_size=target_config.hidden_size,
        intermediate_size=target_config.intermediate_size,
        num_hidden_layers=num_layers,
        num_attention_heads=heads,
        num_key_value_heads=text.get("num_key_value_heads") or heads,
        head_dim=text.get("head_dim") or target_config.hidden_size // heads,
        hidden_act=text.get("hidden_act", "silu"),
        max_position_embeddings=target_config.max_position_embeddings,
        rms_norm_eps=target_config.rms_norm_eps,
        rope_parameters=_full_rope(target_config.rope_parameters),
        attention_bias=False,
        tie_word_embeddings=False,
        layer_types=["full_attention"] * num_layers,
        architectures=["DFlashDraftModel"],
        **spec.to_config_keys(),
    )
    return config


def _full_rope(rope_parameters: dict) -> dict:
    """The target's rope options for a drafter: those of its full-attention layers, rotating whole heads."""
    rope = rope_parameters.get("full_attention") or rope_parameters
    return {key: value for key, value in rope.items() if key != "partial_rotary_factor"}


def merge_rope(keys: dict) -> dict:
    """The one `rope_parameters` of a config.json, which may also stand in `rope_scaling` and `rope_theta`.

    transformers lets `rope_scaling` replace `rope_parameters` and falls back to a default theta, so a checkpoint that
    gives theta in one place and YaRN in another would load with other frequencies than it was trained with.
    Raises ValueError for two different values of one option, for no theta, and for partial rotary embeddings.
    """
    merged: dict = {}
    theta = {"rope_theta": keys["rope_theta"]} if keys.get("rope_theta") is not None else {}
    for source in (keys.get("rope_parameters") or {}, keys.get("rope_scaling") or {}, theta):
        for name, value in source.items():
            name = "rope_type" if name == "type" else name
            if merged.setdefault(name, value) != value:
                raise ValueError(f"config.json gives {name!r} twice with different values: {merged[name]} and {value}")
    if merged.get("rope_theta") is None:
        raise ValueError("the drafter's config.json lacks 'rope_theta'")
    if (merged.get("partial_rotary_factor") or keys.get("partial_rotary_factor") or 1.0) != 1.0:
        raise ValueError(
            "config.json sets partial_rotary_factor: drafters that rotate part of a head are not supported"
        )
    return {"rope_type": "default"} | merged


def spec_difference(a: DrafterSpec, b: DrafterSpec) -> dict[str, tuple]:
    """Fields in which two specs differ, as name -> (a's value, b's value)."""
    left, right = asdict(a), asdict(b)
    return {f.name: (left[f.name], right[f.name]) for f in fields(DrafterSpec) if left[f.name] != right[f.name]}
