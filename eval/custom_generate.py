"""Tree decoding for people who do not have this project: `custom_generate/generate.py` of an export.

    target.generate(**inputs, assistant_model=drafter, custom_generate=DIR, trust_remote_code=True)

transformers prepares inputs, limits, processors and streamer as for its own loop; the tokens come from the round loop,
with the drafter's trees. Greedy output is the target's own; samples follow the target's distribution after temperature,
top-k, top-p and the like. `eval.standalone` writes this file and the modules that it imports into the export.

Shape suffixes: R requests, S prompt length, M tokens of a forward, V vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.generation import (
    EosTokenCriteria,
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    GenerateDecoderOnlyOutput,
    InfNanRemoveLogitsProcessor,
    LogitNormalization,
    LogitsProcessorList,
    MaxLengthCriteria,
    MinPLogitsWarper,
    StoppingCriteriaList,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from eval.decoding.loop import Batch
from eval.decoding.policy import TreeOptions
from eval.decoding.proposals import make_proposer
from eval.decoding.request import Request
from models.bundle import Drafter
from models.target import Target

# These look at one distribution at a time, so that each node of a tree can be given its own. Others, such as a
# repetition penalty, look at the text before it.
_WITHOUT_HISTORY = (
    TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper, MinPLogitsWarper, TypicalLogitsWarper,
    EpsilonLogitsWarper, EtaLogitsWarper, SuppressTokensLogitsProcessor, LogitNormalization,
    InfNanRemoveLogitsProcessor,
)  # fmt: skip
# Keywords of the target's forward that say nothing beyond input_ids, or that we read.
_UNDERSTOOD = (
    "attention_mask", "position_ids", "cache_position", "cache", "past_key_values", "use_cache", "logits_to_keep",
)  # fmt: skip


def generate(
    model: PreTrainedModel,
    assistant_model: PreTrainedModel | None = None,
    streamer=None,
    method: str = "dartree_pruned",
    budget: int = 64,
    width: int = 12,
    candidates: int = 64,
    beta: float = -0.2,
    **kwargs,
):
    """`model.generate` with tree decoding. Returns what it returns: tokens, or a GenerateDecoderOnlyOutput.

    Args:
        model: the target.
        assistant_model: the drafter of this folder, from `AutoModel.from_pretrained(DIR, trust_remote_code=True)`.
        method: dartree_pruned, dartree_fixed, ddtree, per_node_serial, dflash_chain, or the chain of the head.
        budget, width, candidates, beta: knobs of the trees, see `TreeOptions`.
        kwargs: the arguments of `generate`.

    Raises ValueError without a drafter, and for an argument that trees cannot honour.
    """
    _check_pair(model, assistant_model)
    options = TreeOptions(budget, width, candidates, beta)
    decode = partial(_decode, drafter=assistant_model, output=streamer, method=method, options=options)
    return GenerationMixin.generate(model, custom_generate=decode, streamer=streamer, **kwargs)


def _check_pair(model: PreTrainedModel, drafter) -> None:
    """Raises ValueError when there is no drafter, or one of another target, precision or device."""
    if drafter is None:
        raise ValueError("give assistant_model=AutoModel.from_pretrained(DIR, trust_remote_code=True), the drafter")
    if getattr(drafter, "prediction_slots", None) is None:
        raise ValueError(f"assistant_model is a {type(drafter).__name__}, not a drafter of this format")
    sizes = model.config.get_text_config()
    layers = drafter.spec.num_target_layers or sizes.num_hidden_layers
    meant, own = (layers, drafter.config.hidden_size), (sizes.num_hidden_layers, sizes.hidden_size)
    if meant != own:
        raise ValueError(f"assistant_model is for a target with (layers, hidden size) {meant}, this one has {own}")
    for what in ("dtype", "device"):
        own, needed = getattr(drafter, what), getattr(model, what)
        if own != needed:
            raise ValueError(
                f"assistant_model has {what} {own}, the target {needed}: assistant_model.to({what}=target.{what})"
            )


def _decode(
    model: PreTrainedModel,
    input_ids: Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config,
    drafter: PreTrainedModel,
    output,
    method: str,
    options: TreeOptions,
    **model_kwargs,
):
    """The loop in the place of transformers' own: prepared arguments in, sequences [R, S + new] out."""
    _refuse(generation_config, logits_processor, stopping_criteria, model_kwargs)
    ends = [criterion.eos_token_id for criterion in stopping_criteria if isinstance(criterion, EosTokenCriteria)]
    eos = tuple(token for ids in ends for token in ids.tolist())
    plain, warped = Target(model, freeze=False), WarpedTarget(model, logits_processor)
    plain.eos_ids = warped.eos_ids = eos
    proposer = make_proposer(plain, with_draft_vocabulary(drafter, plain.vocab_size), method, options)
    mask = model_kwargs.get("attention_mask")
    room = generation_config.max_length - input_ids.shape[1]
    seeds = torch.randint(2**62, (len(input_ids),)).tolist()  # torch.manual_seed governs samples, as usual
    requests = [
        Request((row if mask is None else row[mask[r].bool()]).tolist(), room, seeds[r])
        for r, row in enumerate(input_ids)
    ]
    training = model.training, drafter.training
    model.eval(), drafter.eval()
    try:
        with torch.inference_mode():
            sample = 1.0 if generation_config.do_sample else 0.0
            batch = StreamedBatch(warped, proposer, requests, sample, max_cache_gb=1e6)
            batch.output = output
            while batch.admit():
                batch.round()
    finally:
        model.train(training[0])
        drafter.train(training[1])
    if output is not None:
        output.end()
    return _sequences(input_ids, [answer.tokens for answer in batch.answers], generation_config)


