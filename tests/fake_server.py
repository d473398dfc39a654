"""An OpenAI-compatible server whose answers are a function of the prompt's tokens, with faults on request."""

from __future__ import annotations

import asyncio
import json
import random
import threading
import zlib

from tiny import EOS

LETTERS = range(4, 30)  # ids of a..z in the tiny tokenizer


def answer_of(prompt_ids: list[int], limit: int) -> tuple[list[int], str]:
    """What the fake target writes: 0 to 13 letters and the end, or as much of it as the limit lets through."""
    draw = random.Random(zlib.crc32(json.dumps(prompt_ids).encode()))
    ids = [draw.choice(LETTERS) for _ in range(draw.randrange(14))] + [EOS]
    return (ids, "eos") if len(ids) <= limit else (ids[:limit], "length")


class FakeServer:
    """Listens on a free port of the loopback until it is closed.

    Args:
        kind: "vllm" takes token ids and all knobs and returns ids; "transformers" takes text and a generation config
            and refuses fields it does not know; "plain" takes text and the OpenAI fields; "chat" has no completions.
        model: its name in /v1/models.
        fault: called with each request's body, says what goes wrong (a name of `FAULTS`) or None.
        delay: seconds before each answer.

    Attributes:
        requests: bodies of all requests for an answer, in order of arrival.
        keys: the authorisation headers seen.
    """

    def __init__(self, tokenizer, kind="vllm", model="target", fault=lambda body: None, delay=0.0, port=0):
        self.tokenizer, self.kind, self.model, self.fault, self.delay = tokenizer, kind, model, fault, delay
        self.requests: list[dict] = []
        self.keys: set[str] = set()
        self._started = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run(port)), daemon=True)
        self._thread.start()
        assert self._started.wait(10)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join(10)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.close()

    async def _run(self, port: int) -> None:
        self._loop, self._end, self._tasks = asyncio.get_running_loop(), asyncio.Event(), set()
        server = await asyncio.start_server(self._connection, "127.0.0.1", port)
        self.port = server.sockets[0].getsockname()[1]
        self._started.set()
        await self._end.wait()
        server.close()
        for task in self._tasks:
            task.cancel()

    async def _connection(self, reader, writer) -> None:
        self._tasks.add(asyncio.current_task())
        try:
            while line := await reader.readline():
                headers = {}
                while (header := await reader.readline()).strip():
                    name, _, value = header.decode().partition(":")
                    headers[name.lower()] = value.strip()
                self.keys.add(headers.get("authorization", ""))
                content = await reader.readexactly(int(headers.get("content-length", 0)))
                data = await self._reply(line.split()[1].decode(), content)
                if data is None:
                    break
                writer.write(data)
                await writer.drain()
                if b"connection: close" in data:
                    break
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            writer.close()

    async def _reply(self, path: str, content: bytes) -> bytes | None:
        if path == "/v1/models":
            return packed(200, {"object": "list", "data": [{"id": self.model}]})
        if path not in ("/v1/completions", "/v1/chat/completions"):
            return packed(404, {"detail": "Not Found"})
        body = json.loads(content)
        refusal = self._refusal(path, body)
        if refusal is not None:
            return packed(*refusal)
        self.requests.append(body)
        fault = self.fault(body)
        await asyncio.sleep(1.0 if fault == "slow" else self.delay)
        good = packed(200, self._answer(path, body))
        if fault in ("broken", "slow", None):
            return None if fault == "broken" else good
        if fault == "half":
            return good[:-20].replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n", 1)
        if fault == "twice":
            return good + good
        if fault == "not json":
            return packed(200, raw=b'{"choices": [{"text": "abc')
        if fault == "two answers":
            answer = self._answer(path, body)
            return packed(200, answer | {"choices": answer["choices"] * 2})
        if fault == "surrogate":
            answer = self._answer(path, body)
            return packed(200, answer | {"choices": [answer["choices"][0] | {"text": "a\ud800"}]})
        if fault == "deep":
            return packed(200, raw=b"[" * 99_999)
        if fault == "redirect":
            return packed(307, {}, {"location": "http://127.0.0.1:99999/v1"})
        if fault == "too few":
            answer = self._answer(path, body)
            return packed(200, answer | {"choices": []})
        code, _, wait = fault.partition(" ")
        return packed(int(code), {"error": {"message": "injected"}}, {"retry-after": wait} if wait else {})

    def _refusal(self, path: str, body: dict) -> tuple | None:
        if self.kind == "chat" and path != "/v1/chat/completions":
            return 404, {"detail": "Not Found"}
        if body.get("model") != self.model:
            return 404, {"error": {"message": "no such model"}}
        if self.kind != "vllm" and not isinstance(body.get("prompt", ""), str):
            return 400, {"detail": "prompt must be a string."}
        known = {"model", "prompt", "messages", "max_tokens", "temperature", "top_p", "seed", "tools"}
        known |= {"transformers": {"generation_config"}, "chat": {"chat_template_kwargs"}}.get(self.kind, set())
        if self.kind != "vllm" and set(body) - known:
            return 422, {"detail": f"Unexpected fields {sorted(set(body) - known)}"}
        return None

    def _answer(self, path: str, body: dict) -> dict:
        asked = self._prompt_ids(body)
        ids, stop = answer_of(asked, body["max_tokens"])
        text = self.tokenizer.decode([token for token in ids if token != EOS])
        choice = {"index": 0, "finish_reason": "stop" if stop == "eos" else "length"}
        chat = path == "/v1/chat/completions"
        choice |= {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
        choice |= {"token_ids": ids, "prompt_token_ids": asked} if body.get("return_token_ids") else {}
        usage = {"prompt_tokens": len(asked), "completion_tokens": len(ids)}
        return {"id": "x", "model": self.model, "choices": [choice], "usage": usage}

    def _prompt_ids(self, body: dict) -> list[int]:
        if "messages" in body:
            arguments = dict(add_generation_prompt=True, tokenize=True, return_dict=False)
            arguments |= body.get("chat_template_kwargs", {})
            return self.tokenizer.apply_chat_template(body["messages"], **arguments)
        prompt = body["prompt"]
        return prompt if isinstance(prompt, list) else self.tokenizer.encode(prompt, add_special_tokens=False)


def packed(code: int, body: dict | None = None, headers: dict | None = None, raw: bytes | None = None) -> bytes:
    """A whole response."""
    content = json.dumps(body).encode() if raw is None else raw
    lines = [f"HTTP/1.1 {code} X", "content-type: application/json", f"content-length: {len(content)}"]
    lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
    return "\r\n".join([*lines, "", ""]).encode() + content
