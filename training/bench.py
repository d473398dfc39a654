"""Benchmark of the training side, for a quiet machine: the loss alone at a large vocabulary, and the whole step.

    bash launch.sh bench [CONFIG] --training [--parts loss step] [--bench_repeats 9]
    python -m training.bench configs/demo.yaml --parts step

loss: forward and backward of the loss over 512 anchors x 16 slots at two vocabularies, its time and the memory that it
takes above the parameters. step: one step of a drafter of the config's shape on stored features (forward, backward,
AdamW), by anchors, draft vocabulary and row length. Heads and terms of the loss are the config's. Weights and data are
random: cost depends on sizes only. Tables for people first; the last line is one JSON object.

Shape suffixes: R rows, S tokens, N anchors, B slots, D hidden, V vocabulary, Q = N*B.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig

from data.batches import Batch, Sample, collate
from data.environment import choose_device
from data.settings import RunConfig, run_stage
from eval.bench import chosen_parts
from eval.bench_tree import DEMO, QWEN3_4B, Sizes, random_drafter
from eval.measure import interleave, print_result, print_table, spread, timed
from eval.memory import PeakMemory, give_back
from models.configuration import DrafterSpec, build_drafter_config
from models.drafter import DFlashDraftModel
from models.target import Target, choose_dtype
from training.forward import block_loss
from training.objective import Objective, Terms, batch_gamma
from training.plan import head_fields

PARTS = ("loss", "step")


@dataclass(frozen=True)
class StepSizes:
    """What a step's cost depends on; the defaults are the demo's."""

    anchors: int = 24
    length: int = 256
    draft_vocabulary: int = 8192  # as large as the vocabulary: all of it
    rows: int = 8
    hidden: int = 576
    heads: int = 9
    key_value_heads: int = 3
    intermediate: int = 1536
    vocabulary: int = 49152


def main(argv: list[str]) -> int:
    return run_stage("bench", argv, bench)


def bench(config: RunConfig) -> None:
    """Runs the stage. Raises ValueError for a user's mistake."""
    device = torch.device(choose_device(config.device))
    dtype = choose_dtype(config.dtype, device.type)
    results: dict = {}
    for name in chosen_parts(config, PARTS):
        part = {"loss": loss_part, "step": step_part}[name]
        results[name] = part(config, dtype, device)
    print_result("training", dtype, "none", results, repeats=config.bench_repeats)


@dataclass(frozen=True)
class Work:
    """What is measured, and what frees the gradients that it leaves."""

    run: Callable[[], None]
    clear: Callable[[], None]

    def __call__(self) -> None:
        self.clear()
        self.run()


def memory_and_time(work: Work, device: torch.device) -> Callable[[], dict]:
    """The work as an arm that returns its seconds and its peak memory above what was in use before, in GiB.

    Memory is measured once, in a run of its own after the first timed one: it depends on sizes only.
    """
    clock, measured = timed(work, device), []

    def arm() -> dict:
        seconds = clock()
        if not measured:
            work.clear()
            measured.append(memory_above(work.run, device))
        return {"seconds": seconds, "gib": measured[0]}

    return arm


def memory_above(work: Callable[[], object], device: torch.device) -> float | None:
    """Peak of the work above what is in use before it, in GiB; None where the system does not tell."""
    peak = PeakMemory(device)
    give_back()
    peak.reset()
    before = peak.read()
    work()
    after = peak.read()
    return None if before is None or after is None else (after - before) * 1e9 / 2**30


def row_of(sizes: dict, turns: list[dict]) -> dict:
    """A table's row: the sizes, seconds and memory."""
    return {**sizes, "s": spread([turn["seconds"] for turn in turns]), "GiB above": turns[0]["gib"]}


def loss_part(
    config: RunConfig,
    dtype: torch.dtype,
    device: torch.device,
    all_sizes: tuple[Sizes, ...] = (replace(DEMO, draft_vocabulary=None), QWEN3_4B),
    anchors: int = 512,
    slots: int = 16,
) -> list[dict]:
    """The loss alone over blocks of `slots`, in the fill-in layout: each predicts slots - 1 tokens.

    The heads are the config's kind, in the rank and state of `all_sizes`.
    """
    rows, gamma = [], batch_gamma(config)
    for sizes in all_sizes:
        target = random_target(sizes.vocabulary, sizes.hidden, 2, dtype, device)
        heads = {**head_fields(config), "head_rank": sizes.rank, "gru_hidden_dim": sizes.state}
        model = random_drafter(sizes, dtype, device, slots - 1, **heads).requires_grad_(True)
        objective = Objective(target, None, 0, Terms.of(config))
        batch = random_batch(model.spec, sizes.vocabulary, 1, 2 * anchors, anchors, 0, dtype, device, gamma)
        add_final_states(batch, objective)
        hidden_RQD = torch.randn(1, anchors * slots, sizes.hidden, dtype=dtype, device=device, requires_grad=True)

        def run(model=model, objective=objective, batch=batch, hidden_RQD=hidden_RQD):
            objective(model, batch, 0.5, hidden_RQD).numerator.backward()

        def clear(model=model, hidden_RQD=hidden_RQD):
            model.zero_grad()
            hidden_RQD.grad = None

        # A turn takes seconds, and no other arm runs between turns: a few are enough.
        turns = interleave(
            {"loss": memory_and_time(Work(run, clear), device)}, min(3, config.bench_repeats), warm_up=0
        )["loss"]
        supervised = int((batch.weights_RNT > 0).sum())
        shape = {"sizes": sizes.name, "V": sizes.vocabulary, "D": sizes.hidden, "anchors": anchors, "slots": slots}
        rows.append(row_of({**shape, "labels": supervised, "chunk": objective.chunk}, turns))
    print_table(f"The loss ({heads_of(config)}), forward and backward: seconds, and memory above the parameters", rows)
    return rows


