"""Messages of any data set as chat templates take them, and the turns that the target answers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from data.chat import Message, Turn
from data.prompt import Unusable, check_storable, parsed

SYSTEM, USER, ASSISTANT, TOOL, CALL = "system", "user", "assistant", "tool", "call"
ROLES = {
    "system": SYSTEM, "developer": SYSTEM,
    "user": USER, "human": USER, "prompter": USER,
    "assistant": ASSISTANT, "gpt": ASSISTANT, "bot": ASSISTANT, "model": ASSISTANT, "chatgpt": ASSISTANT,
    "tool": TOOL, "function": TOOL, "observation": TOOL, "ipython": TOOL, "tool_response": TOOL,
    "function_call": CALL, "tool_call": CALL,
}  # fmt: skip


def split_turns(messages: list[Message]) -> tuple[list[Turn], list[str]]:
    """Turns and answers: a plain message of the assistant ends a turn, one with tool calls belongs to it."""
    turns, answers, open_turn = [], [], []
    for message in messages:
        role, before = message["role"], open_turn[-1] if open_turn else None
        calling = before is not None and before["role"] == ASSISTANT
        if role == TOOL and not (calling or before is not None and before["role"] == TOOL):
            raise Unusable("a tool message without calls")
        if calling and role != TOOL:
            raise Unusable("tool calls without results")
        if role != ASSISTANT:
            open_turn.append(message)
            continue
        if before is None or before["role"] == SYSTEM:
            raise Unusable("an answer without a question")
        if "tool_calls" in message:
            open_turn.append(message)
            continue
        turns.append(_simple(open_turn))
        answers.append(message["content"])
        open_turn = []
    if open_turn and open_turn[-1]["role"] == ASSISTANT:
        open_turn.pop()  # calls that nothing followed: the target writes its own in their place
    if open_turn and open_turn[-1]["role"] == SYSTEM or not turns and not open_turn:
        raise Unusable("no user's turn")
    return (turns + [_simple(open_turn)], answers) if open_turn else (turns, answers)


def _simple(messages: list[Message]) -> Turn:
    return messages[0]["content"] if len(messages) == 1 and messages[0]["role"] == USER else messages


def message_of(given: dict, role_key: str, content_key: str) -> Message:
    """One message in the form of chat templates. Empty text is refused but for a tool's result."""
    said = _first(given, role_key, "role", "from")
    role = ROLES.get(said.strip().lower()) if isinstance(said, str) else None
    if said is None:
        raise Unusable("a message without a role", ", ".join(map(str, given)))
    if role is None:
        raise Unusable("an unknown role", str(said))
    content = _first(given, content_key, "content", "value")
    if role == CALL:
        return {"role": ASSISTANT, "content": "", "tool_calls": _calls(content)}
    if role == TOOL:
        more = {key: given[key] for key in ("tool_call_id", "name") if given.get(key) is not None}
        return {"role": TOOL, "content": _tool_result(content), **more}
    if role == ASSISTANT and (calls := _first(given, "tool_calls", "function_call")):
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
    check_storable(content)
    return json.dumps(content, ensure_ascii=False)


def _calls(given: object) -> list[dict]:
    """Tool calls as recorded, arguments and all; a call alone (function_call) becomes a list of one."""
    calls = parsed(given, "tool calls that are not JSON") if isinstance(given, str) else given
    calls = calls if isinstance(calls, list) else [calls]
    if not calls or not all(isinstance(call, dict) for call in calls):
        raise Unusable("tool calls that are not objects")
    return [call if "function" in call else {"type": "function", "function": call} for call in calls]
