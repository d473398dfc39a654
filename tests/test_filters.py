"""Filters keep what they should and count what they refuse, with right numbers."""

import random
from collections import Counter

import numpy as np
import pytest

from data import words
from data.contamination import Contamination
from data.conversations import prompt_of
from data.filters import Filters
from data.near_duplicates import NearDuplicates, bands_and_rows
from data.prompt import Prompt, Unusable
from data.words import Seen, gram_hashes, word_ids


def prompt(*turns, id=None, tools=None):
    return prompt_of({"turns": list(turns), "id": id, "tools": tools}, "file")


def judged(filters, prompts):
    """(ids that are kept, counts of the reasons for the others)."""
    kept, reasons = [], Counter()
    for one in prompts:
        try:
            kept.append(filters.keep(one)[0].id)
        except Unusable as error:
            reasons[error.reason] += 1
    return kept, dict(reasons)


def test_length_counts_the_characters_of_all_turns():
    prompts = [prompt("x" * n, id=n) for n in (3, 4, 9, 10)] + [prompt("xxxx", "yyyyy", id="two")]
    assert judged(Filters(4, 9), prompts) == (["4", "9", "two"], {"too short": 1, "too long": 1})
    assert judged(Filters(), prompts) == (["3", "4", "9", "10", "two"], {})
    messages = [{"role": "system", "content": "xxxxxx"}, {"role": "user", "content": "yyy"}]
    assert judged(Filters(10), [Prompt("s", [messages], "d")]) == (["s"], {})  # with the line between them


def test_languages_are_those_of_what_the_user_writes():
    texts = {
        "en": "Explain the theory of relativity to a child of ten in a few sentences.",
        "de": "Schreibe mir bitte ein kurzes Gedicht über den Herbst und den Nebel.",
        "fr": "Bonjour, comment allez-vous aujourd'hui, et que faites-vous demain?",
        "und": "x = 1",
    }
    prompts = [prompt(text, id=language) for language, text in texts.items()]
    assert judged(Filters(languages=("en", "de")), prompts) == (["en", "de"], {"another language": 2})
    assert judged(Filters(languages=("und", "fr")), prompts) == (["fr", "und"], {"another language": 2})
    assert [Filters(languages=tuple(texts)).keep(p)[1] for p in prompts] == list(texts)
    assert Filters().keep(prompts[0])[1] == ""
    german = [{"role": "system", "content": texts["de"]}, {"role": "user", "content": texts["en"]}]
    assert Filters(languages=("en",)).keep(Prompt("s", [german], "d"))[1] == "en"
    with pytest.raises(ValueError, match="languages: 'english' is unknown: choose from .*de .*zu .*und"):
        Filters(languages=("english",))


def test_exact_duplicates_differ_in_case_and_white_space_alone():
    same = [prompt("What is  NaN?", id=1), prompt("what is nan?\n", id=2), prompt("What is ＮaN?", id=3)]
    other = [
        prompt("What is NaN", id=4),
        prompt("What is NaN?", "Why?", id=5),
        prompt("What is NaN?", id=6, tools=[{"name": "f"}]),
        Prompt("7", [[{"role": "system", "content": "s"}, {"role": "user", "content": "What is NaN?"}]], "d"),
    ]
    assert judged(Filters(), same + other) == (["1", "4", "5", "6", "7"], {"a duplicate": 2})
    assert judged(Filters(duplicates=False), same + other)[0] == ["1", "2", "3", "4", "5", "6", "7"]


def test_recorded_calls_tell_prompts_apart():
    def calling(arguments):
        call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}
        return prompt_of({"messages": [{"role": "user", "content": "q"}, call, {"role": "tool", "content": "1"}]}, "d")

    kept, reasons = judged(Filters(), [calling("1"), calling("2"), calling("1")])
    assert (len(kept), reasons) == (2, {"a duplicate": 1})


def test_an_id_that_two_prompts_have_is_made_two():
    prompts = [
        prompt("one", id=0),
        prompt("two", id=0),
        prompt("one", id=0),
        prompt("two", id=0),
        prompt("three", id=0),
    ]
    for filters in (Filters(), Filters(duplicates=False)):
        kept, reasons = judged(filters, prompts)
        assert kept[0] == "0" and len(set(kept)) == 3 and all(key.startswith("0~") for key in kept[1:])
        assert reasons == {"a duplicate": 2}
    # The name depends on the prompt alone, not on how many came before it.
    assert judged(Filters(), [prompts[0], prompts[4]])[0][1] == kept[2]


