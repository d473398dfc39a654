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

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from data.chat import Message, Turn

_SYSTEM, _USER, _ASSISTANT, _TOOL, _CALL = "system", "user", "assistant", "tool", "call"
ROLES = {
    "system": _SYSTEM, "developer": _SYSTEM,
    "user": _USER, "human": _USER, "prompter": _USER,
    "assistant": _ASSISTANT, "gpt": _ASSISTANT, "bot": _ASSISTANT, "model": _ASSISTANT, "chatgpt": _ASSISTANT,
    "tool": _TOOL, "function": _TOOL, "observation": _TOOL, "ipython": _TOOL, "tool_response": _TOOL,
    "function_call": _CALL, "tool_call": _CALL,
}  # fmt: skip
CONVERSATIONS = ("turns", "messages", "conversations", "conversation", "data")
PROMPTS = ("instruction", "prompt", "question", "query", "problem", "input", "text")
ANSWERS = ("response", "answer", "output", "completion", "solution")
# Lists of strings in these are a user's turns; in all others, user and assistant alternate.
_USERS_ALONE = {"turns", *PROMPTS}
# A data set's own id like this could be taken for that of a later turn of another prompt.
_TURN_ID = re.compile(r"\.turn\d+$")


class Unusable(ValueError):
    """A row that is skipped. Attributes: reason: what it is counted under; detail: what is special to this row."""

    def __init__(self, reason: str, detail: str = ""):
        super().__init__(f"{reason} ({detail})" if detail else reason)
        self.reason, self.detail = reason, detail


@dataclass(frozen=True)
class Prompt:
    """What the target is asked.

    Attributes:
        id: unique in a prompt set and stable over runs (a hash of the turns unless the source names one).
        turns: what stands before each answer that the target writes, in order; none is empty (`data.chat.Turn`).
        domain: maths, code or chat for built-in prompts, else what the source says or the file's name.
        tools: definitions of the functions that the target may call, as chat templates take them.
        answers: the data set's own answers where it holds them: one a turn, but for a last turn that has none.
    """

    id: str
    turns: list[Turn]
    domain: str
    tools: list[dict] | None = None
    answers: list[str] | None = None


@dataclass(frozen=True)
class Columns:
    """Names that go before the conventions, wherever a row has them; "" for none."""

    messages: str = ""
    prompt: str = ""
    answer: str = ""
    system: str = ""
    tools: str = ""
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
            config.role_key,
            config.content_key,
        )


BY_CONVENTION = Columns()
NO_COLUMN = "no known column"


def prompt_of(row: object, domain: str, columns: Columns = BY_CONVENTION) -> Prompt:
    """The prompt in a row of a source (the generator's rows are prompts). Raises Unusable with the reason.

    Args:
        domain: of rows that name none in a column domain or category.
    """
    if isinstance(row, Prompt):
        return row
    if isinstance(row, Unusable):
        raise row
    if not isinstance(row, dict):
        raise Unusable("not an object")
    turns, answers = _conversation(row, columns)
    tools = _tools(row, columns)
    named = next((row[key] for key in ("domain", "category") if isinstance(row.get(key), str) and row[key]), domain)
    _check_storable([turns, tools, answers, named])
    content = content_id(turns if tools is None else [turns, tools])
    return Prompt(_given_id(row, content), turns, named, tools, answers or None)


def content_id(content: object) -> str:
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]


def told_apart(prompt: Prompt) -> str:
    """An id for a prompt whose own id another prompt has."""
    return f"{prompt.id}~{content_id([prompt.turns, prompt.tools])[:8]}"


def _given_id(row: dict, content: str) -> str:
    given = row.get("id")
    if isinstance(given, bool) or not isinstance(given, str | int) or not str(given).strip():
        return content
    _check_storable(given)
    return f"{given}~{content[:8]}" if _TURN_ID.search(str(given)) else str(given)


def _check_storable(content: object) -> None:
    try:
        json.dumps(content, ensure_ascii=False, allow_nan=False).encode()
    except UnicodeEncodeError:
        raise Unusable("text that is not Unicode", "half of a surrogate pair") from None
    except (TypeError, ValueError) as error:
        raise Unusable("a value that JSON cannot hold", str(error)) from None


def _conversation(row: dict, columns: Columns) -> tuple[list[Turn], list[str]]:
    name, value = _found(row, columns)
    if isinstance(value, str) and name in (*CONVERSATIONS, columns.messages):
        value = _parsed(value, "no turns")
    if isinstance(value, str):
        turns, answers = [_instruction(row, value) if name == "instruction" else value], []
    elif not isinstance(value, list) or not value:
        raise Unusable("no turns")
    elif all(isinstance(part, dict) for part in value):
        turns, answers = _split([_message(part, columns) for part in value])
    elif name in {*_USERS_ALONE, columns.prompt}:
        turns, answers = value, []
    else:
        turns, answers = value[::2], value[1::2]
    if any(not isinstance(part, str) for part in answers) or any(not isinstance(t, str | list) for t in turns):
        raise Unusable("a turn is not text")
    if any(not part.strip() for part in [*turns, *answers] if isinstance(part, str)):
        raise Unusable("an empty turn")
    return _with_system(row, columns, turns), answers + _own_answer(row, columns, len(turns) - len(answers))


