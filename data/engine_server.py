"""The engine `server`: any OpenAI-compatible servers of the target answer, several at once.

Each endpoint has its own number of requests under way. A conversation's next turn is asked as soon as the one before is
answered, at whichever endpoint is free. What an endpoint does not answer goes back to the line for any of them; a turn
that is the cause itself fails after some tries, and the next run tries it again. An answer is on disk within a moment
of its arrival; a kill costs the requests under way.
"""

from __future__ import annotations

import asyncio
import resource
import time
from dataclasses import dataclass

from data.answer_store import FAILED, Outcome
from data.answers import AnswerRow
from data.asking import Asking
from data.chat import ChatFormat
from data.dialogues import Dialogue, Work
from data.endpoint import Endpoint, Trouble, backoff
from data.engines import Question, Sampling
from data.replies import AnswerReader, BadReply, printable
from data.settings import RunConfig, StageError

_FLUSH_SECONDS, _FLUSH_ROWS = 0.5, 256
_HOPELESS = 500  # turns that fail before the first answer: whatever the reason is, a million more would fail for it
_PAUSE = 1.0  # seconds after a first failure; after further ones longer


@dataclass
class _Job:
    """A question on its way, and how often the row itself may have been why it brought no answer."""

    dialogue: Dialogue
    question: Question
    tries: int = 0


class ServerEngine:
    """
    Args:
        eos_ids, closing: where the target stops, and the one of them with which its template closes a turn.
        vocab_size: token ids lie below it.
    """

    def __init__(
        self,
        config: RunConfig,
        tokenizer,
        eos_ids: tuple[int, ...],
        closing: int,
        vocab_size: int,
    ):
        self.config = config
        self.asking = Asking(tokenizer, ChatFormat.of(config), eos_ids, Sampling.of(config))
        self.reader = AnswerReader(tokenizer, eos_ids, closing, config.max_answer_length, vocab_size)

    def run(self, work: Work) -> None:
        """Raises ValueError when an endpoint is no server of the target, StageError when none has answered for long or
        every turn fails."""
        _allow_connections(len(self.config.endpoints) * self.config.server_concurrency)
        asyncio.run(_Run(self, work).main())