def sentence(rng, count):
    return [f"w{rng.randrange(5000)}" for _ in range(count)]


def test_near_duplicates_are_found_and_others_are_not():
    rng = random.Random(0)
    originals = [sentence(rng, 120) for _ in range(100)]
    near = [[*text[:60], "changed", *text[61:]] for text in originals]  # 3 of 121 3-grams: similarity 0.95
    apart = [[word if n % 6 else f"x{rng.random()}" for n, word in enumerate(text)] for text in originals]  # 0.33
    filters = Filters(near=NearDuplicates(0.8))
    texts = {name: [prompt(" ".join(t), id=f"{name}{n}") for n, t in enumerate(group)] for name, group in
             (("o", originals), ("n", near), ("a", apart))}  # fmt: skip
    assert judged(filters, texts["o"]) == ([p.id for p in texts["o"]], {})
    assert judged(filters, texts["a"]) == ([p.id for p in texts["a"]], {})
    kept, reasons = judged(filters, texts["n"])
    assert reasons["a near duplicate"] >= 98 and len(kept) <= 2  # the curve's chance at 0.95 is 0.999


def test_the_s_curve_of_minhash_is_the_one_that_is_claimed():
    """Pairs of sets of known Jaccard similarity: the share that meets in a band is 1 - (1 - s^r)^b."""
    index = NearDuplicates(0.8)
    assert (index.bands, index.rows) == bands_and_rows(0.8) == (9, 13)
    rng, found = np.random.default_rng(1), {}
    for similarity in (0.7, 0.85):
        hits = 0
        for pair in range(100):
            size = 200
            common = round(2 * size * similarity / (1 + similarity))
            own = [f"{pair}c{n}" for n in rng.permutation(common)]
            # 1-grams, so that the sets are those of the words.
            first, second = (own + [f"{pair}{side}{n}" for n in range(size - common)] for side in "ab")
            keys = [set(index.keys_of(word_ids(words_))) for words_ in (first, second)]
            hits += bool(keys[0] & keys[1])
        found[similarity] = hits / 100
    for similarity, share in found.items():
        expected = 1 - (1 - similarity**13) ** 9
        assert abs(share - expected) < 4 * (expected * (1 - expected) / 100) ** 0.5 + 0.01, (
            similarity,
            share,
            expected,
        )


def test_texts_without_words_are_no_near_duplicates_of_each_other():
    filters = Filters(near=NearDuplicates(0.8))
    assert judged(filters, [prompt("???", id=1), prompt("!!!", id=2), prompt("? ? ?", id=3), prompt("hi", id=4)]) == (
        ["1", "2", "3", "4"],
        {},
    )
    assert judged(filters, [prompt("Hi!", id=5)]) == ([], {"a near duplicate": 1})


QUESTION = "A farmer has 17 sheep and all but 9 of them run away how many sheep are left on the farm today"


def benchmark(*texts):
    return [prompt(text) for text in texts]


def test_contamination_is_n_words_in_a_row():
    words_ = QUESTION.split()
    index = Contamination({"gsm": benchmark(QUESTION)})
    thirteen, twelve = " ".join(words_[4:17]), " ".join(words_[4:16])
    assert index.found_in([f"Please solve: {thirteen.upper()}!"]) == ["gsm"]
    assert index.found_in([f"Please solve: {twelve}."]) == []
    assert index.found_in([" ".join(words_[4:10]), " ".join(words_[10:17])]) == []  # not across turns
    assert Contamination({"gsm": benchmark(QUESTION)}, 12).found_in([twelve]) == ["gsm"]


def test_prompts_shorter_than_n_are_found_whole():
    index = Contamination({"short": benchmark("Write a poem about the moon and the sea.", "What is it?", "[1, 2]")})
    assert index.found_in(["Could you write a poem about the moon and the sea for me?"]) == ["short"]
    assert index.found_in(["Could you write a poem about the sea and the moon?"]) == []
    # Too short to say anything within a longer text.
    assert index.found_in(["What is it?"]) == ["short"] == index.found_in(["Hello", "what is IT"])
    assert index.found_in(["Tell me, what is it?"]) == index.found_in([""]) == index.found_in(["?"]) == []