def _found(row: dict, columns: Columns) -> tuple[str, object]:
    """(column, value) of the conversation: the first one that is there and not null."""
    names = [n for n in (columns.messages, columns.prompt) if n] + [*CONVERSATIONS, *PROMPTS]
    for name in names:
        if row.get(name) is not None and (name != "data" or isinstance(row[name], list)):
            return name, row[name]
    null = [name for name in names if name in row]
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
    first = [{"role": _USER, "content": turns[0]}] if isinstance(turns[0], str) else turns[0]
    if text is None or first[0]["role"] == _SYSTEM:
        return turns
    return [[{"role": _SYSTEM, "content": text}, *first], *turns[1:]]


def _split(messages: list[Message]) -> tuple[list[Turn], list[str]]:
    """Turns and answers: a plain message of the assistant ends a turn, one with tool calls belongs to it."""
    turns, answers, open_turn = [], [], []
    for message in messages:
        role, before = message["role"], open_turn[-1] if open_turn else None
        calling = before is not None and before["role"] == _ASSISTANT
        if role == _TOOL and not (calling or before is not None and before["role"] == _TOOL):
            raise Unusable("a tool message without calls")
        if calling and role != _TOOL:
            raise Unusable("tool calls without results")
        if role != _ASSISTANT:
            open_turn.append(message)
            continue
        if before is None or before["role"] == _SYSTEM:
            raise Unusable("an answer without a question")
        if "tool_calls" in message:
            open_turn.append(message)
            continue
        turns.append(_simple(open_turn))
        answers.append(message["content"])
        open_turn = []
    if open_turn and open_turn[-1]["role"] == _ASSISTANT:
        open_turn.pop()  # calls that nothing followed: the target writes its own in their place
    if open_turn and open_turn[-1]["role"] == _SYSTEM or not turns and not open_turn:
        raise Unusable("no user's turn")
    return (turns + [_simple(open_turn)], answers) if open_turn else (turns, answers)


def _simple(messages: list[Message]) -> Turn:
    return messages[0]["content"] if len(messages) == 1 and messages[0]["role"] == _USER else messages


def _message(given: dict, columns: Columns) -> Message:
    """One message in the form of chat templates. Empty text is refused but for a tool's result."""
    said = _first(given, columns.role, "role", "from")
    role = ROLES.get(said.strip().lower()) if isinstance(said, str) else None
    if role is None:
        raise Unusable("an unknown role", str(said))
    content = _first(given, columns.content, "content", "value")
    if role == _CALL:
        return {"role": _ASSISTANT, "content": "", "tool_calls": _calls(content)}
    if role == _TOOL:
        more = {key: given[key] for key in ("tool_call_id", "name") if given.get(key) is not None}
        return {"role": _TOOL, "content": _tool_result(content), **more}
    if role == _ASSISTANT and (calls := _first(given, "tool_calls", "function_call")):
        more = {key: given[key] for key in ("reasoning_content",) if given.get(key)}
        return {"role": role, "content": _text(content) if content else "", "tool_calls": _calls(calls), **more}
    text = _text(content)
    if not text.strip():
        raise Unusable("an empty turn", role)
    return {"role": role, "content": text}


def _first(given: Mapping, *keys: str) -> Any:
    return next((given[key] for key in keys if key and given.get(key) is not None), None)


def _text(content: object) -> str:
    """The text of a message; text parts (OpenAI's multimodal form) are joined by lines."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise Unusable("a turn is not text", type(content).__name__)
    for part in content:
        if not isinstance(part, dict) or part.get("type") not in ("text", "input_text", "output_text"):
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise Unusable("a part that is not text", str(kind))
        if not isinstance(part.get("text"), str):
            raise Unusable("a turn is not text", "a part without text")
    return "\n".join(part["text"] for part in content)


def _tool_result(content: object) -> str:
    """Text as it stands; structured results, which some data sets keep, as JSON."""
    parts = isinstance(content, list) and all(isinstance(part, dict) and "type" in part for part in content)
    if content is None or isinstance(content, str) or content and parts:
        return _text(content)
    _check_storable(content)
    return json.dumps(content, ensure_ascii=False)


def _calls(given: object) -> list[dict]:
    """Tool calls as recorded, arguments and all; a call alone (function_call) becomes a list of one."""
    calls = _parsed(given, "tool calls that are not JSON") if isinstance(given, str) else given
    calls = calls if isinstance(calls, list) else [calls]
    if not calls or not all(isinstance(call, dict) for call in calls):
        raise Unusable("tool calls that are not objects")
    return [call if "function" in call else {"type": "function", "function": call} for call in calls]


def _tools(row: dict, columns: Columns) -> list[dict] | None:
    names = [columns.tools] if columns.tools else ("tools", "functions")
    given = next((row[name] for name in names if row.get(name)), None)
    if isinstance(given, str):
        given = _parsed(given, "tools that are not JSON") if given.strip() else None
    if not given:
        return None
    if not isinstance(given, list) or not all(isinstance(tool, dict) for tool in given):
        raise Unusable("tools that are not a list of objects")
    # Templates take OpenAI's form; some data sets keep the function alone.
    return [
        {"type": "function", "function": tool} if "name" in tool and "function" not in tool else tool for tool in given
    ]


def _parsed(text: str, reason: str) -> Any:
    try:
        return json.loads(text)
    except (json.JSONDecodeError, RecursionError):
        raise Unusable(reason) from None
