"""A headless Chromium, driven by chromedriver's own HTTP protocol."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")
_ARGUMENTS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


class Browser:
    """One window; what it logs and requests is kept until asked for."""

    def __init__(self, profile: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self._root = f"http://127.0.0.1:{port}"
        self._process = subprocess.Popen([str(DRIVER), f"--port={port}", "--silent"])
        arguments = [*_ARGUMENTS, f"--user-data-dir={profile}"]
        options = {"binary": CHROMIUM, "args": arguments}
        wanted = {
            "browserName": "chrome",
            "goog:chromeOptions": options,
            "goog:loggingPrefs": {"browser": "ALL", "performance": "ALL"},
        }
        try:
            self._wait()
            made = self._call("POST", "/session", {"capabilities": {"alwaysMatch": wanted}})
        except BaseException:
            self._process.terminate()
            raise
        self._session = f"/session/{made['sessionId']}"

    def _wait(self) -> None:
        for _ in range(100):
            try:
                self._call("GET", "/status")
                return
            except urllib.error.URLError:
                time.sleep(0.1)
        raise TimeoutError("chromedriver does not answer")

    def _call(self, method: str, path: str, body: Any = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(self._root + path, data, headers, method=method)
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)["value"]

    def close(self) -> None:
        """End the window and the driver."""
        try:
            self._call("DELETE", self._session)
        finally:
            self._process.terminate()
            self._process.wait(10)

    def open(self, url: str) -> None:
        """Go to a page and wait until it is loaded."""
        self._call("POST", f"{self._session}/url", {"url": url})

    def run(self, script: str) -> Any:
        """What a script returns."""
        return self._call("POST", f"{self._session}/execute/sync", {"script": script, "args": []})

    def devtools(self, command: str, **parameters: Any) -> Any:
        """A command of the DevTools protocol."""
        body = {"cmd": command, "params": parameters}
        return self._call("POST", f"{self._session}/goog/cdp/execute", body)

    def log(self, kind: str) -> list[Any]:
        """What was logged since the last time."""
        found = self._call("POST", f"{self._session}/se/log", {"type": kind})
        assert isinstance(found, list)
        return found

    def requests(self) -> list[str]:
        """What was requested since the last time."""
        events = (json.loads(entry["message"])["message"] for entry in self.log("performance"))
        sent = (e for e in events if e["method"] == "Network.requestWillBeSent")
        return [e["params"]["request"]["url"] for e in sent]
