"""From a row of any conversation data set to a `Prompt`: which columns hold the conversation, and who says what in it.

Recognised by convention, in this order (or named by options, see `Columns`):

- turns: strings, each a user's text; or messages
- messages, conversations, conversation: messages of role and content, or from and value (ShareGPT); strings alternate
- data: strings that alternate between user and assistant (UltraChat)
- instruction with input (Alpaca), prompt, question, query, problem, input: a text, or messages (Nemotron's input);
  answers in response, answer, output, completion, solution
- text: one user's text

A system or system_prompt column stands before the first message, a tools column holds function definitions. A row that
cannot be used is an `Unusable` with its reason: nothing in it is guessed, repaired or dropped.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from data.chat import Turn
from data.messages import SYSTEM, USER, message_of, split_turns
from data.prompt import Prompt, Unusable, check_storable, content_id, parsed

CONVERSATIONS = ("turns", "messages", "conversations", "conversation", "data")
PROMPTS = ("instruction", "prompt", "question", "query", "problem", "input", "text")
ANSWERS = ("response", "answer", "output", "completion", "solution")
# Lists of strings in these are a user's turns; in all others, user and assistant alternate.
_USERS_ALONE = {"turns", *PROMPTS}
# A data set's own id like this could be taken for that of a later turn of another prompt.
_TURN_ID = re.compile(r"\.turn\d+$")


@dataclass(frozen=True)
class Columns:
    """Names that go before the conventions, wherever a row has them; "" for none."""

    messages: str = ""
    prompt: str = ""
    answer: str = ""
    system: str = ""
    tools: str = ""
    domain: str = ""
    role: str = ""
    content: str = ""

    @classmethod
    def of(cls, config) -> Columns:
        return cls(
            config.messages_column,
            config.prompt_column,
            config.answer_column,
            config.system_column,
            config.tools_column,
            config.domain_column,
            config.role_key,
            config.content_key,
        )


BY_CONVENTION = Columns()
NO_COLUMN = "no known column"


def prompt_of(row: object, domain: str, columns: Columns = BY_CONVENTION) -> Prompt:
    """The prompt in a row of a source (the generator's rows are prompts). Raises Unusable with the reason.

    Args:
        domain: of rows that name none.
    """
    if isinstance(row, Prompt):
        return row
    if isinstance(row, Unusable):
        raise row
    if not isinstance(row, dict):
        raise Unusable("not an object")
    turns, answers = _conversation(row, columns)
    tools = _tools(row, columns)
    kinds = [columns.domain] if columns.domain else ["domain", "category"]
    named = next((row[key] for key in kinds if isinstance(row.get(key), str) and row[key]), domain)
    check_storable([turns, tools, answers, named])
    content = content_id(turns if tools is None else [turns, tools])
    return Prompt(_given_id(row, content), turns, named, tools, answers or None)


def _given_id(row: dict, content: str) -> str:
    given = row.get("id")
    if isinstance(given, bool) or not isinstance(given, str | int) or not str(given).strip():
        return content
    check_storable(given)
    return f"{given}~{content[:8]}" if _TURN_ID.search(str(given)) else str(given)


def _conversation(row: dict, columns: Columns) -> tuple[list[Turn], list[str]]:
    name, value = _found(row, columns)
    if isinstance(value, str) and name in (*CONVERSATIONS, columns.messages):
        value = parsed(value, "no turns")
    if isinstance(value, str):
        value = [_instruction(row, value) if name == "instruction" else value]
    elif not isinstance(value, list) or not value:
        raise Unusable("no turns")
    elif all(isinstance(part, dict) for part in value):
        turns, answers = split_turns([message_of(part, columns.role, columns.content) for part in value])
        return _with_system(row, columns, turns), answers + _own_answer(row, columns, len(turns) - len(answers))
    if any(not isinstance(part, str) for part in value):
        raise Unusable("a turn is not text")
    if any(not part.strip() for part in value):
        raise Unusable("an empty turn")
    alone = name in {*_USERS_ALONE, columns.prompt}
    turns, answers = (value, []) if alone else (value[::2], value[1::2])
    return _with_system(row, columns, turns), answers + _own_answer(row, columns, len(turns) - len(answers))


def _found(row: dict, columns: Columns) -> tuple[str, object]:
    """(column, value) of the conversation: the first one that is there and not null."""
    names = [n for n in (columns.messages, columns.prompt) if n] + [*CONVERSATIONS, *PROMPTS]
    for name in names:
        if row.get(name) is not None and (name != "data" or isinstance(row[name], list)):
            return name, row[name]
    null = [name for name in names if name in row and row[name] is None]
    if null:
        raise Unusable("a null conversation", f"{' and '.join(null)}: null")
    raise Unusable(NO_COLUMN, ", ".join(map(str, list(row)[:20])) or "none at all")


def _instruction(row: dict, instruction: str) -> str:
    """Alpaca's form; a row without an input is the instruction alone."""
    more = row.get("input")
    return f"{instruction}\n\nInput:\n{more}" if isinstance(more, str) and more.strip() else instruction


def _own_answer(row: dict, columns: Columns, missing: int) -> list[str]:
    """The answer in a column of its own, where exactly the last turn has none."""
    if missing != 1:
        return []
    names = [columns.answer, *ANSWERS] if columns.answer else ANSWERS
    found = (row[name] for name in names if isinstance(row.get(name), str) and row[name].strip())
    return list(found)[:1]


def _with_system(row: dict, columns: Columns, turns: list[Turn]) -> list[Turn]:
    names = [columns.system] if columns.system else ("system", "system_prompt")
    text = next((row[name] for name in names if isinstance(row.get(name), str) and row[name].strip()), None)
    first = [{"role": USER, "content": turns[0]}] if isinstance(turns[0], str) else turns[0]
    if text is None or first[0]["role"] == SYSTEM:
        return turns
    return [[{"role": SYSTEM, "content": text}, *first], *turns[1:]]


def _tools(row: dict, columns: Columns) -> list[dict] | None:
    names = [columns.tools] if columns.tools else ("tools", "functions")
    given = next((row[name] for name in names if row.get(name)), None)
    if isinstance(given, str):
        given = parsed(given, "tools that are not JSON") if given.strip() else None
    if not given:
        return None
    if not isinstance(given, list) or not all(isinstance(tool, dict) for tool in given):
        raise Unusable("tools that are not a list of objects")
    # Templates take OpenAI's form; some data sets keep the function alone.
    return [
        {"type": "function", "function": tool} if "name" in tool and "function" not in tool else tool for tool in given
    ]