def step_part(config: RunConfig, dtype: torch.dtype, device: torch.device, base: StepSizes | None = None) -> list[dict]:
    """One step by anchors, draft vocabulary and length, each varied alone around the base."""
    base = base or StepSizes(anchors=config.anchors_per_row)
    variants = [base]
    variants += [replace(base, anchors=n) for n in (base.anchors // 2, 2 * base.anchors)]
    variants += [replace(base, length=n) for n in (base.length // 2, 2 * base.length)]
    variants += [replace(base, draft_vocabulary=n) for n in (base.draft_vocabulary // 2, base.vocabulary)]
    arms = {sizes: memory_and_time(step(config, sizes, dtype, device), device) for sizes in variants}
    measured = interleave(arms, config.bench_repeats)
    rows = [
        row_of({"anchors": s.anchors, "length": s.length, "draft V": s.draft_vocabulary, "rows": s.rows}, turns)
        for s, turns in measured.items()
    ]
    print_table(
        f"A training step ({config.num_draft_layers} layers, block {config.block_size}, {heads_of(config)}): seconds, "
        "and memory above weights and optimizer",
        rows,
    )
    return rows


def step(config: RunConfig, sizes: StepSizes, dtype: torch.dtype, device: torch.device) -> Work:
    """A drafter with its optimizer and one batch of stored features: each call is a step."""
    taps = config.num_taps or config.num_draft_layers
    target = random_target(sizes.vocabulary, sizes.hidden, taps + 1, dtype, device, sizes)
    draft_ids = None
    if sizes.draft_vocabulary < sizes.vocabulary:
        draft_ids = torch.arange(sizes.draft_vocabulary, device=device)
    spec = DrafterSpec(
        block_size=config.block_size,
        mask_token_id=config.mask_token_id or 0,
        target_layer_ids=tuple(range(taps)),
        num_target_layers=taps + 1,
        shift_label=config.shift_label,
        draft_vocab_size=None if draft_ids is None else len(draft_ids),
        **head_fields(config),
    )
    torch.manual_seed(config.seed)
    with torch.device(device):
        model = DFlashDraftModel(build_drafter_config(target.config, spec, config.num_draft_layers)).to(dtype)
    objective = Objective(target, draft_ids, config.loss_chunk, Terms.of(config))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    shape = (sizes.draft_vocabulary, sizes.rows, sizes.length, sizes.anchors, taps * sizes.hidden)
    batch = random_batch(spec, *shape, dtype, device, batch_gamma(config))
    add_final_states(batch, objective)

    def run() -> None:
        block_loss(model, model, objective, batch, 0.5).numerator.backward()
        optimizer.step()

    return Work(run, optimizer.zero_grad)


def random_target(
    vocabulary: int, hidden: int, layers: int, dtype: torch.dtype, device: torch.device, sizes: StepSizes | None = None
) -> Target:
    """Embedding table and LM head (tied) of the given sizes over layers that take no part in the loss."""
    heads = {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 64, "intermediate_size": 64}
    if sizes:
        heads = {
            "num_attention_heads": sizes.heads,
            "num_key_value_heads": sizes.key_value_heads,
            "intermediate_size": sizes.intermediate,
        }
    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=hidden, num_hidden_layers=layers, tie_word_embeddings=True, **heads
    )
    torch.manual_seed(0)
    return Target(AutoModelForCausalLM.from_config(config, dtype=dtype).to(device))


def random_batch(
    spec: DrafterSpec,
    tokens: int,
    rows: int,
    length: int,
    anchors: int,
    tap_width: int,
    dtype: torch.dtype,
    device: torch.device,
    gamma: float,
) -> Batch:
    """Rows of random tokens, all supervised, with equally spaced anchors that leave room for whole blocks.

    Args:
        tap_width: of the stored features; 0 for none.
        gamma: of the slot weights.
    """
    last = length - spec.num_proposals - 1
    if anchors > last:
        raise ValueError(f"{anchors} anchors do not fit in rows of {length} tokens")
    generator = torch.Generator().manual_seed(0)
    samples = [
        Sample(
            id=str(row),
            tokens_S=torch.randint(0, tokens, (length,), generator=generator),
            supervised_S=torch.ones(length, dtype=torch.bool),
            anchors_N=torch.linspace(1, last, anchors).long(),
            taps_SC=torch.randn(length, tap_width, generator=generator).to(dtype) if tap_width else None,
        )
        for row in range(rows)
    ]
    batch = collate(samples, spec.block_size, spec.num_proposals, spec.mask_token_id, gamma)
    moved = {name: value.to(device) for name, value in vars(batch).items() if isinstance(value, Tensor)}
    return replace(batch, **moved)


def add_final_states(batch: Batch, objective: Objective) -> None:
    """Random final hidden states of the target, where the loss asks for its distribution."""
    if objective.needs_teacher:
        target = objective.target
        sizes = (*batch.tokens_RS.shape, target.config.hidden_size)
        batch.final_RSD = torch.randn(sizes, dtype=target.dtype, device=target.device)


def heads_of(config: RunConfig) -> str:
    """The config's heads, in words."""
    return f"head {config.head}" + (" and confidence head" if config.enable_confidence_head else "")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
