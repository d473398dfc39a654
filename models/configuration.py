"""What a drafter is: its block, its mask token, its taps, its label layout and its head, resolved once from a config.

The configuration object itself is transformers' `Qwen3Config` (the layers are Qwen3's) with the extra keys that public
DFlash and Domino checkpoints use: `block_size`, `mask_token_id` and `target_layer_ids` flat and inside `dflash_config`.
`DrafterSpec` is the typed view of those keys that the rest of the project reads. This module is copied into exports, so
it imports torch and transformers only.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields

from transformers import Qwen3Config

from .heads import HEADS, head_types

# Names of projectors that are not the head's own; `causal_v5` is the older public one of Domino's.
_PROJECTORS = {None: "none", "causal_v5": "domino"}


@dataclass(frozen=True)
class DrafterSpec:
    """The semantic options of a drafter. A change of any of them makes another drafter.

    Attributes:
        block_size: input slots B_k of a block: the anchor and B_k - 1 mask slots.
        mask_token_id: id whose embedding fills the mask slots.
        target_layer_ids: 0-based target layers whose outputs are the taps, in id order.
        num_target_layers: number of layers of the target that the drafter belongs to; None when the checkpoint does
            not say so (speculators), until a target is at hand.
        shift_label: slot j predicts the token at a+j+1 (True, "shifted") or at a+j (False, "fill-in").
        head_type: one of `models.heads.head_types`.
        pure_draft_prefix_len: P, number of leading predicted tokens scored by base logits alone.
        head_rank: rank of the correction (Domino's `emb_dim`, Markov's rank).
        gru_hidden_dim: G, size of Domino's recurrent state.
        draft_vocab_size: number of tokens that the drafter can propose; None means all of them.
        confidence_head: whether a confidence head predicts the acceptance of each drafted token.
        confidence_with_markov: whether it looks at the Markov head's row of the previous token too.
        causal: a slot sees the slots up to its own, instead of its whole block.
        sliding_window: w, context that the sliding-window layers see; None without such layers.
        sliding_layers: the drafter's layers that have the window.
        sliding_causal: blocks are causal in these layers.
        window_floor: first position that they see at slot j: "slot" a+j-(w-1) (SGLang, SpecForge), or "anchor" a-w
            (speculators, which limits the context alone).
    """

    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    num_target_layers: int | None
    shift_label: bool = False
    head_type: str = "domino"
    pure_draft_prefix_len: int = 1
    head_rank: int = 256
    gru_hidden_dim: int = 1024
    draft_vocab_size: int | None = None
    confidence_head: bool = False
    confidence_with_markov: bool = False
    causal: bool = False
    sliding_window: int | None = None
    sliding_layers: tuple[int, ...] = ()
    sliding_causal: bool = True
    window_floor: str = "slot"

    def __post_init__(self):
        if self.block_size < 2:
            raise ValueError(f"block_size must be at least 2, got {self.block_size}")
        if self.head_type not in head_types():
            raise ValueError(f"head must be one of {', '.join(head_types())}, got {self.head_type!r}")
        if self.pure_draft_prefix_len < 0:
            raise ValueError(f"pure_draft_prefix_len must be >= 0, got {self.pure_draft_prefix_len}")
        check_taps(self.target_layer_ids, self.num_target_layers)
        check_window(self)
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
            "causal": self.causal,
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
            "is_causal": self.causal,
            "dflash_config": nested,
        }
        if self.sliding_layers:
            nested["window_floor"] = self.window_floor
            keys |= {
                "use_sliding_window": True,
                "sliding_window": self.sliding_window,
                "sliding_window_non_causal": not self.sliding_causal,
            }
        if self.head_type == "domino":
            keys["emb_dim"] = self.head_rank
        if self.draft_vocab_size is not None:
            keys["draft_vocab_size"] = self.draft_vocab_size
        return keys

    @classmethod
    def from_config(cls, config) -> DrafterSpec:
        """Reads the spec of a z-lab DFlash, Domino or own checkpoint.

        Raises ValueError for a missing key that has no documented default, and for two different values of one option.
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

        projector = nested.get("projector_type")
        if projector == "dspark":
            head = {
                "head_type": f"markov_{nested.get('markov_head_type', 'vanilla')}",
                "head_rank": nested["markov_rank"],
            }
        elif (name := _PROJECTORS.get(projector, projector)) in head_types():
            head = {"head_type": name}
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
            # An explicit null is a checkpoint whose format does not name it; a missing key is a mistake.
            num_target_layers=None if flat.get("num_target_layers", 0) is None else required("num_target_layers"),
            shift_label=bool(nested.get("shift_label", False)),
            pure_draft_prefix_len=int(nested.get("pure_draft_prefix_len", 0)),
            draft_vocab_size=flat.get("draft_vocab_size"),
            confidence_head=bool(nested.get("enable_confidence_head", False)),
            confidence_with_markov=bool(nested.get("confidence_head_with_markov", False)),
            **head,
            **_attention_options(flat, nested),
        )


