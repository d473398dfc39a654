"""The engine `server` against fake servers: what is asked, what is made of replies, and that faults cost nothing."""

import json
import os
import random
import signal
import time
from collections import Counter

import pytest

from answering import LIMIT, Run, forked
from data import answer_store, endpoint, engine_server
from data.answer_store import Accounts
from data.answers import read_answers
from data.engines import Sampling
from data.regenerate import main
from data.replies import AnswerReader
from fake_server import FakeServer
from tiny import EOS
from tiny_tokenizer import TEMPLATE, tiny_tokenizer

TALKS = [["hi there"], ["what is 3?"], ["b", "c, then?"], ["why", "how", "when?"], ["x y z"], ["last one 9"], ["q"]]


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(engine_server, "_PAUSE", 0.002)


@pytest.fixture
def run(tmp_path):
    return Run(tmp_path, TALKS, server_timeout=5, server_patience=5)


@pytest.mark.parametrize(
    "kind, said, exact",
    [
        ("vllm", "completions of target, token ids with all knobs", True),
        ("transformers", "completions of target, text with a generation config", False),
        ("plain", "completions of target, text with plain fields", False),
        ("chat", "chat/completions of target, messages with the template's arguments", False),
    ],
)
def test_every_kind_of_server_gives_the_targets_own_tokens(run, capsys, kind, said, exact):
    """TRAPS 28, 34: the prompt is the project's own, cut answers carry no end, whole ones do."""
    with FakeServer(run.tokenizer, kind) as server:
        assert run(endpoints=[server.url]) == 0
    rows = run.rows()
    assert run.turns() == {"input": 10, "done": 10, "failed": 0, "skipped": 0, "left": 0}
    assert {row.exact for row in rows.values()} == {exact}
    assert {row.stop for row in rows.values()} == {"eos", "length"}
    assert all((row.answer_ids[-1] == EOS) == (row.stop == "eos") for row in rows.values())
    assert f"{server.url}: {said}\n" in capsys.readouterr().out
    manifest = read_answers(str(run.answers))[1]
    assert manifest["finished"] and manifest["settings"]["engine"] == "server"
    assert manifest["share_exact"] == float(exact)


def test_servers_of_different_kinds_answer_one_run(run):
    """Conversations go on at whichever endpoint is free."""
    with FakeServer(run.tokenizer) as one, FakeServer(run.tokenizer, "plain") as other:
        assert run(endpoints=[one.url, other.url], server_concurrency=1) == 0
        assert len(one.requests) > 1 and len(other.requests) > 1
        assert len(one.requests) + len(other.requests) == 10 + 2  # a probe each
    assert {row.exact for row in run.rows().values()} == {True, False} and run.turns()["done"] == 10


def test_rows_have_seeds_of_their_own_and_all_knobs_are_sent(run):
    with FakeServer(run.tokenizer) as server:
        knobs = dict(answer_temperature=0.7, top_p=0.9, top_k=20, min_p=0.1, seed=3)
        assert run(endpoints=[server.url], **knobs) == 0
        asked = server.requests[1:]
    assert len({body["seed"] for body in asked}) == 10
    sampling = Sampling(0.7, 0.9, 20, 0.1, LIMIT, 3)
    prompts = {json.dumps(row.prompt_ids): row.id for row in run.rows().values()}
    assert all(body["seed"] == sampling.seed_of(prompts[json.dumps(body["prompt"])]) for body in asked)
    one = asked[0]
    assert (one["temperature"], one["top_p"], one["top_k"], one["min_p"]) == (0.7, 0.9, 20, 0.1)
    assert one["repetition_penalty"] == 1.0 and one["stop_token_ids"] == [EOS] and one["max_tokens"] == LIMIT


def test_a_generation_config_says_the_same(run):
    with FakeServer(run.tokenizer, "transformers") as server:
        assert run(endpoints=[server.url], answer_temperature=0.7, top_k=20) == 0
        said = json.loads(server.requests[-1]["generation_config"])
    assert said["do_sample"] and (said["temperature"], said["top_p"], said["top_k"]) == (0.7, 1.0, 20)
    assert said["max_new_tokens"] == LIMIT and said["eos_token_id"] == [EOS]


def test_a_server_without_the_knobs_is_refused_when_they_matter(run, capsys):
    with FakeServer(run.tokenizer, "plain") as server:
        assert run(endpoints=[server.url], answer_temperature=1.0, top_k=5) == 2
        assert run(endpoints=[server.url], answer_temperature=1.0) == 0
    assert "takes no request for target" in capsys.readouterr().err


