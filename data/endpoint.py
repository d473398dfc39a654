"""One OpenAI-compatible server: how it wants to be asked, and whether it answers at the moment.

Servers differ in what they take. A first small request finds the best form that a server accepts: the prompt's token
ids, else its text, else messages; with the knobs and the token ids of vLLM and SGLang, else with a generation config of
transformers serve, else with the plain OpenAI fields alone. In every form the server must have read the prompt tokens
that the target's own template gives, as far as it says: their number, or which they are.

An endpoint that fails a few times in a row rests, and is asked again by one small request after ever longer pauses.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import random
import time
from collections import Counter
from collections.abc import Iterator
from email.utils import parsedate_to_datetime
from urllib.parse import urlsplit

import openai

from data.asking import FULL, IDS, MESSAGES, PLAIN_FIELDS, TEMPLATE_ARGUMENTS, TEXT, TRANSFORMERS, Asking, Form
from data.engines import Question
from data.replies import BadReply, Reply, parse_reply, printable
from data.settings import RunConfig

_REST_AFTER = 5  # failures in a row
_LONGEST_PAUSE = 60.0
_LONGEST_RETRY_AFTER = 600.0
_OVERLOADED = (429, 503)
_READ_TRIES = 3  # of a form whose replies cannot be read: one may be an accident


class Trouble(Exception):
    """A request that brought no reply.

    Attributes:
        blames_row: whether the row may be why: it has only so many tries. A server that is away is not its fault.
        refused: the server understood the request and does not take it.
        wait: seconds that the server asks to be left alone.
    """

    def __init__(
        self, reason: str, detail: str = "", blames_row: bool = True, refused: bool = False, wait: float | None = None
    ):
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason, self.detail = reason, detail
        self.blames_row, self.refused, self.wait = blames_row, refused, wait


class Endpoint:
    """
    Attributes:
        name: the address without what may be secret in it.
        form: how it is asked; None until its first answer.
        up: whether rows may be sent.
        failures: in a row.
    """

    def __init__(self, address: str, config: RunConfig, asking: Asking, pause: float):
        self.asking, self.config = asking, config
        parts = urlsplit(address)
        self.name = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
        # An address with a user of its own (https://USER:PASSWORD@HOST) needs no key beside it.
        key = "" if parts.username or parts.password else _key(config.server_key_variable)
        self._headers = {} if key else {"Authorization": openai.Omit()}
        self._secrets = _spellings(key, parts.password or "")
        self._client = openai.AsyncOpenAI(
            base_url=address,
            api_key=key or "none",
            max_retries=0,  # retried by us, at whichever endpoint is free
            # A connection serves one request: what a server sends beyond its reply (a proxy that repeats one) would be
            # read as the reply to the next request, and be another row's answer.
            default_headers={"Connection": "close"},
            timeout=openai.Timeout(config.server_timeout, connect=min(10.0, config.server_timeout)),
        )
        self._pause = pause
        self.form: Form | None = None
        self._unread: Counter[Form] = Counter()
        self.model = ""
        self.up = asyncio.Event()
        self._rested = asyncio.Event()
        self.failures, self._rests, self._resume_at = 0, 0, 0.0
        self.last_answer = time.monotonic()
        self.last_trouble = "not asked yet"

    async def ask(self, question: Question) -> Reply:
        """Raises Trouble or BadReply."""
        return await self._request(self.form, question, self.asking.sampling.max_length)

    def worked(self) -> None:
        self.failures, self._rests, self.last_answer = 0, 0, time.monotonic()

    def failed(self, trouble: Trouble) -> None:
        """Counts a failure; a few in a row, or the server's own wish, make it rest."""
        self.failures += 1
        self.last_trouble = str(trouble)
        if trouble.wait is not None or self.failures >= _REST_AFTER:
            self._rest(trouble.wait)

    def _rest(self, wait: float | None) -> None:
        if wait is None:
            wait = backoff(self._pause, self._rests + 1)
        self._resume_at = max(self._resume_at, time.monotonic() + wait)
        if self.up.is_set():
            self._rests += 1
            self.up.clear()

    async def keep(self, say) -> None:
        """For as long as the run goes: finds the form, then asks again whenever the endpoint has rested.

        Raises ValueError when the first answer says that this is no server of the target.
        """
        while True:
            try:
                await self._find_form(say)
            except (Trouble, BadReply) as trouble:
                self.last_trouble = str(trouble)
                if self.form is None and self.last_trouble.startswith(("HTTP 401", "HTTP 403")):
                    raise ValueError(f"endpoints: {self.name}: {trouble}") from None
                if self._rests == 0:
                    say(f"{self.name}: {trouble}; asked again later")
                self._rests += 1
                wait = getattr(trouble, "wait", None)
                await asyncio.sleep(backoff(self._pause, self._rests) if wait is None else wait)
                continue
            self.failures = 0
            self.up.set()
            while self.up.is_set():
                await asyncio.sleep(min(0.2, self._pause))
            say(f"{self.name} rests: {self.last_trouble}")
            while time.monotonic() < self._resume_at:
                await asyncio.sleep(min(0.2, self._pause))

    async def close(self) -> None:
        await self._client.close()

    async def _find_form(self, say) -> None:
        """Sets model and form, or after the first time only sees whether the server answers."""
        question = self.asking.probe()
        if self.form is not None:
            await self._request(self.form, question, 1)
            return
        self.model = await self._find_model()
        form = await self._accepted(question)
        api = "chat/completions" if form.prompt == MESSAGES else "completions"
        say(f"{self.name}: {api} of {self.model}, {form.prompt} with {form.fields}")
        self.form = form

    async def _accepted(self, question: Question) -> Form:
        """The first form that the server takes. Raises ValueError when it takes none."""
        refusals: list[str] = []
        misread: set[tuple[str, bool]] = set()  # with fewer fields the server would only say less about it
        for form in self._forms():
            if (form.prompt, form.without_bos) in misread:
                continue
            try:
                reply = await self._request(form, question, 1)
            except Trouble as trouble:
                if not trouble.refused:
                    raise
                refusals.append(f"{form.prompt} with {form.fields}: {trouble}")
                continue
            except BadReply as fault:
                self._unread[form] += 1
                if self._unread[form] < _READ_TRIES:
                    raise
                refusals.append(f"{form.prompt} with {form.fields}: {fault}")
                continue
            difference = reply.other_prompt(question)
            if not difference:
                return form
            misread.add((form.prompt, form.without_bos))
            refusals.append(f"{form.prompt}: {difference}")
        hint = "" if "/v1" in self.name else "; the addresses of most servers end in /v1"
        said = "; ".join(refusals[-3:])
        raise ValueError(f"endpoints: {self.name} takes no request for {self.model}: {said}{hint}")

    def _forms(self) -> Iterator[Form]:
        api = self.config.server_api
        # Without the knobs they stand for, plain fields would draw from another distribution.
        plain = self.asking.sampling.plain
        kinds = (FULL, TRANSFORMERS, PLAIN_FIELDS) if plain else (FULL, TRANSFORMERS)
        if api != "chat":
            for prompt in (IDS, TEXT):
                yield from (Form(prompt, fields) for fields in kinds)
            if self.asking.tokenizer.bos_token:
                yield from (Form(TEXT, fields, without_bos=True) for fields in kinds)
        if api != "completions":
            kinds = (FULL, TRANSFORMERS, TEMPLATE_ARGUMENTS, PLAIN_FIELDS) if plain else (FULL, TRANSFORMERS)
            yield from (Form(MESSAGES, fields) for fields in kinds)

    async def _find_model(self) -> str:
        """The name by which the server knows the target. Raises ValueError when it serves others only."""
        wanted = self.config.server_model
        try:
            served = await self._send(self._client.models.with_raw_response.list(extra_headers=self._headers))
        except Trouble as trouble:
            if trouble.refused:
                return wanted or self.config.target
            raise
        try:
            entries = [entry for entry in json.loads(served)["data"] if isinstance(entry.get("id"), str)]
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            entries = []
        if wanted or not entries:
            if entries and wanted not in [entry["id"] for entry in entries]:
                raise ValueError(f"server_model {wanted} is not served by {self.name}, which has {_names(entries)}")
            return wanted or self.config.target
        for entry in entries:
            if any(_same_model(str(entry.get(key) or ""), self.config.target) for key in ("id", "root")):
                return entry["id"]
        raise ValueError(
            f"endpoints: {self.name} serves {_names(entries)}, the target is {self.config.target}; if that is the same "
            "model under another name, name it: --server_model NAME"
        )

    async def _request(self, form: Form, question: Question, limit: int) -> Reply:
        # All fields go in as they are: the client's own look at a list of token ids takes longer than all else it does.
        body = self.asking.body(form, question, limit)
        fields = {"model": self.model, "extra_body": body, "extra_headers": self._headers}
        if form.prompt == MESSAGES:
            call = self._client.chat.completions.with_raw_response.create(messages=[], **fields)
        else:
            call = self._client.completions.with_raw_response.create(prompt="", **fields)
        return parse_reply(await self._send(call))

    async def _send(self, call) -> bytes:
        """The body of the reply. Raises Trouble for everything that is none."""
        try:
            async with asyncio.timeout(self.config.server_timeout):
                return (await call).http_response.content
        except (TimeoutError, openai.APITimeoutError):
            raise Trouble("timeout", f"no answer within {self.config.server_timeout:g} seconds") from None
        except openai.APIStatusError as error:
            raise self._of_status(error) from None
        except openai.APIConnectionError as error:
            cause = error.__cause__ or error
            away = type(cause).__name__ in ("ConnectError", "ConnectTimeout")
            reason = "no connection" if away else "the connection broke"
            raise Trouble(reason, self._clean(str(cause)), blames_row=not away) from None
        except openai.OpenAIError as error:
            raise Trouble("a reply that the client cannot read", self._clean(str(error))) from None
        except Exception as error:  # what no client should raise: a redirect to a port that there is not, say
            while isinstance(error, ExceptionGroup):
                error = error.exceptions[0]
            detail = self._clean(f"{type(error).__name__}: {error}")
            raise Trouble("a request that could not be made", detail) from None

    def _of_status(self, error: openai.APIStatusError) -> Trouble:
        status, wait = error.status_code, _retry_after(error.response.headers.get("retry-after"))
        detail = self._clean(_said(error))
        if status in (401, 403):  # of the endpoint, whatever is asked
            variable = self.config.server_key_variable
            hint = f"{detail}; " + (f"the key is that of {variable}" if variable else "name --server_key_variable")
            return Trouble(f"HTTP {status}", hint, blames_row=False)
        if status in (408, 409, 429) or status >= 500 and status != 501:
            waits = wait if status in _OVERLOADED else None
            return Trouble(f"HTTP {status}", detail, blames_row=status != 429 and waits is None, wait=waits)
        # A route or a model that was there at first and is gone is the endpoint's trouble, not the row's.
        return Trouble(f"HTTP {status}", detail, blames_row=status != 404 or self.form is None, refused=True)

    def _clean(self, text: str) -> str:
        """One line for people, without the key."""
        for secret in self._secrets:
            text = text.replace(secret, "***")
        return printable(" ".join(text.split()), 300)


