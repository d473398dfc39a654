"""A drafter with what decoding needs beside the module: its vocabulary, and tables of its own where it has them.

Shape suffixes: V (draft) vocabulary, D hidden.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from .configuration import DrafterSpec
from .drafter import DFlashDraftModel
from .tables import OwnTables
from .target import Target


@dataclass
class Drafter:
    """A drafter ready for decoding.

    Attributes:
        model: backbone and heads.
        draft_ids: ascending ids that it can propose; None for the whole vocabulary.
        embedding_VD: its own embedding table, when the checkpoint holds one that is not the target's.
        head_VD: likewise its LM head, with one row a token of the draft vocabulary.
        origin: title of the format that it was read from.
    """

    model: DFlashDraftModel
    draft_ids: Tensor | None = None
    embedding_VD: Tensor | None = None
    head_VD: Tensor | None = None
    origin: str = ""

    @property
    def spec(self) -> DrafterSpec:
        return self.model.spec

    @property
    def own_tables(self) -> bool:
        return self.embedding_VD is not None or self.head_VD is not None

    def to_target_ids(self, ids: Tensor) -> Tensor:
        """Draft-vocabulary indices -> token ids of the target."""
        return ids if self.draft_ids is None else self.draft_ids[ids]

    def tables(self, target: Target) -> Target | OwnTables:
        """What embeds tokens and scores hidden states for this drafter: the target, unless it has tables of its own."""
        return OwnTables(target, self.embedding_VD, self.head_VD) if self.own_tables else target

    def describe(self) -> str:
        """The layout in one line: what a wrong assumption about a checkpoint shows up in."""
        spec, config = self.spec, self.model.config
        taps = " ".join(map(str, spec.target_layer_ids))
        of = f" of {spec.num_target_layers}" if spec.num_target_layers else ""
        head = spec.head_type if spec.head_type != "domino" else f"domino (P={spec.pure_draft_prefix_len})"
        attention = "causal" if spec.causal else "bidirectional"
        if spec.sliding_layers:
            inside = "causal" if spec.causal or spec.sliding_causal else "bidirectional"
            attention += (
                f", {len(spec.sliding_layers)} of {config.num_hidden_layers} layers with a window of "
                f"{spec.sliding_window} from the {spec.window_floor}, {inside} there"
            )
        tables = {"embedding": self.embedding_VD, "LM head": self.head_VD}
        own = " and ".join(name for name, table in tables.items() if table is not None)
        words = "all tokens" if self.draft_ids is None else f"{len(self.draft_ids)} tokens"
        return (
            f"{self.origin}: {spec.layout} layout, block {spec.block_size} -> {spec.num_proposals} proposals a round "
            f"of {words}, mask id {spec.mask_token_id}, taps {taps}{of} layers, {attention} blocks, head {head}"
            + (" + confidence" if spec.confidence_head else "")
            + (f", own {own}" if own else "")
        )