def _attention_options(flat: dict, nested: dict) -> dict:
    """Who sees whom inside a block, from the keys that the public formats use for it (METHODS section 1)."""
    causal = {name: bool(nested[name]) for name in ("causal_head", "causal") if nested.get(name) is not None}
    if flat.get("is_causal") is not None:
        causal["is_causal"] = bool(flat["is_causal"])
    if len(set(causal.values())) > 1:
        raise ValueError(f"config.json contradicts itself about causal blocks: {causal}")
    sliding = [i for i, kind in enumerate(flat.get("layer_types") or ()) if kind == "sliding_attention"]
    return {
        "causal": any(causal.values()),
        "sliding_layers": tuple(sliding),
        "sliding_window": flat.get("sliding_window") if sliding else None,
        "sliding_causal": not flat.get("sliding_window_non_causal", False),
        "window_floor": nested.get("window_floor", "slot"),
    }


def check_window(spec: DrafterSpec) -> None:
    """Raises ValueError for half-said windows; without sliding layers their options take the default values."""
    if not spec.sliding_layers:
        object.__setattr__(spec, "sliding_window", None)
        object.__setattr__(spec, "sliding_causal", True)
        object.__setattr__(spec, "window_floor", "slot")
    elif not spec.sliding_window or spec.sliding_window < 1:
        raise ValueError(f"layer_types has sliding_attention layers, but sliding_window is {spec.sliding_window}")
    if spec.window_floor not in ("slot", "anchor"):
        raise ValueError(f"window_floor must be slot or anchor, got {spec.window_floor!r}")


def default_taps(num_target_layers: int, count: int) -> tuple[int, ...]:
    """Tap ids spread over the target (METHODS section 1): `[L//2]` for one, else round(1 + j (L-4)/(n-1))."""
    if count == 1:
        return (num_target_layers // 2,)
    return tuple(round(1 + j * (num_target_layers - 4) / (count - 1)) for j in range(count))


def check_taps(target_layer_ids: tuple[int, ...], num_target_layers: int | None) -> None:
    """Raises ValueError for taps that no engine can serve the same way as Hugging Face computes them.

    -1 is the output of the embedding (DeepSpec). Without a number of layers only the order is checked.
    """
    ids = tuple(target_layer_ids)
    if not ids or list(ids) != sorted(set(ids)):
        raise ValueError(f"target_layer_ids must be distinct and ascending, got {list(ids)}")
    if ids[0] < -1:
        raise ValueError(f"target_layer_ids start at -1, the embedding's output; got {list(ids)}")
    if num_target_layers is None:
        return
    if ids[-1] >= num_target_layers:
        raise ValueError(f"target_layer_ids must lie in -1..{num_target_layers - 2}, got {list(ids)}")
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
        hidden_act=text.get("hidden_act") or text.get("hidden_activation") or "silu",  # the second is Gemma's
        max_position_embeddings=target_config.max_position_embeddings,
        rms_norm_eps=target_config.rms_norm_eps,
        rope_parameters=_full_rope(target_config.rope_parameters),
        attention_bias=False,
        tie_word_embeddings=False,
        layer_types=layer_types(spec, num_layers),
        architectures=["DFlashDraftModel"],
        **spec.to_config_keys(),
    )
    return config


def layer_types(spec: DrafterSpec, num_layers: int) -> list[str]:
    """transformers' name of each layer's attention."""
    if spec.sliding_layers and max(spec.sliding_layers) >= num_layers:
        raise ValueError(f"sliding_layers {list(spec.sliding_layers)} exceed the drafter's {num_layers} layers")
    return ["sliding_attention" if i in spec.sliding_layers else "full_attention" for i in range(num_layers)]


def _full_rope(rope_parameters: dict) -> dict:
    """The target's rope options for a drafter: those of its full-attention layers, rotating whole heads."""
    rope = rope_parameters.get("full_attention") or rope_parameters
    return {key: value for key, value in rope.items() if key != "partial_rotary_factor"}


def spec_difference(a: DrafterSpec, b: DrafterSpec) -> dict[str, tuple]:
    """Fields in which two specs differ, as name -> (a's value, b's value)."""
    left, right = asdict(a), asdict(b)
    return {f.name: (left[f.name], right[f.name]) for f in fields(DrafterSpec) if left[f.name] != right[f.name]}
