"""What building a tree costs, apart from any target: dartree_pruned against one head call a node, at two sizes.

Weights are random; the cost does not depend on their values, except that the heap of `per_node_serial` calls the head
for every node that it pops above the last depth. Draft logits follow a power law, as real ones do.

Shape suffixes: T depths, V draft vocabulary, D hidden.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from transformers import Qwen3Config

from models.bundle import Drafter
from models.configuration import DrafterSpec, build_drafter_config
from models.drafter import DFlashDraftModel

from .decoding.policy import TreeOptions
from .decoding.proposals import BUILDERS
from .decoding.tree import Draft, Tree
from .measure import interleave, print_table, ratios, spread, timed

BATCHED, SERIAL = "dartree_pruned", "per_node_serial"
DEPTHS = 15


@dataclass(frozen=True)
class Sizes:
    """Of a target and a Domino head. `draft_vocabulary` None: all tokens can be proposed."""

    name: str
    hidden: int
    vocabulary: int
    state: int
    rank: int = 256
    draft_vocabulary: int | None = None


DEMO = Sizes("demo (SmolLM2-135M)", hidden=576, vocabulary=49152, state=512, draft_vocabulary=8192)
QWEN3_4B = Sizes("Qwen3-4B", hidden=2560, vocabulary=151936, state=1024)


class CountingHead:
    """A correction head that counts how often it scores candidates."""

    def __init__(self, head):
        self._head, self.calls = head, 0

    def __getattr__(self, name: str):
        return getattr(self._head, name)

    def code(self, state, slot):
        self.calls += 1
        return self._head.code(state, slot)


class Bench:
    """A random drafter of the given sizes, a random embedding table, and one draft of `depths` depths."""

    def __init__(self, sizes: Sizes, dtype: torch.dtype, device: torch.device, depths: int = DEPTHS):
        generator = torch.Generator(device).manual_seed(0)
        self.sizes, self.dtype, self.device = sizes, dtype, device
        drafter = Drafter(random_drafter(sizes, dtype, device, depths))
        if sizes.draft_vocabulary:
            drafter.draft_ids = torch.arange(sizes.draft_vocabulary, device=device)
        self.table_VD = torch.randn(sizes.vocabulary, sizes.hidden, dtype=dtype, device=device, generator=generator)
        hidden_RTD = torch.randn(1, depths, sizes.hidden, dtype=dtype, device=device, generator=generator)
        tokens = sizes.draft_vocabulary or sizes.vocabulary
        ranks_RTV = torch.rand(1, depths, tokens, device=device, generator=generator).argsort(dim=-1) + 1
        self.draft = Draft(torch.zeros(1, dtype=torch.long, device=device), hidden_RTD, -1.5 * ranks_RTV.float().log())
        self.drafter = drafter

    def embed(self, ids):
        return self.table_VD[ids]

    @torch.inference_mode()
    def build(self, method: str, options: TreeOptions, depths: int | None = None) -> Tree:
        """The tree of a method, over the first `depths` depths of the draft."""
        draft = self.draft
        if depths:
            draft = Draft(draft.anchor_R, draft.hidden_RTD[:, :depths], draft.logits_RTV[:, :depths])
        return BUILDERS[method](draft, self.drafter, self.embed, options)

    def arm(self, method: str, options: TreeOptions, depths: int | None = None) -> Callable[[], float]:
        return timed(partial(self.build, method, options, depths), self.device)

    def calls(self, method: str, options: TreeOptions, depths: int | None = None) -> int:
        """How often the head scores candidates for one tree."""
        model, head = self.drafter.model, self.drafter.model.head
        counting = CountingHead(head)
        object.__setattr__(model, "head", counting)
        self.build(method, options, depths)
        object.__setattr__(model, "head", head)
        return counting.calls


def random_drafter(sizes: Sizes, dtype: torch.dtype, device: torch.device, depths: int, **heads) -> DFlashDraftModel:
    """A drafter that predicts `depths` tokens (fill-in layout), random weights.

    Args:
        heads: fields of `DrafterSpec`; without them a Domino head of the given sizes.
    """
    # The backbone takes no part: one layer of the smallest size.
    target = Qwen3Config(
        vocab_size=sizes.vocabulary,
        hidden_size=sizes.hidden,
        intermediate_size=64,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=64,
    )
    spec = DrafterSpec(
        block_size=depths + 1,
        mask_token_id=1,
        target_layer_ids=(0,),
        num_target_layers=2,
        draft_vocab_size=sizes.draft_vocabulary,
        **(heads or {"head_rank": sizes.rank, "gru_hidden_dim": sizes.state}),
    )
    torch.manual_seed(0)
    config = build_drafter_config(target, spec, 1)
    with torch.device(device):
        model = DFlashDraftModel(config).to(dtype).eval().requires_grad_(False)
    return model


def compare(bench: Bench, options: TreeOptions, repeats: int) -> dict:
    """Both builders at equal B, turn by turn: milliseconds a round, their ratio, and head calls."""
    methods = (BATCHED, SERIAL)
    times = interleave({method: bench.arm(method, options) for method in methods}, repeats, warm_up=2)
    return {
        "sizes": bench.sizes.name,
        "batched_ms": spread(times[BATCHED], 1e3),
        "serial_ms": spread(times[SERIAL], 1e3),
        "serial/batched": ratios(times[SERIAL], times[BATCHED]),
        "batched_calls": bench.calls(BATCHED, options),
        "serial_calls": bench.calls(SERIAL, options),
    }


def growth(bench: Bench, options: TreeOptions, repeats: int) -> list[dict]:
    """How the cost of dartree_pruned grows: by depths at the given width, and by nodes at all depths."""
    depths = bench.drafter.spec.num_proposals
    points = [(part, options.width) for part in sorted({max(1, depths // 4), max(1, depths // 2), depths})]
    points += [(depths, width) for width in (2, 6, 24) if width != options.width]
    arms = {}
    for part, width in points:
        arms[part, width] = bench.arm(BATCHED, replace(options, width=width, budget=part * width), part)
    times = interleave(arms, repeats, warm_up=2)
    rows = []
    for part, width in points:
        given = replace(options, width=width, budget=part * width)
        nodes, calls = bench.build(BATCHED, given, part).sizes[0], bench.calls(BATCHED, given, part)
        rows.append(
            {
                "sizes": bench.sizes.name,
                "depths": part,
                "width": width,
                "nodes": nodes,
                "head_calls": calls,
                "ms": spread(times[part, width], 1e3),
            }
        )
    return rows


def tree_part(
    options: TreeOptions,
    dtype: torch.dtype,
    device: torch.device,
    repeats: int,
    all_sizes: tuple[Sizes, ...] = (DEMO, QWEN3_4B),
    depths: int = DEPTHS,
) -> dict:
    """{"compare": rows of `compare`, "growth": rows of `growth`} for all sizes, printed as tables too."""
    compared, grown = [], []
    for sizes in all_sizes:
        bench = Bench(sizes, dtype, device, depths)
        compared.append(compare(bench, options, repeats))
        grown += growth(bench, options, repeats)
    print_table(
        f"Building a tree, ms a round: B={options.budget}, W={options.width}, K={options.candidates}, {depths} depths, "
        "per-node serial against batched (dartree_pruned)",
        compared,
    )
    print_table("Growth of dartree_pruned (nothing pruned): with depths, not with nodes", grown)
    return {
        "depths": depths,
        "budget": options.budget,
        "width": options.width,
        "candidates": options.candidates,
        "compare": compared,
        "growth": grown,
    }
