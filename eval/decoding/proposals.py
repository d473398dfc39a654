"""Methods by name, and the proposer that turns the target's taps into a tree each round.

Shape suffixes: R requests, C new context tokens, B block slots, D hidden, L taps, T depths, V draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from models.bundle import Drafter
from models.target import Target

from .cache import TreeCache, column_bytes
from .confidence import check_confidence, cut_chain
from .policy import BudgetPolicy, TreeOptions
from .rejection import sampled_chain
from .tree import Draft, Tree, batched_tree, chain, ddtree, empty_tree, fixed_widths, per_node_serial, prune


def _dflash_chain(draft, drafter, embed, options):
    tree = chain(draft, drafter, embed, use_head=False)
    return cut_chain(tree, draft, drafter, options) if drafter.model.head is None else tree


def _head_chain(draft, drafter, embed, options):
    return cut_chain(chain(draft, drafter, embed, use_head=True), draft, drafter, options)


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
ACCEPTANCES = ("sample-match", "rejection")
HEAD_CHAINS = ("domino_chain", "markov_chain")
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
    column_bytes = 0
    samples = False

    def begin(self, slots: int, capacity: int) -> None:
        self.requests = 0

    def join(self, taps_JSL: Tensor, lengths: list[int]) -> None:
        self.requests, self.device = self.requests + len(lengths), taps_JSL.device

    def draft(self, anchor_R: Tensor) -> None:
        return None

    def build(self, draft: None) -> Tree:
        return empty_tree(self.requests, self.device)

    def commit(self, taps_RCL: Tensor, counts: list[int]) -> None:
        return None

    def keep(self, rows: list[int]) -> None:
        self.requests = len(rows)


class DraftProposer:
    """Block-parallel pass over the drafter's own context cache, then one of `BUILDERS`.

    Attributes:
        tap_ids: target layers whose outputs it reads.
        depth, size: largest depth and node count of its trees.
        column_bytes: bytes that one token of one request takes in its cache.
        samples: the drafts are random and need uniforms (rejection sampling), see `Draft`.
        context: what the drafter has not read yet: (taps [R, C, L*D], real length of each row), oldest first.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter,
        method: str,
        options: TreeOptions,
        policy: BudgetPolicy | None = None,
        acceptance: str = "sample-match",
    ):
        if method not in BUILDERS:
            raise ValueError(f"unknown method {method!r}: choose from ar, {', '.join(BUILDERS)}")
        needs_head = method in (*HEAD_CHAINS, "per_node_serial")
        if method not in available_methods(drafter.spec.head_type) and needs_head:
            raise ValueError(f"method {method!r} does not fit the drafter's head {drafter.spec.head_type!r}")
        if acceptance not in ACCEPTANCES or (acceptance == "rejection" and method in TREES):
            raise ValueError(
                f"acceptance must be sample-match, or rejection for chains; got {acceptance!r} for {method}"
            )
        self.target, self.drafter, self.build_tree, self.options = target, drafter, BUILDERS[method], options
        if method in HEAD_CHAINS or (method == "dflash_chain" and drafter.model.head is None):
            check_confidence(drafter, options)
        self.tables = drafter.tables(target)
        self.samples = acceptance == "rejection"
        if self.samples:
            self.build_tree = partial(sampled_chain, chain=self.build_tree, use_head=method in HEAD_CHAINS)
        self.policy = (policy or BudgetPolicy(options)) if method in TREES else BudgetPolicy(options)
        self.tap_ids, self.depth = drafter.spec.target_layer_ids, drafter.spec.num_proposals
        self.size = max(self.policy.largest, self.depth) if method in TREES else self.depth
        self.column_bytes = column_bytes(drafter.model.config, drafter.model.dtype)

    def begin(self, slots: int, capacity: int) -> None:
        """Forgets earlier requests and takes room for `slots` of them at once."""
        model = self.drafter.model
        self.cache = TreeCache.for_config(model.config, slots, capacity, model.dtype, self.target.device)
        self.context: list[tuple[Tensor, list[int]]] = []
        self.requests = 0

    def join(self, taps_JSL: Tensor, lengths: list[int]) -> None:
        """Requests join in the rows after those in use: the taps of their prompts, right-padded, with real lengths."""
        first, joiners = self.requests, len(lengths)
        self.requests += joiners
        if first == 0:
            self.context = [(taps_JSL, list(lengths))]  # the first draft reads it, in the same pass
            return
        # Beside requests whose new context is a few tokens, a prompt is read in a pass of its own: no one is padded.
        self._pass(torch.full((joiners,), self.drafter.spec.mask_token_id), taps_JSL, lengths, first)
        self.context = [
            (torch.cat([taps, taps.new_zeros(joiners, *taps.shape[1:])]), counts + [0] * joiners)
            for taps, counts in self.context
        ]

    @torch.inference_mode()
    def draft(self, anchor_R: Tensor) -> Draft | None:
        """One pass: the new context and a block whose first slot is the anchor. None when no tree would pay."""
        if not self.policy.drafts(self.requests):
            return None
        taps_RCL, counts = _joined(self.context)
        self.context = []
        hidden_RBD = self._pass(anchor_R, taps_RCL, counts)
        hidden_RTD = self.drafter.model.prediction_slots(hidden_RBD)
        logits_RTV = self.tables.logits(hidden_RTD.to(self.target.dtype), self.drafter.draft_ids).float()
        return Draft(anchor_R, hidden_RTD, logits_RTV)

    @torch.inference_mode()
    def _pass(self, anchor_R: Tensor, taps_RCL: Tensor, counts: list[int], first: int = 0) -> Tensor:
        """The drafter over new context and a block in the rows from `first` on; the cache keeps the context.

        A token's column is its position. Padding context writes to the column after the block, which nobody sees.
        """
        spec, device, rows = self.drafter.spec, taps_RCL.device, len(counts)
        positions, columns, anchors = [], [], []
        for start, count in zip(self.cache.lengths[first : first + rows], counts, strict=True):
            anchor = start + count
            block = range(anchor, anchor + spec.block_size)
            positions.append([*range(start, start + taps_RCL.shape[1]), *block])
            columns.append([*range(start, anchor), *[block.stop] * (taps_RCL.shape[1] - count), *block])
            anchors.append(anchor)
        width = self.cache.place(torch.tensor(columns), first)
        mask = None
        if rows > 1:
            stop_R = torch.tensor(anchors, device=device) + spec.block_size
            mask = (torch.arange(width, device=device)[None] < stop_R[:, None])[:, None, None, :]
            mask = mask.expand(-1, 1, spec.block_size, -1)
        ids_RB = anchor_R.to(device)[:, None].repeat(1, spec.block_size)
        ids_RB[:, 1:] = spec.mask_token_id
        output = self.drafter.model(
            noise_embeds=self.tables.embed(ids_RB),
            context_hidden_states=taps_RCL,
            attention_mask=mask,
            position_ids=torch.tensor(positions, device=device),
            cache=self.cache,
        )
        self.cache.lengths[first : first + rows] = anchors
        return output.last_hidden_state

    @torch.inference_mode()
    def build(self, draft: Draft | None) -> Tree:
        if draft is None:
            return empty_tree(self.requests, self.target.device)
        options = self.policy.options(self.requests)
        tree = self.build_tree(draft, self.drafter, self.tables.embed, options)
        return self.policy.cut(tree, self.cache.lengths[: self.requests])

    def commit(self, taps_RCL: Tensor, counts: list[int]) -> None:
        """Remembers the taps of the tokens that the last round verified."""
        self.context.append((taps_RCL, list(counts)))

    def keep(self, rows: list[int]) -> None:
        """Row i takes over request `rows[i]`; the others have ended."""
        self.requests = len(rows)
        self.cache.keep(rows)
        self.context = [(taps[rows], [counts[row] for row in rows]) for taps, counts in self.context]


