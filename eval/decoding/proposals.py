"""Methods by name, and the proposer that turns the target's taps into a tree each round.

Shape suffixes: R requests, C new context tokens, B block slots, D hidden, L taps, T depths, V draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from models.checkpoint import Drafter
from models.target import Target

from .cache import TreeCache
from .tree import Draft, Tree, batched_tree, chain, ddtree, empty_tree, fixed_widths, per_node_serial, prune


@dataclass(frozen=True)
class TreeOptions:
    """Knobs of the trees: budget B (root not counted), width W, candidates K, beta of the final pruning."""

    budget: int = 64
    width: int = 12
    candidates: int = 64
    beta: float = -0.2


def _dflash_chain(draft, drafter, embed, options):
    return chain(draft, drafter, embed, use_head=False)


def _head_chain(draft, drafter, embed, options):
    return chain(draft, drafter, embed, use_head=True)


def _ddtree(draft, drafter, embed, options):
    return ddtree(draft, drafter, options.budget)


def _per_node_serial(draft, drafter, embed, options):
    return per_node_serial(draft, drafter, embed, options.budget, options.candidates)


def _dartree_fixed(draft, drafter, embed, options):
    widths = fixed_widths(options.budget, drafter.spec.num_proposals)
    # beta 0 and a budget that the tree cannot exceed: this only ranks the nodes and drops impossible ones.
    return prune(batched_tree(draft, drafter, embed, widths, options.candidates), options.budget, 0.0)


def _dartree_pruned(draft, drafter, embed, options):
    widths = [options.width] * drafter.spec.num_proposals
    return prune(batched_tree(draft, drafter, embed, widths, options.candidates), options.budget, options.beta)


BUILDERS: dict[str, Callable[..., Tree]] = {
    "dflash_chain": _dflash_chain,
    "domino_chain": _head_chain,
    "markov_chain": _head_chain,
    "ddtree": _ddtree,
    "per_node_serial": _per_node_serial,
    "dartree_fixed": _dartree_fixed,
    "dartree_pruned": _dartree_pruned,
}
TREES = ("ddtree", "per_node_serial", "dartree_fixed", "dartree_pruned")


def available_methods(head_type: str) -> list[str]:
    """Method ids that a drafter with this head supports, `ar` first. Trees without a head score base logits alone."""
    chains = {"none": [], "domino": ["domino_chain"]}.get(head_type, ["markov_chain"])
    corrected = [] if head_type == "none" else ["per_node_serial"]
    return ["ar", "dflash_chain", *chains, "ddtree", *corrected, "dartree_fixed", "dartree_pruned"]


class NoProposer:
    """Autoregressive decoding: nothing is proposed, and no taps are asked of the target."""

    tap_ids: tuple[int, ...] = ()
    depth = 0
    size = 0

    def begin(self, taps_RCL: Tensor, lengths: list[int], capacity: int) -> None:
        self.requests, self.device = taps_RCL.shape[0], taps_RCL.device

    def draft(self, anchor_R: Tensor) -> None:
        return None

    def build(self, draft: None) -> Tree:
        return empty_tree(self.requests, self.device)

    def commit(self, taps_RCL: Tensor, counts: list[int]) -> None:
        return None


class DraftProposer:
    """Block-parallel pass over the drafter's own context cache, then one of `BUILDERS`."""

    def __init__(self, target: Target, drafter: Drafter, method: str, options: TreeOptions):
        if method not in BUILDERS:
            raise ValueError(f"unknown method {method!r}: choose from ar, {', '.join(BUILDERS)}")
        needs_head = method in ("domino_chain", "markov_chain", "per_node_serial")
        if method not in available_methods(drafter.spec.head_type) and needs_head:
            raise ValueError(f"method {method!r} does not fit the drafter's head {drafter.spec.head_type!r}")
        self.target, self.drafter, self.build_tree, self.options = target, drafter, BUILDERS[method], options
        self.tap_ids, self.depth = drafter.spec.target_layer_ids, drafter.spec.num_proposals
        self.size = max(options.budget, self.depth) if method in TREES else self.depth

    def begin(self, taps_RCL: Tensor, lengths: list[int], capacity: int) -> None:
        """Takes the taps of the prompts [R, C, L*D] (right-padded, real lengths given); forgets earlier requests."""
        config, block = self.drafter.model.config, self.drafter.spec.block_size
        requests = taps_RCL.shape[0]
        # A forward holds padded context and block: padding columns lie after the block and are overwritten later.
        room = capacity + taps_RCL.shape[1] + block
        self.cache = TreeCache.for_config(config, requests, room, self.drafter.model.dtype, taps_RCL.device)
        self.pending_RCL, self.counts = taps_RCL, list(lengths)

    @torch.inference_mode()
    def draft(self, anchor_R: Tensor) -> Draft:
        """One pass: the pending context and a block whose first slot is the anchor."""
        spec, model, device = self.drafter.spec, self.drafter.model, anchor_R.device
        requests, context = self.pending_RCL.shape[:2]
        ids_RB = anchor_R[:, None].repeat(1, spec.block_size)
        ids_RB[:, 1:] = spec.mask_token_id
        starts_R = torch.tensor(self.cache.lengths, device=device)
        anchors_R = starts_R + torch.tensor(self.counts, device=device)
        context_RC = starts_R[:, None] + torch.arange(context, device=device)
        block_RB = anchors_R[:, None] + torch.arange(spec.block_size, device=device)
        columns = self._columns(context_RC, block_RB, anchors_R)
        width = self.cache.place(columns)
        mask = None
        if requests > 1:
            columns_T = torch.arange(width, device=device)
            mask = (columns_T[None] < anchors_R[:, None] + spec.block_size)[:, None, None, :]
            mask = mask.expand(-1, 1, spec.block_size, -1)
        output = model(
            noise_embeds=self.target.embed(ids_RB),
            context_hidden_states=self.pending_RCL,
            attention_mask=mask,
            position_ids=torch.cat([context_RC, block_RB], dim=1),
            cache=self.cache,
        )
        for r, count in enumerate(self.counts):
            self.cache.commit(r, list(range(self.cache.lengths[r], self.cache.lengths[r] + count)))
        hidden_RTD = model.prediction_slots(output.last_hidden_state)
        logits_RTV = self.target.logits(hidden_RTD.to(self.target.dtype), self.drafter.draft_ids).float()
        return Draft(anchor_R, hidden_RTD, logits_RTV)

    def _columns(self, context_RC: Tensor, block_RB: Tensor, anchors_R: Tensor) -> Tensor:
        """Cache columns: a token's column is its position; padding context goes after the block."""
        padding = context_RC >= anchors_R[:, None]
        spare = context_RC + self.drafter.spec.block_size
        return torch.cat([torch.where(padding, spare, context_RC), block_RB], dim=1)

    @torch.inference_mode()
    def build(self, draft: Draft) -> Tree:
        return self.build_tree(draft, self.drafter, self.target.embed, self.options)

    def commit(self, taps_RCL: Tensor, counts: list[int]) -> None:
        """Remembers the taps of the tokens that the last round verified; a finished request gives none."""
        self.pending_RCL, self.counts = taps_RCL, list(counts)


def make_proposer(target: Target, drafter: Drafter | None, method: str, options: TreeOptions):
    """The proposer of a method id. Raises ValueError for an unknown id or one that needs another head."""
    if method == "ar":
        return NoProposer()
    if drafter is None:
        raise ValueError(f"method {method!r} needs a drafter: give --drafter or run: bash launch.sh train CONFIG")
    return DraftProposer(target, drafter, method, options)
