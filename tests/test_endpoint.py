"""One endpoint: its address, its key, the model it serves, and when it is asked again."""

import base64
import json
import os
import re
import time
from email.utils import formatdate

import pytest

from answering import Run
from data import endpoint, engine_server
from data.endpoint import backoff
from data.settings import RunConfig
from fake_server import FakeServer

TALKS = [["hi there"], ["b", "c, then?"], ["q"]]


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(engine_server, "_PAUSE", 0.002)


@pytest.fixture
def run(tmp_path):
    return Run(tmp_path, TALKS, server_timeout=5, server_patience=5)


def test_another_model_is_refused_and_may_be_named(run, capsys):
    with FakeServer(run.tokenizer, model="org/Other-7B") as server:
        assert run(endpoints=[server.url]) == 2
        error = capsys.readouterr().err.splitlines()[-1]
        assert "serves org/Other-7B, the target is" in error and "--server_model NAME" in error
        assert run(endpoints=[server.url], server_model="nothing") == 2
        assert "server_model nothing is not served" in capsys.readouterr().err
        assert run(endpoints=[server.url], server_model="org/Other-7B") == 0
    assert run.turns()["done"] == 4


def test_no_key_is_sent_unless_one_is_named(run, monkeypatch):
    """OpenAI's own client would send every server the key of OpenAI."""
    monkeypatch.setenv("OPENAI_API_KEY", "s3cret-value")
    with FakeServer(run.tokenizer) as server:
        assert run(endpoints=[server.url]) == 0
        assert server.keys == {""}


def test_a_user_in_the_address_goes_before_a_key_and_is_not_told(run, monkeypatch, capsys):
    monkeypatch.setenv("MY_KEY", "s3cret-value")
    with FakeServer(run.tokenizer) as server:
        assert run(endpoints=[server.url.replace("://", "://me:pass-word@")], server_key_variable="MY_KEY") == 0
        assert server.keys == {"Basic " + base64.b64encode(b"me:pass-word").decode()}
    assert "pass-word" not in "".join(capsys.readouterr())


@pytest.mark.parametrize("line_end", ["\r", "\n", "\r\n "])
def test_a_line_end_after_a_key_is_no_part_of_it(run, monkeypatch, line_end):
    monkeypatch.setenv("MY_KEY", "s3cret-value" + line_end)
    with FakeServer(run.tokenizer) as server:
        assert run(endpoints=[server.url], server_key_variable="MY_KEY") == 0
        assert server.keys == {"Bearer s3cret-value"}


@pytest.mark.parametrize("key", ["s3cret\rvalue", "s3cr\u00e9t", "s3\x00cret"])
def test_a_key_that_no_header_takes_is_refused_untold(run, monkeypatch, capsys, key):
    monkeypatch.setattr(endpoint.os, "environ", os.environ | {"MY_KEY": key})
    assert run(endpoints=["http://127.0.0.1:9/v1"], server_key_variable="MY_KEY") == 2
    error = capsys.readouterr().err
    assert "server_key_variable: MY_KEY holds characters" in error and "s3" not in error


def test_no_spelling_of_a_key_is_told(monkeypatch):
    monkeypatch.setenv("MY_KEY", "a\\b'c\"d")
    config = RunConfig(server_key_variable="MY_KEY")
    clean = endpoint.Endpoint("http://127.0.0.1:9/v1", config, None, 1.0)._clean
    key = os.environ["MY_KEY"]
    assert clean(f"{key} {key!r} {json.dumps(key)}") == "*** '***' \"***\""
    assert clean("x" * 295 + key) == "x" * 295 + "***" and clean("\ud800\n1") == "\\ud800 1"


def test_what_the_client_should_not_raise_is_trouble(run, capsys):
    """A redirect to a port that there is not."""
    with FakeServer(run.tokenizer, fault=lambda body: "redirect") as server:
        assert run(endpoints=[server.url], server_patience=0.2) == 1
    error = capsys.readouterr().err
    assert "no endpoint has answered for" in error and "a request that could not be made: OverflowError: " in error


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1:8000/v1",
        "http://h:99999/v1",
        "http://h:abc/v1",
        "http://[::1/v1",
        "http:///v1",
        "http://a b/v1",
        "http://[::1]x/v1",
    ],
)
def test_an_address_that_cannot_be_is_refused_by_name(address):
    with pytest.raises(ValueError, match="endpoints must be addresses such as .*, got '" + re.escape(address)):
        RunConfig(endpoints=[address])


def test_an_endpoint_named_twice_is_refused():
    with pytest.raises(ValueError, match="one is named twice"):
        RunConfig(endpoints=["http://127.0.0.1:8000/v1", "http://127.0.0.1:8000/v1/"])
    RunConfig(endpoints=["http://127.0.0.1:8000/v1", "http://[::1]:8000/v1", "https://host.example"])


def test_an_address_without_v1_is_explained(run, capsys):
    with FakeServer(run.tokenizer) as server:
        assert run(endpoints=[server.url.removesuffix("/v1")]) == 2
    assert "end in /v1" in capsys.readouterr().err


def test_the_key_is_sent_and_never_told(run, monkeypatch, capsys):
    assert run(endpoints=["http://127.0.0.1:9/v1"], server_key_variable="MY_KEY") == 2
    assert "the environment variable MY_KEY is not set" in capsys.readouterr().err
    monkeypatch.setenv("MY_KEY", "s3cret-value")
    monkeypatch.setenv("OPENAI_API_KEY", "of-somebody-else")
    with FakeServer(run.tokenizer, fault=lambda body: "401") as server:
        assert run(endpoints=[server.url], server_key_variable="MY_KEY") == 2
        assert "HTTP 401" in capsys.readouterr().err
        server.fault = lambda body: None
        assert run(endpoints=[server.url], server_key_variable="MY_KEY") == 0
        assert server.keys == {"Bearer s3cret-value"}
    printed = capsys.readouterr()
    written = b"".join(path.read_bytes() for path in run.answers.iterdir())
    assert "s3cret" not in printed.out + printed.err and b"s3cret" not in written


@pytest.mark.parametrize(
    "value, seconds",
    [
        ("3", 3),
        ("0.5", 0.5),
        ("1e9", 600),
        ("-4", 0),
        ("Thu, 01 Jan 1970 00:00:00 GMT", 0),
        ("soon", None),
        ("nan", None),
    ],
)
def test_retry_after_is_a_number_or_a_date(value, seconds):
    assert endpoint._retry_after(value) == seconds
    assert 8 < endpoint._retry_after(formatdate(time.time() + 10, usegmt=True)) <= 10


def test_backoff_grows_is_drawn_and_ends():
    for failures, longest in ((1, 1.0), (2, 2.0), (5, 16.0), (60, 60.0)):
        draws = [backoff(1.0, failures) for _ in range(200)]
        assert longest / 2 <= min(draws) < max(draws) <= longest