def _joined(context: list[tuple[Tensor, list[int]]]) -> tuple[Tensor, list[int]]:
    """All of the unread context as one right-padded tensor [R, C, L*D], with real lengths."""
    if len(context) == 1:
        taps, counts = context[0]
        return taps[:, : max(counts)], counts  # whoever had more may have ended
    taps = torch.cat([taps for taps, _ in context], dim=1)
    real = [[] for _ in context[0][1]]
    offset = 0
    for chunk, counts in context:
        for row, count in zip(real, counts, strict=True):
            row += range(offset, offset + count)
        offset += chunk.shape[1]
    longest = max(map(len, real))
    index = torch.tensor([row + [0] * (longest - len(row)) for row in real], device=taps.device)
    return taps.gather(1, index[..., None].expand(-1, -1, taps.shape[2])), [len(row) for row in real]


def make_proposer(
    target: Target,
    drafter: Drafter | None,
    method: str,
    options: TreeOptions,
    policy: BudgetPolicy | None = None,
    acceptance: str = "sample-match",
):
    """The proposer of a method id. Raises ValueError for an unknown id or one that needs another head."""
    if method == "ar":
        return NoProposer()
    if drafter is None:
        raise ValueError(f"method {method!r} needs a drafter: give --drafter or run: bash launch.sh train CONFIG")
    return DraftProposer(target, drafter, method, options, policy, acceptance)
