"""A Hub on loopback for tests: the few endpoints that huggingface_hub calls to create a repository and upload to it.

It keeps repositories in memory and checks what the real one checks: the token, the commit's encoding, the size and hash
of large files.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

TOKEN = "hf_tested"


@dataclass
class Repository:
    """Files by path; `commits` counts them, `private` and `kind` are what the creator asked for."""

    private: bool
    files: dict[str, bytes] = field(default_factory=dict)
    commits: int = 0
    kind: str = "model"


@dataclass
class Hub:
    """State of the stand-in.

    Attributes:
        objects: contents of large files by SHA-256, committed or not.
        large: files with one of these endings go through LFS, the others into the commit itself.
        refuse: path endings answered with this status code instead.
        calls: (method, path) of every request.
    """

    repositories: dict[str, Repository] = field(default_factory=dict)
    objects: dict[str, bytes] = field(default_factory=dict)
    large: tuple[str, ...] = (".safetensors", ".parquet")
    refuse: dict[str, int] = field(default_factory=dict)
    calls: list[tuple[str, str]] = field(default_factory=list)
    url: str = ""


@contextmanager
def running_hub():
    """Serves a Hub as long as the block runs."""
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def blob_id(content: bytes) -> str:
    """What git calls the content."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    hub: Hub

    def log_message(self, *_):
        return

    def do_GET(self):
        self._answer()

    def do_POST(self):
        self._answer()

    def do_PUT(self):
        self._answer()

    def _answer(self):
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path = self.path.split("?")[0]
        self.hub.calls.append((self.command, path))
        for ending, status in self.hub.refuse.items():
            if path.endswith(ending):
                return self._send(status, {"error": "refused by the test"})
        if path.startswith("/objects/"):  # an address that the Hub signed: no token
            return self._store(path.rsplit("/", 1)[-1], body)
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self._send(401, {"error": "Invalid credentials"})
        if path == "/api/whoami-v2":
            return self._send(200, {"type": "user", "name": "tester", "orgs": []})
        if path == "/api/validate-yaml":
            return self._send(200, {"warnings": [], "errors": []})
        if path == "/api/repos/create":
            return self._create(json.loads(body))
        return self._repository(path, body)

    def _create(self, asked: dict):
        name = f"{asked['organization'] or 'tester'}/{asked['name']}"
        kind = asked.get("type") or "model"
        answer = {"url": f"{self.hub.url}/{'datasets/' if kind == 'dataset' else ''}{name}"}
        if name in self.hub.repositories:
            return self._send(409, answer)
        self.hub.repositories[name] = Repository(
            asked.get("visibility") == "private" or asked.get("private") is True, kind=kind
        )
        return self._send(200, answer)

    def _repository(self, path: str, body: bytes):
        kind, rest = re.fullmatch(r"(?:/api)?/?(models|datasets)?/?(.*)", path).groups()
        words = rest.removesuffix(".git/info/lfs/objects/batch").split("/")
        repository = self.hub.repositories.get("/".join(words[:2]))
        if repository is None or repository.kind != (kind or "models").removesuffix("s"):
            return self._send(404, {"error": "no such repository"})
        if path.endswith("/lfs/objects/batch"):
            return self._send(
                200, {"transfer": "basic", "objects": [self._action(o) for o in json.loads(body)["objects"]]}
            )
        action = words[2] if len(words) > 2 else "info"
        if action == "tree":
            return self._send(200, [self._entry(name, content) for name, content in repository.files.items()])
        if action == "preupload":
            return self._send(200, {"files": [self._mode(f, repository) for f in json.loads(body)["files"]]})
        if action == "commit":
            return self._commit(repository, body, "/".join(words[:2]))
        return self._send(200, {"id": "/".join(words[:2]), "sha": f"{repository.commits:040x}", "siblings": []})

    def _entry(self, name: str, content: bytes) -> dict:
        return {"type": "file", "path": name, "size": len(content), "oid": blob_id(content)}

    def _mode(self, file: dict, repository: Repository) -> dict:
        large, there = file["path"].endswith(self.hub.large), repository.files.get(file["path"])
        known = None if there is None else hashlib.sha256(there).hexdigest() if large else blob_id(there)
        mode = "lfs" if large else "regular"
        return {"path": file["path"], "uploadMode": mode, "shouldIgnore": False, "oid": known}

    def _action(self, asked: dict) -> dict:
        entry = {"oid": asked["oid"], "size": asked["size"]}
        if asked["oid"] in self.hub.objects:
            return entry
        return entry | {"actions": {"upload": {"href": f"{self.hub.url}/objects/{asked['oid']}"}}}

    def _store(self, name: str, body: bytes):
        if hashlib.sha256(body).hexdigest() != name:
            return self._send(422, {"error": "content and hash differ"})
        self.hub.objects[name] = body
        return self._send(200, {})

    def _commit(self, repository: Repository, body: bytes, name: str):
        lines = [json.loads(line) for line in body.splitlines()]
        if lines[0]["key"] != "header" or not lines[0]["value"]["summary"]:
            return self._send(400, {"error": "a commit starts with its message"})
        files = dict(repository.files)
        for line in lines[1:]:
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.hub.objects[value["oid"]]
            elif line["key"] == "deletedFile":
                del files[value["path"]]
            else:
                return self._send(400, {"error": f"unknown key {line['key']}"})
        repository.files, repository.commits = files, repository.commits + 1
        url = f"{self.hub.url}/{name}/commit/{repository.commits:040x}"
        return self._send(200, {"success": True, "commitUrl": url, "commitOid": f"{repository.commits:040x}"})

    def _send(self, status: int, content):
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)