def test_another_template_at_the_server_is_refused(run, capsys):
    """TRAPS 28: where messages are sent, the server's own template must give as many tokens, or the same ones."""
    longer, other = TEMPLATE.replace("a:", "ab:"), TEMPLATE.replace("a:", "b:")
    for kind, template in (("chat", longer), ("vllm", other)):
        with FakeServer(tiny_tokenizer(template), kind) as server:
            assert run(endpoints=[server.url], server_api="chat") == 2
        assert "the target's template gives" in capsys.readouterr().err and not Accounts(str(run.answers)).places
    with FakeServer(run.tokenizer, "vllm") as server:
        assert run(endpoints=[server.url], server_api="chat") == 0
    assert len(run.rows()) == 10


def test_a_reply_that_nobody_has_thought_of_fails_its_row(run, monkeypatch):
    """Half a surrogate pair, brackets thousands deep, and whatever else breaks the reader."""
    faults, real = iter(["surrogate", "deep"]), AnswerReader.row
    with FakeServer(
        run.tokenizer, "plain", fault=lambda b: next(faults, None) if b["max_tokens"] > 1 else None
    ) as server:
        once = dict(endpoints=[server.url], server_attempts=1, server_concurrency=1)
        assert run(**once) == 0
        reasons = Accounts(str(run.answers)).reasons("failed")
        assert reasons == {"the text does not survive tokenising": 1, "a reply that is not JSON": 1}
        monkeypatch.setattr(AnswerReader, "row", lambda *given: 1 // 0)
        assert run(**once) == 0
        assert Accounts(str(run.answers)).reasons("failed") == {"a reply that cannot be read": 2}
        monkeypatch.setattr(AnswerReader, "row", real)
        assert run(**once) == 0
    assert set(run.rows()) == set(run.expected())


def test_an_accident_at_the_first_request_costs_no_token_ids(run, capsys):
    faults = iter(["two answers", "not json", "500", None])
    with FakeServer(run.tokenizer, fault=lambda body: next(faults, None)) as server:
        assert run(endpoints=[server.url]) == 0
    assert "token ids with all knobs" in capsys.readouterr().out and {row.exact for row in run.rows().values()} == {
        True
    }


def test_when_every_endpoint_is_away_the_run_ends_and_nothing_is_lost(run, capsys):
    with FakeServer(run.tokenizer) as server:
        seen = []

        def dying(body):
            seen.append(1)
            return "500" if len(seen) > 6 else None

        server.fault = dying
        assert run(endpoints=[server.url], server_patience=0.2, server_attempts=10_000, server_concurrency=2) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert "no endpoint has answered for" in error and "HTTP 500: injected" in error and "server_patience" in error
    turns = run.turns()
    assert turns["done"] == 5 and turns["left"] == 5
    assert run(endpoints=[f"http://127.0.0.1:{server.port}/v1"], server_patience=0.2) == 1
    assert "no connection" in capsys.readouterr().err and run.turns() == turns
    with FakeServer(run.tokenizer) as server:
        assert run(endpoints=[server.url]) == 0
    assert set(run.rows()) == set(run.expected())


def test_an_endpoint_that_is_away_leaves_the_work_to_the_others(run):
    """No row fails for it: a connection that is refused is not the row's fault."""
    with FakeServer(run.tokenizer, delay=0.01) as alive:
        assert run(endpoints=["http://127.0.0.1:9/v1", alive.url], server_attempts=1, server_concurrency=1) == 0
    assert set(run.rows()) == set(run.expected())


def test_a_failed_turn_is_tried_again_by_the_next_run_with_those_after_it(run):
    """TRAPS 35: a conversation whose first turn failed has no later ones either, and gets them all in the end."""
    first = run.expected()["c3"][0]
    with FakeServer(run.tokenizer, fault=lambda body: "500" if body["prompt"] == first else None) as server:
        assert run(endpoints=[server.url], server_attempts=2) == 0
        assert run.turns() == {"input": 10, "done": 7, "failed": 3, "skipped": 0, "left": 0}
        accounts = Accounts(str(run.answers))
        assert accounts.reasons("failed") == {"an earlier turn failed": 2, "HTTP 500": 1}
        server.fault = lambda body: None
        server.requests.clear()
        assert run(endpoints=[server.url]) == 0
        assert len(server.requests) == 3 + 1
    assert set(run.rows()) == set(run.expected()) and run.turns()["failed"] == 0


def test_a_reply_that_the_row_itself_causes_fails_it_by_reason(run):
    reasons = iter(["400", "two answers", "not json", "too few"])
    faults = {}

    def fault(body):
        key = json.dumps(body["prompt"])
        if body["max_tokens"] == 1:
            return None
        if key not in faults:
            faults[key] = next(reasons, None)
        return faults[key]

    with FakeServer(run.tokenizer, fault=fault) as server:
        assert run(endpoints=[server.url], server_attempts=2, server_concurrency=1) == 0
    found = Counter(Accounts(str(run.answers)).reasons("failed"))
    del found["an earlier turn failed"]
    assert found == {"HTTP 400": 1, "a reply without exactly one answer": 2, "a reply that is not JSON": 1}
    run.rows()
    run.turns()


def test_retry_after_is_honoured(run, monkeypatch):
    """The endpoint rests for as long as the server asks."""
    waits, rest = [], endpoint.Endpoint._rest
    monkeypatch.setattr(endpoint.Endpoint, "_rest", lambda self, wait: (waits.append(wait), rest(self, wait)))
    asked = []

    def fault(body):
        asked.append(time.monotonic())
        return "429 0.25" if len(asked) == 3 else None

    with FakeServer(run.tokenizer, fault=fault) as server:
        assert run(endpoints=[server.url], server_concurrency=1, server_attempts=1) == 0
    assert waits == [0.25] and asked[3] - asked[2] >= 0.25
    assert set(run.rows()) == set(run.expected())


def test_a_run_in_which_everything_fails_ends(run, monkeypatch, capsys):
    """A server whose every answer is unusable must not turn a night's prompts into failures."""
    monkeypatch.setattr(engine_server, "_HOPELESS", 4)
    with FakeServer(run.tokenizer, fault=lambda body: "400" if body["max_tokens"] > 1 else None) as server:
        assert run(endpoints=[server.url], server_concurrency=1) == 1
    error = capsys.readouterr().err
    assert "4 turns have failed and none was answered, the last one for: HTTP 400 (injected)" in error
    turns = run.turns()
    assert turns["failed"] >= 4 and turns["left"] > 0 and not turns["done"]


def test_a_block_of_bad_rows_does_not_lock_the_others_out(tmp_path, monkeypatch):
    """The next run begins behind it; what failed before ends no run, however much of it there is."""
    monkeypatch.setattr(engine_server, "_HOPELESS", 4)
    run = Run(tmp_path, [[f"bad {n}"] for n in range(6)] + [[f"fine {n}"] for n in range(3)], server_timeout=5)
    asked = []

    def fault(body):
        prompt = run.tokenizer.decode(body["prompt"])
        asked.append(prompt)
        return "400" if "bad" in prompt else None

    with FakeServer(run.tokenizer, fault=fault) as server:
        once = dict(endpoints=[server.url], server_concurrency=1)
        assert run(**once) == 1 and run.turns()["failed"] == 4 and run.turns()["done"] == 0
        asked.clear()
        assert run(**once) == 0 and run.turns() == {"input": 9, "done": 3, "failed": 6, "skipped": 0, "left": 0}
        assert [prompt[2:7] for prompt in asked[1:]] == ["bad 4", "bad 5", "fine ", "fine ", "fine "] + [
            f"bad {n}" for n in range(4)
        ]
        assert run(**once) == 0 and run.turns()["failed"] == 6
    assert set(run.rows()) == {"c6", "c7", "c8"}


def test_a_row_that_the_server_refuses_does_not_make_the_endpoint_rest(tmp_path, monkeypatch):
    rests = []
    monkeypatch.setattr(endpoint.Endpoint, "_rest", lambda self, wait: rests.append(wait))
    run = Run(tmp_path, [[f"bad {n}"] for n in range(9)] + [["fine"]], server_timeout=5)
    bad = run.tokenizer.encode("bad")
    with FakeServer(run.tokenizer, fault=lambda body: "400" if body["prompt"][2:5] == bad else None) as server:
        assert run(endpoints=[server.url]) == 0
        assert len(server.requests) == 1 + 10
    assert rests == [] and set(run.rows()) == {"c9"} and run.turns()["failed"] == 9


def test_connections_beyond_the_limit_are_allowed_or_refused(monkeypatch):
    limits = []
    monkeypatch.setattr(engine_server.resource, "getrlimit", lambda kind: (1024, 4096))
    monkeypatch.setattr(engine_server.resource, "setrlimit", lambda kind, both: limits.append(both))
    engine_server._allow_connections(100)
    engine_server._allow_connections(2000)
    assert limits == [(2256, 4096)]
    with pytest.raises(ValueError, match="server_concurrency: 4000 connections, the system allows 4096 open files"):
        engine_server._allow_connections(4000)


FAULTS = ["500", "503 0.01", "429 0.01", "429", "408", "broken", "half", "twice", "not json", "two answers", "slow"]


@pytest.mark.parametrize("seed", range(5))
def test_faults_cost_nothing_but_time(tmp_path, monkeypatch, seed):
    """Whatever fails, the accounts add up after every run, and a clean run leaves each turn once and right."""
    draw = random.Random(seed)
    talks = [[f"{n} {chr(97 + n % 26)}{turn}" for turn in range(draw.choice((1, 1, 2, 3)))] for n in range(24)]
    run = Run(tmp_path, talks, server_timeout=0.15, server_patience=3, server_attempts=2)
    write = answer_store._write

    def fault(body):
        return draw.choice(FAULTS) if draw.random() < 0.35 else None

    def full_disk(descriptor, data):
        if draw.random() < 0.3:
            os.write(descriptor, data[: draw.randrange(len(data))])
            raise OSError(28, "No space left on device")
        write(descriptor, data)

    codes, done = [], 0
    for attempt in range(3):
        kinds = draw.choices(["vllm", "plain"], k=attempt + 1)
        servers = [FakeServer(run.tokenizer, kind, fault=fault) for kind in kinds]
        with monkeypatch.context() as patch:
            if attempt != 1:
                patch.setattr(answer_store, "_write", full_disk)
            urls = [server.url for server in servers] + ["http://127.0.0.1:9/v1"] * (attempt == 1)
            codes.append(run(endpoints=urls, server_concurrency=draw.choice((1, 3, 8))))
        for server in servers:
            server.close()
        turns = run.turns()
        assert turns["done"] >= done and len(run.rows()) == turns["done"]
        done = turns["done"]
    assert set(codes) <= {0, 1} and codes[1] == 0
    with FakeServer(run.tokenizer) as server:
        assert run(endpoints=[server.url]) == 0
        assert len(server.requests) <= 1 + len(run.expected()) - done
    assert set(run.rows()) == set(run.expected())
    assert run.turns()["done"] == len(run.expected())


def when_configured(run):
    """Runs the stage as soon as there is a config."""
    while not (run.folder / "config.yaml").exists():
        time.sleep(0.01)
    time.sleep(0.05)
    return main([str(run.folder / "config.yaml")])


def test_a_process_killed_for_good_loses_and_repeats_nothing(tmp_path):
    """SIGKILL while two endpoints answer; one endpoint with another concurrency goes on."""
    talks = [[f"{n} {chr(97 + n % 26)}{turn}" for turn in range(1 + n % 3)] for n in range(60)]
    run = Run(tmp_path, talks)
    child, lines = forked(lambda: when_configured(run)), run.answers / "answers.jsonl"
    try:
        with FakeServer(run.tokenizer, delay=0.1) as one, FakeServer(run.tokenizer, delay=0.1) as other:
            run.config(endpoints=[one.url, other.url], server_concurrency=2)
            limit = time.monotonic() + 60
            while time.monotonic() < limit and not (lines.exists() and lines.read_bytes().count(b"\n") > 8):
                time.sleep(0.01)
            assert run() == 2  # a second writer is refused
    finally:
        os.kill(child, signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    kept = run.turns()
    assert kept["done"] > 8 and kept["left"] > 0
    with FakeServer(run.tokenizer) as server:
        assert run(endpoints=[server.url], server_concurrency=5) == 0
        assert len(server.requests) == 1 + kept["left"]
    assert set(run.rows()) == set(run.expected())


def test_a_time_budget_ends_a_run_whose_endpoints_are_away(run):
    with FakeServer(run.tokenizer) as server:
        seen = []

        def fault(body):
            seen.append(1)
            return "500" if len(seen) > 4 else None

        server.fault = fault
        # Spent long after the last request: nobody but the clock is there to see it.
        options = dict(server_attempts=1000, server_concurrency=1, server_patience=30)
        assert run(endpoints=[server.url], time_budget=1.5, **options) == 0
    manifest = read_answers(str(run.answers))[1]
    assert manifest["out_of_time"] and 1 <= run.turns()["done"] <= 3
