"""Prompts that evaluation asks, found in other text: word n-grams that a text shares with a benchmark's prompts.

n = 13 words by default, the most that GPT-3 took (Brown et al. 2020, appendix C): shorter runs are common phrases. A
prompt of fewer words has no such run; it counts as found where the text holds it whole. Under SHORTEST words, GPT-3's
least, even that says little ("What is it?"): such a prompt is found only where a turn is nothing else. Words around the
task that many prompts of a benchmark share ("Please reason step by step, and put your final answer within ...") are no
task: what they begin or end with in common is cut off, and n-grams that many of them hold do not count.

Shapes: W words, G grams.
"""

from __future__ import annotations

import hashlib
import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from data.chat import turn_text
from data.prompt import Prompt
from data.words import gram_hashes, growing_grams, word_ids, words

WORDS = 13
SHORTEST = 8
_SHARED = 3, 0.05  # in more prompts than this, and than this share of all, words belong to the form
_LONGEST_FORM = 200  # words


class Contamination:
    """An index of benchmarks' prompts.

    Args:
        benchmarks: prompts by the name of their benchmark; at most 64 of them.
        n: words in a row that a text must share.
    """

    def __init__(self, benchmarks: Mapping[str, Sequence[Prompt]], n: int = WORDS):
        assert len(benchmarks) <= 64
        self.names, self.n = list(benchmarks), n
        self._whole: dict[bytes, int] = {}  # key of a very short prompt -> bits of the benchmarks that ask it
        found: dict[int, dict[int, int]] = {}  # length -> hash -> bits
        for number, prompts in enumerate(benchmarks.values()):
            self._add(1 << number, [turn_text(turn) for prompt in prompts for turn in prompt.turns], found)
        self._grams = {length: _arrays(hashes) for length, hashes in sorted(found.items())}

    def _add(self, bit: int, texts: list[str], found: dict[int, dict[int, int]]) -> None:
        texts = list(dict.fromkeys(texts))
        limit = max(_SHARED[0], _SHARED[1] * len(texts))
        counts: Counter[tuple[int, int]] = Counter()
        whole = [word_ids(words(text)) for text in texts]
        for prompt, ids in zip(whole, _tasks(whole, limit), strict=True):
            if len(ids) < min(SHORTEST, self.n):
                for key in {_key(prompt), _key(ids)} - {_key(ids[:0])}:
                    self._whole[key] = self._whole.get(key, 0) | bit
                continue
            length = min(self.n, len(ids))
            counts.update((length, int(gram)) for gram in np.unique(gram_hashes(ids, length)))
        for (length, gram), count in counts.items():
            if count <= limit:
                hashes = found.setdefault(length, {})
                hashes[gram] = hashes.get(gram, 0) | bit

    def found_in(self, texts: Iterable[str]) -> list[str]:
        """Names of the benchmarks that these texts hold prompts of."""
        bits = 0
        for text in texts:
            ids = word_ids(words(text))
            for length, grams_G in growing_grams(ids, max(self._grams, default=0)):
                if length in self._grams:
                    hashes, marks = self._grams[length]
                    place_G = hashes.searchsorted(grams_G)
                    hits_G = hashes.take(place_G, mode="clip") == grams_G
                    if hits_G.any():
                        bits |= int(np.bitwise_or.reduce(marks[place_G[hits_G]]))
            bits |= self._whole.get(_key(ids), 0)
        return [name for number, name in enumerate(self.names) if bits >> number & 1]


def name_apart(name: str, taken: Mapping[str, object]) -> str:
    """The name of a benchmark, with a number behind it where another one has that name: two files may share a stem."""
    numbered = (f"{name} ({number})" for number in itertools.count(2))
    return name if name not in taken else next(other for other in numbered if other not in taken)


def _key(ids_W: np.ndarray) -> bytes:
    return hashlib.blake2b(ids_W.tobytes(), digest_size=8).digest()


def _tasks(prompts: list[np.ndarray], limit: float) -> list[np.ndarray]:
    """Word ids [W] of each prompt without the words that more than `limit` of them begin or end with."""
    starts = _shared([ids.tolist() for ids in prompts], limit)
    rest = [ids[start:] for ids, start in zip(prompts, starts, strict=True)]
    ends = _shared([ids[::-1].tolist() for ids in rest], limit)
    return [ids[: len(ids) - end] for ids, end in zip(rest, ends, strict=True)]


def _shared(sequences: list[list[int]], limit: float) -> list[int]:
    """How many words at the beginning of each sequence more than `limit` of them have in common."""
    counts: Counter[int] = Counter()
    beginnings = []
    for sequence in sequences:
        beginnings.append([0])
        for word in sequence[:_LONGEST_FORM]:
            beginnings[-1].append(hash((beginnings[-1][-1], word)))
        counts.update(beginnings[-1][1:])
    return [sum(counts[key] > limit for key in keys[1:]) for keys in beginnings]


def _arrays(hashes: dict[int, int]) -> tuple[np.ndarray, np.ndarray]:
    keys = np.array(list(hashes), dtype=np.uint64)
    order = np.argsort(keys)
    return keys[order], np.array(list(hashes.values()), dtype=np.uint64)[order]
