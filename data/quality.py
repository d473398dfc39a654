"""What the answers of a run are like: lengths, ends, labels, repetition, evaluation prompts among them, and their mix.

`measure` reads the rows once, one at a time. It keeps counts, 8 bytes a row for exact duplicates, and samples chosen by
the hash of a row's id, so that the order of the rows does not matter; near duplicates are sought among the first rows.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from data.answers import AnswerRow
from data.contamination import Contamination
from data.near_duplicates import NearDuplicates
from data.records import Record
from data.words import Seen, hash_of, normalised

PERCENTILES = (1, 5, 25, 50, 75, 95, 99)
# Shares of labels under this mean that somebody else wrote the answers (TRAPS 31).
LOW_AGREEMENT = 0.8
_BINS = 32  # of a histogram, about
NEAR_ROWS = 20_000  # comparing costs about a millisecond a text
LANGUAGE_ROWS = 5_000  # a classification costs about as much


class Lengths:
    """Numbers of tokens, kept as how often each occurs."""

    def __init__(self):
        self.counts: Counter[int] = Counter()

    def add(self, length: int) -> None:
        self.counts[length] += 1

    def summary(self) -> dict:
        """mean, min, max, percentiles, and a histogram whose last bin is open: {"from", "to", "rows"}."""
        lengths, rows = sorted(self.counts), sum(self.counts.values())
        return {
            "tokens": sum(length * count for length, count in self.counts.items()),
            "mean": sum(length * count for length, count in self.counts.items()) / rows,
            "min": lengths[0],
            "max": lengths[-1],
            "percentiles": {str(p): self.percentile(p) for p in PERCENTILES},
            "histogram": self.histogram(),
        }

    def percentile(self, share: float) -> int:
        """The smallest length that at least `share` percent of the rows do not exceed."""
        rows, seen = sum(self.counts.values()), 0
        for length in sorted(self.counts):
            seen += self.counts[length]
            if 100 * seen >= share * rows:
                return length
        raise AssertionError("no rows")

    def histogram(self) -> list[dict]:
        """Bins of one round width up to the 99th percentile; the last one holds all that is longer."""
        top = self.percentile(99)
        width = next(w * 10**e for e in range(12) for w in (1, 2, 5) if top < w * 10**e * _BINS)
        bins: Counter[int] = Counter()
        last = top // width + 1
        for length, count in self.counts.items():
            bins[min(length // width, last)] += count
        return [
            {"from": n * width, "to": None if n == last else (n + 1) * width, "rows": bins[n]}
            for n in range(last + 1)
            if n < last or bins[last]
        ]


class Duplicates:
    """Texts that came before: the same but for case and white space, or with nearly the same words."""

    def __init__(self, threshold: float, near_rows: int = NEAR_ROWS):
        self.texts = self.exact = self.near = self.compared = 0
        self.threshold, self._near_rows = threshold, near_rows
        self._seen, self._near = Seen(), NearDuplicates(threshold)

    def add(self, text: str) -> None:
        self.texts += 1
        key = hash_of(normalised(text))
        again = key in self._seen
        if again:
            self.exact += 1
        else:
            self._seen.add(key)
        if self.texts > self._near_rows:
            return
        self.compared += 1
        if not again:  # one text is not counted as both
            keys = self._near.keys(text)
            self.near += self._near.has(keys)
            self._near.add(keys)

    def summary(self) -> dict:
        return {
            "texts": self.texts,
            "exact": self.exact,
            "near": self.near,
            "near_compared": self.compared,
            "near_threshold": self.threshold,
        }


@dataclass
class Measures:
    """What is counted while the rows go by. Attributes: sampled: hashes and rows of the sample for `agreement`."""

    limit: int
    wanted: int
    near: float
    contamination: Contamination | None
    prompt: Lengths = field(default_factory=Lengths)
    answer: Lengths = field(default_factory=Lengths)
    rows: int = 0
    supervised: int = 0
    conversations: int = 0
    inexact: int = 0
    empty: int = 0
    contaminated: int = 0
    stops: dict[str, Counter] = field(default_factory=dict)
    domain_tokens: Counter = field(default_factory=Counter)
    sources: Counter = field(default_factory=Counter)
    languages: Counter = field(default_factory=Counter)
    benchmarks: Counter = field(default_factory=Counter)
    sampled: list[tuple[int, str, AnswerRow]] = field(default_factory=list)

    def __post_init__(self):
        self.prompts, self.answers = Duplicates(self.near), Duplicates(self.near)

    def add(self, record: Record) -> None:
        row, (prompt, answer) = record.row, (len(record.row.prompt_ids), len(record.row.answer_ids))
        self.rows += 1
        self.prompt.add(prompt)
        self.answer.add(answer)
        self.supervised += max(0, min(prompt + answer, self.limit) - prompt)
        self.inexact += not row.exact
        self.empty += not record.answer.strip()
        self.stops.setdefault(row.domain, Counter())[row.stop] += 1
        self.domain_tokens[row.domain] += answer
        self.sources[record.source] += 1
        self.answers.add(record.answer)
        if record.opens:
            self.conversations += 1
            self.prompts.add(record.question)
        if self.contamination is not None and (names := self.contamination.found_in([record.question])):
            self.contaminated += 1
            self.benchmarks.update(names)
        if self.wanted:
            # The smallest hashes: the same rows whatever the order. The id, so that rows are never compared.
            keep = heapq.heappushpop if len(self.sampled) >= self.wanted else heapq.heappush
            keep(self.sampled, (-hash_of(row.id), row.id, row))


def measure(
    records: Iterable[Record],
    total: int,
    limit: int,
    near: float = 0.8,
    contamination: Contamination | None = None,
    identify: Callable[[str], str] | None = None,
    agreement_rows: int = 0,
    agreement: Callable[[Sequence[AnswerRow]], dict] | None = None,
) -> dict:
    """The report of all rows, as plain JSON values.

    Args:
        total: how many rows there are.
        limit: training cuts rows here (tokens).
        near: Jaccard similarity of word 3-grams from which texts count as near duplicates.
        contamination: index of evaluation prompts, or None.
        identify: text -> language, for rows whose preparation told none; None leaves them unknown.
        agreement_rows: how many rows `agreement` gets.
        agreement: compares rows with the target; None leaves it out.

    Raises ValueError without any row.
    """
    measures = Measures(limit, agreement_rows if agreement else 0, near, contamination)
    share, told = min(1.0, LANGUAGE_ROWS / max(1, total)), 0
    for record in records:
        measures.add(record)
        if record.language:
            measures.languages[record.language] += 1
        elif identify is not None and hash_of(record.row.id) < share * 2**64:
            measures.languages[identify(record.question)] += 1
            told += 1
    if not measures.rows:
        raise ValueError("there is no answer to report on")
    report = _summary(measures)
    report["language_sample"] = told or None
    rows = [row for _, _, row in sorted(measures.sampled, key=lambda sample: (-sample[0], sample[1]))]
    report["agreement"] = agreement(rows) if agreement and rows else None
    return report


def _summary(m: Measures) -> dict:
    stops = sum(m.stops.values(), Counter())
    found = None
    if m.contamination is not None:
        found = {"rows": m.contaminated, "benchmarks": {name: m.benchmarks[name] for name in m.contamination.names}}
    domains = {
        domain: {"rows": counts.total(), "answer_tokens": m.domain_tokens[domain], "stops": _ordered(counts)}
        for domain, counts in sorted(m.stops.items(), key=lambda item: (-item[1].total(), item[0]))
    }
    return {
        "rows": m.rows,
        "conversations": m.conversations,
        "supervised_tokens": m.supervised,
        "max_row_length": m.limit,
        "prompt_tokens": m.prompt.summary(),
        "answer_tokens": m.answer.summary(),
        "stops": _ordered(stops),
        "tokenised_again": m.inexact,
        "empty_answers": m.empty,
        "duplicates": {"prompts": m.prompts.summary(), "answers": m.answers.summary()},
        "contamination": found,
        "domains": domains,
        "sources": _ordered(m.sources),
        "languages": _ordered(m.languages),
    }


def _ordered(counts: Counter) -> dict:
    """The most frequent first, equal ones by name."""
    return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))


def target_agreement(config, path: str, rows: Sequence[AnswerRow], limit: int = 4096) -> dict:
    """How many answer tokens of the rows are the target's own argmax: {"rows", "labels", "equal"}.

    Answers sampled at a temperature agree less, since they were drawn; a target in bf16 may differ at near ties.

    Args:
        limit: rows are cut here (tokens).
    """
    import torch  # loading the target is what costs

    from data.environment import choose_device
    from data.feature_cache import capture
    from models.placement import placement
    from models.target import choose_dtype, load_target

    device = choose_device(config.device)
    dtype, placed = choose_dtype(config.dtype, device), placement(config.device_map)
    target = load_target(path, dtype, device, config.trust_remote_code, config.quantization, placed)
    labels = equal = 0
    with torch.inference_mode():
        for row in rows:
            tokens_S = torch.tensor(row.prompt_ids + row.answer_ids)[:limit]
            start = len(row.prompt_ids)
            if len(tokens_S) <= start:
                continue
            final_RSD = capture(target, tokens_S[None].to(target.device), (0,), with_final=True)[1]
            best_S = target.logits(final_RSD[0, start - 1 : -1]).argmax(-1).cpu()
            labels += len(best_S)
            equal += int((best_S == tokens_S[start:]).sum())
    return {"rows": len(rows), "labels": labels, "equal": equal}
