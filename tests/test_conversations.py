"""Rows of every known form (all made up) become the right turns; the others are skipped, each for its reason."""

import json

import pytest

from data.chat import messages_of
from data.conversations import Columns, prompt_of
from data.prompt import Prompt, Unusable


def read(row, **columns):
    return prompt_of(row, "file", Columns(**columns))


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


def system(text):
    return {"role": "system", "content": text}


SHAREGPT = [{"from": "human", "value": "q1"}, {"from": "gpt", "value": "a1"}, {"from": "human", "value": "q2"}]
CASES = {
    "turns": ({"turns": ["q1", "q2"]}, ["q1", "q2"], None),
    "turns of messages": ({"turns": [user("q"), assistant("a")]}, ["q"], ["a"]),
    "messages": ({"messages": [user("q1"), assistant("a1"), user("q2"), assistant("a2")]}, ["q1", "q2"], ["a1", "a2"]),
    "messages with a system prompt": (
        {"messages": [system("Be brief."), user("q"), assistant("a")]},
        [[system("Be brief."), user("q")]],
        ["a"],
    ),
    "messages as JSON": ({"messages": json.dumps([user("q"), assistant("a")])}, ["q"], ["a"]),
    "messages as strings": ({"messages": ["q1", "a1", "q2"]}, ["q1", "q2"], ["a1"]),
    "ShareGPT": (
        {"id": "x_0", "conversations": [*SHAREGPT, {"from": "gpt", "value": "a2"}]},
        ["q1", "q2"],
        ["a1", "a2"],
    ),
    "ShareGPT, last turn open": ({"conversations": SHAREGPT}, ["q1", "q2"], ["a1"]),
    "open-perfectblend": (
        {"conversations": SHAREGPT[:2], "source": "meta-math/MetaMathQA"},
        ["q1"],
        ["a1"],
    ),
    "LMSYS": ({"conversation": [user("q"), assistant("a")], "model": "m", "turn": 1}, ["q"], ["a"]),
    "UltraChat 200k": (
        {"prompt": "q1", "prompt_id": "f0", "messages": [user("q1"), assistant("a1"), user("q2"), assistant("a2")]},
        ["q1", "q2"],
        ["a1", "a2"],
    ),
    "UltraChat": ({"id": "0", "data": ["q1", "a1", "q2", "a2"]}, ["q1", "q2"], ["a1", "a2"]),
    "Nemotron, input of messages": (
        {"input": [user("q1"), assistant("a1"), user("q2")], "output": "a2", "category": "math", "system_prompt": ""},
        ["q1", "q2"],
        ["a1", "a2"],
    ),
    "Nemotron, messages": (
        {"uuid": "u", "messages": [user("q"), assistant("a")], "metadata": "{}", "reasoning": "on"},
        ["q"],
        ["a"],
    ),
    "prompt and response": ({"prompt": "q", "response": "a"}, ["q"], ["a"]),
    "prompt of messages (TRL)": ({"prompt": [user("q")], "chosen": [assistant("a")]}, ["q"], None),
    "prompts (MT-bench)": ({"prompt": ["q1", "q2"], "category": "writing"}, ["q1", "q2"], None),
    "question and answer": ({"question": "q", "answer": "a"}, ["q"], ["a"]),
    "query": ({"query": "q", "answers": "[]"}, ["q"], None),
    "problem and solution": ({"problem": "q", "solution": "a"}, ["q"], ["a"]),
    "Alpaca": ({"instruction": "Sum up.", "input": "1 2", "output": "3"}, ["Sum up.\n\nInput:\n1 2"], ["3"]),
    "Alpaca without input": ({"instruction": "Sing.", "input": "", "output": "La."}, ["Sing."], ["La."]),
    "system column": ({"system": "Be brief.", "prompt": "q"}, [[system("Be brief."), user("q")]], None),
    "system column beside a system message": (
        {"system": "Ignored.", "messages": [system("Be brief."), user("q")]},
        [[system("Be brief."), user("q")]],
        None,
    ),
    "text": ({"text": "Once upon a time"}, ["Once upon a time"], None),
    "null columns of other forms": ({"messages": None, "prompt": "q", "response": None}, ["q"], None),
    "parts of text": (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]}]},
        ["one\ntwo"],
        None,
    ),
    "other names of roles": (
        {"messages": [{"role": r, "content": c} for r, c in {"Human": "q", "model": "a", "prompter": "r"}.items()]},
        ["q", "r"],
        ["a"],
    ),
    "developer": ({"messages": [{"role": "developer", "content": "s"}, user("q")]}, [[system("s"), user("q")]], None),
    "two users' messages in a row": (
        {"messages": [user("q1"), user("q2"), assistant("a")]},
        [[user("q1"), user("q2")]],
        ["a"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_rows_of_known_forms_become_the_right_turns(name):
    row, turns, answers = CASES[name]
    prompt = read(row)
    assert (prompt.turns, prompt.answers) == (turns, answers)


def test_ids_and_domains():
    assert read({"turns": ["q"], "id": 7, "domain": "talk"}).id == "7"
    assert read({"turns": ["q"], "domain": "talk"}).domain == "talk"
    assert read({"turns": ["q"], "category": "math"}).domain == "math"
    assert read({"turns": ["q"]}).domain == read({"turns": ["q"], "domain": 3}).domain == "file"
    assert read({"turns": ["q"], "category": "math", "source": "set"}, domain="source").domain == "set"
    hashed = read({"turns": ["q"]}).id
    assert len(hashed) == 16 and read({"turns": ["q"], "id": " "}).id == read({"turns": ["q"], "id": True}).id == hashed
    assert read({"turns": ["q"], "tools": [{"name": "f"}]}).id != hashed
    # This would be the row id of the second turn of a prompt named 7.
    assert read({"turns": ["q"], "id": "7.turn2"}).id == f"7.turn2~{hashed[:8]}"


CALLS = [{"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1,  "b": null}'}}]
TOOL = {"role": "tool", "content": "3", "tool_call_id": "c1"}
CALLING = {"role": "assistant", "content": "", "tool_calls": CALLS}
FUNCTION = {
    "name": "add",
    "description": "adds",
    "parameters": {"type": "object", "properties": {"a": {"default": None}}},
}


def test_recorded_tool_calls_stay_in_the_turn_and_come_back_as_they_were():
    messages = [
        system("Use tools."),
        user("1+2?"),
        {**CALLING, "content": None},
        TOOL,
        assistant("3."),
        user("Thanks."),
    ]
    prompt = read({"messages": messages, "tools": [{"type": "function", "function": FUNCTION}]})
    assert prompt.turns == [[system("Use tools."), user("1+2?"), CALLING, TOOL], "Thanks."]
    assert prompt.answers == ["3."] and prompt.tools == [{"type": "function", "function": FUNCTION}]
    assert messages_of(prompt.turns, ["3."]) == [
        system("Use tools."), user("1+2?"), CALLING, TOOL, assistant("3."), user("Thanks.")
    ]  # fmt: skip


def test_a_turn_that_ends_in_a_tools_result_is_asked_and_calls_at_the_end_are_the_targets_to_write():
    asked = [user("1+2?"), CALLING, TOOL]
    assert read({"messages": asked}).turns == [asked]
    assert read({"messages": [*asked, CALLING]}).turns == [asked]
    assert read({"messages": [user("1+2?"), CALLING]}).turns == ["1+2?"]
    several = [user("q"), CALLING, TOOL, {**TOOL, "content": "4"}, CALLING, TOOL, assistant("a")]
    assert (read({"messages": several}).turns, read({"messages": several}).answers) == ([several[:-1]], ["a"])


def test_older_forms_of_tool_calls():
    call = {"name": "add", "arguments": {"a": 1}}
    wrapped = [{"type": "function", "function": call}]
    shared = [
        {"from": "human", "value": "q"},
        {"from": "function_call", "value": json.dumps(call)},
        {"from": "observation", "value": '{"sum": 1}'},
        {"from": "gpt", "value": "a"},
    ]
    turn = [user("q"), {**CALLING, "tool_calls": wrapped}, {"role": "tool", "content": '{"sum": 1}'}]
    assert read({"conversations": shared}).turns == [turn]
    openai = [user("q"), {"role": "assistant", "content": None, "function_call": call}]
    openai += [{"role": "function", "name": "add", "content": {"sum": 1}}, assistant("a")]
    assert read({"messages": openai}).turns == [[*turn[:2], {"role": "tool", "content": '{"sum": 1}', "name": "add"}]]
    as_text = {"role": "assistant", "content": "", "tool_calls": json.dumps(CALLS)}
    assert read({"messages": [user("q"), as_text, TOOL]}).turns == [[user("q"), CALLING, TOOL]]


def test_tools_may_be_json_or_functions_alone():
    wanted = [{"type": "function", "function": FUNCTION}]
    for given in (wanted, json.dumps(wanted), [FUNCTION], json.dumps([FUNCTION])):
        assert read({"prompt": "q", "tools": given}).tools == wanted
    for nothing in (None, [], "", " ", "[]"):
        assert read({"prompt": "q", "tools": nothing}).tools is None
    assert read({"prompt": "q", "functions": [FUNCTION]}).tools == wanted


SKIPPED = {
    "not an object": ["text", ["list"], 3, None],
    "no turns": [{"turns": []}, {"turns": "text"}, {"messages": {}}, {"messages": "[]"}, {"prompt": 3}],
    "a null conversation": [{"messages": None}, {"messages": None, "prompt": None}],
    "no known column": [{"a": 1, "b": 2}, {}, {"data": "text"}],
    "a turn is not text": [
        {"turns": [3]},
        {"turns": [[user("q")]]},
        {"turns": ["q", None]},
        {"messages": [{"role": "user", "content": 3}]},
        {"messages": [{"role": "user", "content": float("nan")}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": None}]}]},
        {"data": ["q", 3]},
        {"turns": [user("q"), "text"]},
    ],
    "an empty turn": [
        {"turns": ["fine", " "]},
        {"prompt": ""},
        {"messages": [user("")]},
        {"messages": [{"role": "user", "content": None}]},
        {"messages": [{"role": "user"}]},
        {"messages": [user("q"), assistant("\n")]},
        {"messages": [{"role": "user", "content": []}]},
        {"conversations": [{"from": "human", "value": ""}]},
    ],
    "a message without a role": [{"messages": [{"content": "q"}]}, {"messages": [{"role": None, "content": "q"}]}],
    "an unknown role": [{"messages": [{"role": role, "content": "q"}]} for role in ("critic", 3, "")],
    "no user's turn": [{"messages": [system("s")]}, {"messages": [user("q"), assistant("a"), system("s")]}],
    "an answer without a question": [
        {"messages": [assistant("a"), user("q")]},
        {"messages": [system("s"), assistant("a")]},
        {"messages": [user("q"), assistant("a"), assistant("b")]},
        {"messages": [CALLING, TOOL]},
    ],
    "a tool message without calls": [
        {"messages": [{"role": "tool", "content": "x"}]},
        {"messages": [user("q"), TOOL]},
        {"messages": [user("q"), assistant("a"), TOOL]},
    ],
    "tool calls without results": [
        {"messages": [user("q"), CALLING, user("r")]},
        {"messages": [user("q"), CALLING, assistant("a")]},
        {"messages": [user("q"), CALLING, CALLING, TOOL]},
    ],
    "tool calls that are not JSON": [
        {"conversations": [{"from": "human", "value": "q"}, {"from": "function_call", "value": "add(1)"}]}
    ],
    "tool calls that are not objects": [{"messages": [user("q"), {"role": "assistant", "tool_calls": ["add"]}]}],
    "a part that is not text": [
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        {"messages": [{"role": "user", "content": ["text"]}]},
    ],
    "tools that are not JSON": [{"prompt": "q", "tools": "add"}],
    "tools that are not a list of objects": [{"prompt": "q", "tools": {"add": 1}}, {"prompt": "q", "tools": ["add"]}],
    "text that is not Unicode": [
        json.loads('{"prompt": "half a pair: \\ud83d"}'),
        json.loads('{"turns": ["q"], "id": "\\ud83d"}'),
        json.loads('{"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "\\udc00"}]}'),
    ],
    "a value that JSON cannot hold": [
        {"prompt": "q", "tools": [{"name": "f", "default": float("inf")}]},
        {"prompt": "q", "tools": [{"name": "f", "default": b"bytes"}]},
    ],
}  # fmt: skip


@pytest.mark.parametrize("reason", SKIPPED)
def test_what_cannot_be_asked_is_skipped_for_its_reason(reason):
    for row in SKIPPED[reason]:
        with pytest.raises(Unusable) as error:
            read(row)
        assert error.value.reason == reason, row


def test_details_name_what_is_special_to_the_row():
    with pytest.raises(Unusable, match=r"an unknown role \(critic\)"):
        read({"messages": [{"role": "critic", "content": "q"}]})
    with pytest.raises(Unusable, match=r"no known column \(a, b\)"):
        read({"a": 1, "b": 2})
    with pytest.raises(Unusable, match=r"a part that is not text \(image_url\)"):
        read({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]})
    with pytest.raises(Unusable, match="not JSON"):
        read(Unusable("not JSON"))


def test_named_columns_and_keys_go_before_the_conventions():
    row = {"messages": [user("by convention")], "talk": [{"who": "bot", "said": "hi"}, {"who": "human", "said": "q"}]}
    assert read(row).turns == ["by convention"]
    with pytest.raises(Unusable, match="an answer without a question"):
        read(row, messages="talk", role="who", content="said")
    row["talk"] = row["talk"][::-1]
    named = read(row, messages="talk", role="who", content="said")
    assert (named.turns, named.answers) == (["q"], ["hi"])
    row = {"prompt": "by convention", "ask": "q", "response": "r", "reply": "a", "sys": "s", "fns": [FUNCTION]}
    named = read(row, prompt="ask", answer="reply", system="sys", tools="fns")
    assert (named.turns, named.answers) == ([[system("s"), user("q")]], ["a"])
    assert named.tools == [{"type": "function", "function": FUNCTION}]
    # A row without the named column is read by convention.
    assert read({"prompt": "by convention"}, prompt="ask").turns == ["by convention"]


def test_the_generators_prompts_pass():
    prompt = Prompt("1", ["q"], "maths")
    assert read(prompt) is prompt