def _key(variable: str) -> str:
    """The key in an environment variable; none is sent unless one is named. Raises ValueError where it is not set, or
    cannot stand in a header."""
    if not variable:
        return ""
    key = os.environ.get(variable, "").strip()
    if not key:
        raise ValueError(f"server_key_variable: the environment variable {variable} is not set")
    if not (key.isascii() and key.isprintable()):
        raise ValueError(f"server_key_variable: {variable} holds characters that no key has: a line's end, or no ASCII")
    return key


def _spellings(*secrets: str) -> set[str]:
    """Secrets as messages may show them: as they are, and with what Python or JSON escapes."""
    forms = {form for secret in secrets for form in (secret, repr(secret)[1:-1], json.dumps(secret)[1:-1])}
    return forms - {""}


def backoff(base: float, failures: int) -> float:
    """Seconds to wait after so many failures: doubled each time, up to a minute, drawn from the upper half."""
    return min(_LONGEST_PAUSE, base * 2.0 ** min(failures - 1, 30)) * random.uniform(0.5, 1.0)


def _said(error: openai.APIStatusError) -> str:
    """What the server itself says, in the places where servers say it."""
    said = error.body
    for name in ("error", "message", "detail"):
        said = said.get(name, said) if isinstance(said, dict) else said
    return said if isinstance(said, str) else json.dumps(said) if said else error.message


def _retry_after(value: str | None) -> float | None:
    """Seconds of a Retry-After header, which is a number of them or a date."""
    try:
        seconds = float(value or "")
    except ValueError:
        try:
            seconds = parsedate_to_datetime(value or "").timestamp() - time.time()
        except ValueError:
            return None
    return min(max(seconds, 0.0), _LONGEST_RETRY_AFTER) if math.isfinite(seconds) else None


def _same_model(served: str, target: str) -> bool:
    """Whether both end in the same name: a path, a Hub id and a served name of one model do."""
    ends = [name.rstrip("/").rsplit("/", 1)[-1].lower() for name in (served, target)]
    return bool(ends[0]) and ends[0] == ends[1]


def _names(entries: list[dict]) -> str:
    return ", ".join(entry["id"] for entry in entries[:5])
