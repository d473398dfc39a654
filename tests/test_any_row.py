"""Rows of any shape at all: each becomes a prompt that can be asked, or is skipped with a reason; none is an error."""

import json

from hypothesis import given, settings
from hypothesis import strategies as st

from data.chat import messages_of
from data.conversations import CONVERSATIONS, PROMPTS, prompt_of
from data.filters import Filters
from data.messages import ROLES
from data.prompt import Unusable
from data.prompt_store import Prepared, Writer
from data.prompts import Reading
from data.sources import Source

TEXT = st.text(max_size=6) | st.sampled_from(["q", " ", "", "\ud800", "[]", '[{"role": "user", "content": "q"}]'])
ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)
MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from([*ROLES, "critic", None, "User "]), "content": TEXT | ANY},
    optional={
        "tool_calls": ANY | st.just([{"function": {"name": "f", "arguments": {}}}]),
        "tool_call_id": ANY,
        "function_call": ANY,
        "name": ANY,
    },
)
WORDS = st.sampled_from(["q", "two words", "naïve 日本", " Q", "q\n"])
CALLED = [{"function": {"name": "f", "arguments": '{"a": 1}'}}]


def says(role, **more):
    return st.fixed_dictionaries({"role": st.just(role), "content": WORDS, **more})


# Mostly in the order in which people, models and tools speak.
PART = st.one_of(
    st.tuples(says("user"), says("assistant")),
    st.tuples(says("user")),
    st.tuples(says("user"), says("assistant", tool_calls=st.just(CALLED)), says("tool")),
    st.tuples(says("assistant", tool_calls=st.just(CALLED)), says("tool"), says("assistant")),
    st.tuples(says("assistant")),
    st.tuples(says("system")),
)
DIALOGUE = st.lists(PART, min_size=1, max_size=4).map(lambda parts: [message for part in parts for message in part])
SHARED = st.fixed_dictionaries({"from": st.sampled_from([*ROLES]), "value": TEXT})
CONVERSATION = st.lists(MESSAGE, max_size=6) | st.lists(SHARED, max_size=4) | st.lists(TEXT, max_size=3) | ANY
LIKELY = st.fixed_dictionaries(
    {"messages": DIALOGUE | st.lists(WORDS, min_size=1, max_size=4)},
    optional={
        "id": st.integers(0, 2),
        "tools": st.just([{"name": "f"}]) | ANY,
        "system": WORDS | ANY,
        "response": WORDS,
    },
)
ROW = st.dictionaries(st.sampled_from([*CONVERSATIONS, *PROMPTS]), CONVERSATION, max_size=3).flatmap(
    lambda columns: st.fixed_dictionaries(
        {name: st.just(value) for name, value in columns.items()},
        optional={name: ANY for name in ("id", "domain", "tools", "system", "answer", "output")},
    )
)


@settings(max_examples=200, deadline=None)
@given(LIKELY | ROW | ANY)
def test_a_row_is_a_prompt_that_can_be_asked_or_has_a_reason(row):
    try:
        prompt = prompt_of(row, "file")
    except Unusable as error:
        assert error.reason
        return
    assert prompt.id and isinstance(prompt.id, str) and isinstance(prompt.domain, str) and prompt.turns
    answers = prompt.answers or []
    assert len(answers) <= len(prompt.turns) and all(answer.strip() for answer in answers)
    json.dumps([prompt.turns, prompt.tools, answers, prompt.id], ensure_ascii=False, allow_nan=False).encode()
    messages = messages_of(prompt.turns, ["a"] * (len(prompt.turns) - 1))
    roles = [message["role"] for message in messages]
    assert set(roles) <= {"system", "user", "assistant", "tool"} and roles[-1] in ("user", "tool") and "user" in roles
    for message, before in zip(messages, [None, *messages], strict=False):
        assert isinstance(message["content"], str) and (
            message["content"].strip() or message["role"] in ("tool", "assistant")
        )
        if message["role"] == "tool":
            assert before["role"] == "tool" or before["role"] == "assistant" and before["tool_calls"]
        if before is not None and "tool_calls" in before:
            assert message["role"] == "tool"


@settings(max_examples=40, deadline=None)
@given(st.lists(LIKELY | ROW | ANY, max_size=12), st.booleans())
def test_nothing_is_lost_between_the_rows_and_the_store(tmp_path_factory, rows, duplicates):
    skipped, folder = [], tmp_path_factory.mktemp("store")
    source = Source("mine", "mine", lambda: ((f"row {n}", row) for n, row in enumerate(rows)))
    reading = Reading([source], filters=Filters(duplicates=duplicates), on_skip=skipped.append)
    writer = Writer(str(folder / "prompts.arrow"))
    kept = []
    try:
        for one in reading:
            writer.add(one)
            kept.append(one.prompt)
    except ValueError as error:  # not a single row has a known column
        assert "--messages_column" in str(error)
        return
    counts = {"read": reading.read, "kept": reading.kept, "skipped": dict(reading.skipped)}
    assert reading.read == len(rows) == reading.kept + len(skipped) == len(kept) + reading.skipped.total()
    assert len({prompt.id for prompt in kept}) == len(kept)
    writer.close()
    manifest = {"turns": writer.turns, "counts": counts, "fingerprint": "f"}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    store = Prepared(str(folder))
    assert list(store) == kept == [store[n] for n in range(len(store))]
    assert store.turns == store.turn_counts.sum() == sum(len(prompt.turns) for prompt in kept)
