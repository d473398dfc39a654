"""How often the labels are what the target itself would write (TRAPS 31).

Shape suffixes: R rows, S tokens, D hidden.
"""

from __future__ import annotations

from torch.nn.utils.rnn import pad_sequence

from data.feature_cache import capture
from models.target import Target
from training.rows import TrainingSet


def label_agreement(target: Target, data: TrainingSet, rows: int = 4, start: int = 0) -> float:
    """Share of answer tokens of a few rows, spread over the data, that are the target's own argmax: text that the
    target did not write trains a drafter for another model. Read from stored final states, else from one forward of
    these rows.

    Args:
        start: shifts the choice of rows.
    """
    documents = data.documents
    rows = min(rows, len(documents))
    samples = [documents[(start + i * len(documents) // rows) % len(documents)] for i in range(rows)]
    finals = [sample.final_SD for sample in samples]
    if any(final_SD is None for final_SD in finals):
        tokens_RS = pad_sequence([sample.tokens_S for sample in samples], batch_first=True)
        finals = capture(target, tokens_RS.to(target.device), (0,), with_final=True)[1]
    hits, total = 0, 0
    for sample, final_SD in zip(samples, finals, strict=True):
        before_SD = final_SD[: len(sample.tokens_S) - 1].to(target.device, target.dtype)
        agree = target.logits(before_SD).argmax(-1).cpu() == sample.tokens_S[1:]
        hits += int(agree[sample.supervised_S[1:]].sum())
        total += int(sample.supervised_S[1:].sum())
    return hits / max(1, total)