def _refuse(generation_config, processors, criteria, model_kwargs: dict) -> None:
    """Raises ValueError naming what was asked for and cannot be honoured."""
    if generation_config.num_beams > 1:
        raise ValueError(f"custom_generate decodes without beams, got num_beams {generation_config.num_beams}")
    wanted = [name for name in ("output_scores", "output_logits", "output_attentions", "output_hidden_states")
              if getattr(generation_config, name, False)]  # fmt: skip
    wanted += [name for name, value in model_kwargs.items() if name not in _UNDERSTOOD and _is_an_input(name, value)]
    names = [type(p).__name__ for p in processors if not isinstance(p, _WITHOUT_HISTORY)]
    names += [type(c).__name__ for c in criteria if not isinstance(c, (MaxLengthCriteria, EosTokenCriteria))]
    if names + wanted:
        raise ValueError(f"custom_generate does not support {', '.join(names + wanted)}")


def _is_an_input(name: str, value) -> bool:
    """Whether a keyword carries tensors, alone or in a list or dictionary: the target would read them, and we do not.

    Token types that are all 0 are what a model takes without any.
    """
    if isinstance(value, Tensor):
        return name != "token_type_ids" or bool(value.any())
    parts = value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else ()
    return any(_is_an_input(name, part) for part in parts)


def _sequences(input_ids: Tensor, answers: list[list[int]], generation_config):
    """Prompts and answers, padded on the right as transformers does."""
    longest = max(map(len, answers))
    pad = generation_config.pad_token_id
    pad = 0 if pad is None else pad
    tokens = torch.tensor([row + [pad] * (longest - len(row)) for row in answers], device=input_ids.device)
    sequences = torch.cat([input_ids, tokens.to(input_ids.dtype)], dim=1)
    return GenerateDecoderOnlyOutput(sequences) if generation_config.return_dict_in_generate else sequences


class WarpedTarget(Target):
    """A target whose logits have gone through transformers' processors: what is verified against."""

    def __init__(self, model: PreTrainedModel, processors: LogitsProcessorList):
        super().__init__(model, freeze=False)
        self.processors = processors

    def logits(self, hidden: Tensor, ids: Tensor | None = None) -> Tensor:
        logits = super().logits(hidden, ids)
        if not self.processors:
            return logits
        flat = logits.reshape(-1, logits.shape[-1]).float()
        return self.processors(flat.new_zeros(len(flat), 1, dtype=torch.long), flat).view(logits.shape)


class StreamedBatch(Batch):
    """Hands tokens to a streamer as they are emitted."""

    output = None

    def _emit(self, i: int, tokens: list[int]) -> int:
        count = super()._emit(i, tokens)
        if self.output is not None:
            for token in tokens[:count]:
                self.output.put(torch.tensor([token]))
        return count


def with_draft_vocabulary(model: PreTrainedModel, vocab_size: int) -> Drafter:
    """The drafter limited to the target's tokens that its head was trained on, those with a row in its projection.

    An export keeps one row a token of the full vocabulary, zeros where the draft vocabulary has none; the tables of
    drafter and target may be padded differently. The caller's module is left as it is: model and head are shallow
    copies with another output projection.
    """
    if model.head is None:
        return Drafter(model)
    rows_VE = model.head.rows()
    ids = rows_VE.any(dim=1).nonzero().flatten()
    # A head that was never trained has no rows at all; it corrects nothing, and proposes everything.
    ids = ids if len(ids) else torch.arange(len(rows_VE), device=rows_VE.device)
    ids = ids[ids < vocab_size]
    if len(ids) == len(rows_VE) == vocab_size:
        return Drafter(model)
    model = _shallow(model)
    head = _shallow(model.head)
    _replace_output(head, rows_VE[ids])
    object.__setattr__(model, "head", head)  # as the drafter itself holds it, beside its modules
    model.spec = replace(model.spec, draft_vocab_size=len(ids))
    return Drafter(model, ids)


def _shallow(module: nn.Module) -> nn.Module:
    twin = copy.copy(module)
    twin._modules = dict(module._modules)
    return twin


def _replace_output(head: nn.Module, rows_VE: Tensor) -> None:
    """Puts a linear layer of these rows in the place of the head's output projection."""
    output = nn.Linear(rows_VE.shape[1], rows_VE.shape[0], bias=False, device="meta")
    output.weight = nn.Parameter(rows_VE, requires_grad=False)
    parent, (*path, name) = head, type(head).output_name.removesuffix(".weight").split(".")
    for part in path:
        parent._modules[part] = _shallow(parent._modules[part])
        parent = parent._modules[part]
    parent._modules[name] = output