def test_contamination_is_counted_by_benchmark():
    index = Contamination(
        {"one": benchmark(QUESTION, "Name the capital of France, and of Italy too"), "two": benchmark(QUESTION)}
    )
    filters = Filters(contamination=index)
    prompts = [
        prompt(QUESTION, id=1),
        prompt("Please name the capital of France and of Italy, too.", id=2),
        prompt("Hello there", id=3),
    ]
    assert judged(filters, prompts) == (["3"], {"asked by evaluation": 2})
    assert filters.contaminated == {"one": 2, "two": 1}


def test_the_form_around_the_tasks_of_a_benchmark_is_no_contamination():
    form = "Write a solution to the following problem and make sure that it passes all of the tests"
    tasks = [f"{form}: return the number {n} of the {n}th kind in a list of {n} kinds" for n in range(60)]
    index = Contamination({"code": benchmark(*tasks)})
    assert index.found_in([f"{form}: print the date"]) == []
    assert index.found_in(["How to return the number 7 of the 7th kind in a list of 7 kinds?"]) == ["code"]


def test_the_words_that_prompts_of_a_benchmark_begin_or_end_with_are_cut_off():
    """Maths sets for training end with the very words of the harnesses."""
    boxed = "Please reason step by step, and put your final answer within \\boxed{}."
    names = [f"name{n}" for n in range(100)]
    texts = [f"{name} buys {n} red apples, and eats {n // 2} of them at once. How many does she have? {boxed}"
             for n, name in enumerate(names)]  # fmt: skip
    index = Contamination({"gsm": benchmark(*texts)})
    assert index.found_in([f"Bob sells 3 green pears, and keeps 9 for us. How many does she have? {boxed}"]) == []
    assert index.found_in([f"A question: {texts[40].removesuffix(boxed)}"]) == ["gsm"]
    # What is left of a prompt that is mostly form is found whole, or alone where it is very short.
    form = "Write a solution to the following problem and make sure that it passes the tests"
    index = Contamination({"code": benchmark(*(f"{form}: {name} by {name}" for name in names))})
    assert index.found_in([f"{form}: name7 by name7"]) == index.found_in(["Name7 by name7!"]) == ["code"]
    assert index.found_in([f"{form}: print the date"]) == index.found_in(["First name7 by name7"]) == []
    index = Contamination(
        {"code": benchmark(*(f"{form}: {name} that {name} by {name} and the {name}" for name in names))}
    )
    assert index.found_in(["Now name7 that name7 by name7 and the name7, please"]) == ["code"]


def test_seen_is_a_set_across_its_parts():
    rng = random.Random(2)
    numbers, seen = [rng.getrandbits(64) for _ in range(500)], Seen(latest=64)
    for number in numbers + numbers[::3]:
        seen.add(number)
    assert all(number in seen for number in numbers) and seen.any_of([1, numbers[0]]) and not seen.any_of([1, 2])
    assert not any(rng.getrandbits(64) in seen for _ in range(500))
    seen.add(2**64 - 1)
    assert 2**64 - 1 in seen and 0 not in seen


def test_words_and_their_runs():
    assert words.words("Don't_STOP: 3.14, naïve ﬁn 日本語") == [
        "don", "t", "stop", "3", "14", "naïve", "fin", "日", "本", "語"
    ]  # fmt: skip
    ids = word_ids(["a", "b", "a", "b"])
    first, second, third = gram_hashes(ids, 2)
    assert first == third != second and not len(gram_hashes(ids, 5)) and len(gram_hashes(ids, 4)) == 1
    grown = list(words.growing_grams(ids, 9))
    assert [n for n, _ in grown] == [1, 2, 3, 4] and list(words.growing_grams(ids[:0], 9)) == []
    assert all((hashes == gram_hashes(ids, n)).all() and len(hashes) == 5 - n for n, hashes in grown)
    assert gram_hashes(word_ids(["a", "b"]), 2) != gram_hashes(word_ids(["b", "a"]), 2)
