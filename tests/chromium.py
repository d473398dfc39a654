"""A headless Chromium driven over its DevTools pipe, with nothing but the standard library.

The pipe is file descriptor 3 (commands) and 4 (answers and events) of the browser; messages are JSON with a NUL after
each.
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

NAMES = ("chromium", "chromium-browser", "google-chrome")


def find_chromium() -> str | None:
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """One page of one browser. `events` keeps everything that the browser reported."""

    def __init__(self, width: int = 1200, height: int = 900, dark: bool = False, patience: float = 60.0):
        self.patience, self.events, self._number, self._rest = patience, [], 0, b""
        self._profile = tempfile.TemporaryDirectory(prefix="chromium-")
        self._start()
        target = self._send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")
        self.resize(width, height)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", features=[scheme])

    def _start(self) -> None:
        theirs_in, self._write = os.pipe()
        self._read, theirs_out = os.pipe()
        options = (
            "--headless --no-sandbox --disable-gpu --disable-dev-shm-usage --no-first-run --disable-extensions "
            "--disable-background-networking --disable-component-update --disable-sync --remote-debugging-pipe"
        ).split()
        # The shell puts our pipes at descriptors 3 and 4, where the browser looks.
        script = f'exec "$0" "$@" 3<&{theirs_in} 4>&{theirs_out}'
        self._process = subprocess.Popen(
            ["bash", "-c", script, find_chromium(), *options, f"--user-data-dir={self._profile.name}"],
            pass_fds=(theirs_in, theirs_out),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs_in)
        os.close(theirs_out)

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_) -> None:
        self._process.terminate()
        try:
            self._process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._write)
        os.close(self._read)
        for _ in range(50):  # its children may still write for a moment
            shutil.rmtree(self._profile.name, ignore_errors=True)
            if not Path(self._profile.name).exists():
                break
            time.sleep(0.1)
        self._profile._finalizer.detach()

    def send(self, method: str, **params) -> dict:
        """A command to the page. Raises RuntimeError for the browser's error, TimeoutError for its silence."""
        return self._send(method, self._session, **params)

    def _send(self, method: str, session: str | None = None, **params) -> dict:
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if session:
            message["sessionId"] = session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        number = self._number
        answer = self._until(lambda m: m.get("id") == number)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']}")
        return answer["result"]

    def _until(self, wanted) -> dict:
        """Reads messages until one is wanted; events on the way are kept."""
        end = time.monotonic() + self.patience
        while True:
            while b"\0" in self._rest:
                line, self._rest = self._rest.split(b"\0", 1)
                message = json.loads(line)
                if "method" in message:
                    self.events.append(message)
                if wanted(message):
                    return message
            if not select.select([self._read], [], [], max(0.0, end - time.monotonic()))[0]:
                raise TimeoutError(f"the browser said nothing for {self.patience} s")
            chunk = os.read(self._read, 1 << 20)
            if not chunk:
                raise RuntimeError("the browser ended")
            self._rest += chunk

    def resize(self, width: int, height: int) -> None:
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def open(self, url: str) -> None:
        """Goes to an address, from a blank page so that a mere change of the hash loads again too."""
        for address in ("about:blank", url):
            self.send("Page.navigate", url=address)
            self._until(lambda m: m.get("method") == "Page.loadEventFired")

    def value(self, expression: str):
        """The JSON value of an expression, promises awaited. Raises RuntimeError with the page's own error."""
        answer = self.send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(answer["exceptionDetails"].get("exception", {}).get("description", expression))
        return answer["result"].get("value")

    def press(self, key: str, text: str | None = None) -> None:
        for kind in ("keyDown", "keyUp"):
            more = {"text": text} if text and kind == "keyDown" else {}
            self.send("Input.dispatchKeyEvent", type=kind, key=key, code=key, **more)

    def screenshot(self, path: Path, full: bool = False) -> None:
        self.value("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
        data = self.send("Page.captureScreenshot", captureBeyondViewport=full)["data"]
        path.write_bytes(base64.b64decode(data))

    def complaints(self) -> list[str]:
        """Errors and warnings of the page, and every request that is no file."""
        found = []
        for event in self.events:
            params = event["params"]
            if event["method"] == "Runtime.exceptionThrown":
                found.append(json.dumps(params["exceptionDetails"]))
            if event["method"] == "Runtime.consoleAPICalled":
                found.append(f"console.{params['type']}: {params['args']}")
            if event["method"] == "Log.entryAdded" and params["entry"]["level"] in ("warning", "error"):
                found.append(params["entry"]["text"])
            if event["method"] == "Network.requestWillBeSent":
                url = params["request"]["url"]
                if not url.startswith(("file:", "data:")):
                    found.append(f"request: {url}")
        return found