def _allow_connections(count: int) -> None:
    """Each takes a file descriptor, of which shells often allow 1024. Raises ValueError beyond the system's limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = count + 256
    if soft != resource.RLIM_INFINITY and soft < needed:
        if hard != resource.RLIM_INFINITY and hard < needed:
            raise ValueError(
                f"server_concurrency: {count} connections, the system allows {hard} open files (ulimit -n)"
            )
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


class _Run:
    def __init__(self, engine: ServerEngine, work: Work):
        self.config, self.engine, self.work = engine.config, engine, work
        self.endpoints = [Endpoint(a, engine.config, engine.asking, _PAUSE) for a in engine.config.endpoints]
        self.jobs: asyncio.Queue[_Job] = asyncio.Queue()
        # Twice as many conversations as requests: the line is never empty while there are any.
        self.room = asyncio.Semaphore(2 * len(self.endpoints) * engine.config.server_concurrency)
        self.open, self.fed, self.finished = 0, False, asyncio.Event()
        self.failed = 0  # turns that no earlier run has tried

    async def main(self) -> None:
        tasks = [asyncio.create_task(self._feed()), asyncio.create_task(self._watch())]
        for endpoint in self.endpoints:
            tasks.append(asyncio.create_task(endpoint.keep(self.work.say)))
            tasks += [asyncio.create_task(self._serve(endpoint)) for _ in range(self.config.server_concurrency)]
        end = asyncio.create_task(self.finished.wait())
        try:
            done, _ = await asyncio.wait([end, *tasks], return_when=asyncio.FIRST_COMPLETED)
            for task in done - {end}:
                if task.exception() is not None:
                    raise task.exception()
            await end
        finally:
            for task in (end, *tasks):
                task.cancel()
            await asyncio.gather(end, *tasks, return_exceptions=True)
            for endpoint in self.endpoints:
                await endpoint.close()
            self.work.flush()

    async def _feed(self) -> None:
        """Puts conversations in the line as room is made."""
        for number, dialogue in enumerate(self.work.dialogues()):
            if self.work.spent():
                break
            question = self.work.question(dialogue)
            if question is not None:
                await self.room.acquire()
                self.open += 1
                self.jobs.put_nowait(_Job(dialogue, question))
            elif number % 64 == 0:  # thousands that are done already must not hold up the answers
                await asyncio.sleep(0)
        self.fed = True
        self._check_end()
        await asyncio.Event().wait()  # a task that ends is a fault

    async def _serve(self, endpoint: Endpoint) -> None:
        while True:
            await endpoint.up.wait()
            job = await self.jobs.get()
            if not endpoint.up.is_set():
                self.jobs.put_nowait(job)
            elif self.work.spent():
                self._release()
            else:
                await self._try(endpoint, job)

    async def _try(self, endpoint: Endpoint, job: _Job) -> None:
        try:
            reply = await endpoint.ask(job.question)
            row = self.engine.reader.row(job.question, reply)
        except Trouble as trouble:
            if trouble.refused and trouble.blames_row:
                endpoint.worked()  # a server that has read the row and does not take it is in order
                self._take(job, Outcome(job.question.id, FAILED, trouble.reason, trouble.detail))
            else:
                job.tries += trouble.blames_row
                self._again(job, trouble.reason, trouble.detail, max(job.tries, endpoint.failures + 1))
                endpoint.failed(trouble)
        except BadReply as fault:
            endpoint.worked()
            job.tries += 1
            if fault.again:
                self._again(job, fault.reason, fault.detail, job.tries)
            else:
                self._take(job, Outcome(job.question.id, FAILED, fault.reason, fault.detail))
        except Exception as error:  # a reply that nobody has thought of costs its row, not the run
            endpoint.worked()
            detail = f"{type(error).__name__}: {printable(error, 200)}"
            self._take(job, Outcome(job.question.id, FAILED, "a reply that cannot be read", detail))
        else:
            endpoint.worked()
            self._take(job, row)

    def _again(self, job: _Job, reason: str, detail: str, failures: int) -> None:
        """Back into the line after a pause, unless the tries are used up."""
        if job.tries >= self.config.server_attempts:
            self._take(job, Outcome(job.question.id, FAILED, reason, detail))
        else:
            wait = backoff(_PAUSE, failures)
            asyncio.get_running_loop().call_later(wait, self.jobs.put_nowait, job)

    def _take(self, job: _Job, result: AnswerRow | Outcome) -> None:
        dialogue = self.work.take(result)
        self.failed += isinstance(result, Outcome) and not dialogue.again
        if self.failed >= _HOPELESS and not self.work.new_rows:
            raise StageError(
                f"{self.failed} turns have failed and none was answered, the last one for: {result.reason} "
                f"({result.detail}); the same command goes on with the others and tries these again at its end"
            )
        question = self.work.question(dialogue)
        if self.work.waiting >= _FLUSH_ROWS:
            self.work.flush()
        if question is None or self.work.spent():
            self._release()
        else:
            self.jobs.put_nowait(_Job(dialogue, question))

    def _release(self) -> None:
        self.open -= 1
        self.room.release()
        self._check_end()

    def _check_end(self) -> None:
        if self.fed and not self.open:
            self.finished.set()

    async def _watch(self) -> None:
        """Writes what has arrived, and ends the run when no endpoint has answered for long."""
        pause = min(_FLUSH_SECONDS, self.config.server_patience / 4)
        while True:
            await asyncio.sleep(pause)
            self.work.flush()
            while self.work.spent() and not self.jobs.empty():  # no endpoint may be there to take them
                self.jobs.get_nowait()
                self._release()
            silent = time.monotonic() - max(endpoint.last_answer for endpoint in self.endpoints)
            down = all(endpoint.failures or not endpoint.up.is_set() for endpoint in self.endpoints)
            if down and silent > self.config.server_patience:
                raise StageError(
                    f"no endpoint has answered for {silent:.0f} seconds (server_patience); "
                    + "; ".join(f"{endpoint.name}: {endpoint.last_trouble}" for endpoint in self.endpoints)
                    + "; what was answered is saved, and the same command goes on from there"
                )
