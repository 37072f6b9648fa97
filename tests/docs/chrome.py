"""Headless Chromium over its debugging protocol, with the websocket client of tornado (which Jupyter brings along)."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tornado.websocket import WebSocketClientConnection

FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update",
    "--disable-default-apps", "--disable-sync", "--no-first-run", "--mute-audio", "--hide-scrollbars",
    "--remote-debugging-port=0", "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
)  # fmt: skip


def find() -> str | None:
    """The browser's program, or None."""
    return next(
        (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
    )


class Page:
    """One tab. Collects what went wrong while it was used.

    Attributes:
        errors: console errors and exceptions. requests: URLs asked for.
    """

    def __init__(self, socket: WebSocketClientConnection) -> None:
        self._socket, self._number = socket, 0
        self._answers: dict[int, asyncio.Future] = {}
        self.errors: list[str] = []
        self.requests: list[str] = []
        self._reader = asyncio.ensure_future(self._read())

    async def _read(self) -> None:
        while (text := await self._socket.read_message()) is not None:
            message = json.loads(text)
            parameters = message.get("params", {})
            if "id" in message:
                self._answers.pop(message["id"]).set_result(message)
            elif message["method"] == "Network.requestWillBeSent":
                self.requests.append(parameters["request"]["url"])
            elif message["method"] == "Runtime.exceptionThrown":
                details = parameters["exceptionDetails"]
                self.errors.append(details.get("exception", {}).get("description") or details["text"])
            elif message["method"] == "Log.entryAdded" and parameters["entry"]["level"] == "error":
                self.errors.append(f"{parameters['entry']['text']} {parameters['entry'].get('url', '')}")
            elif message["method"] == "Runtime.consoleAPICalled" and parameters["type"] == "error":
                self.errors.append(" ".join(str(a.get("value", a.get("description"))) for a in parameters["args"]))

    async def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command; returns its result."""
        self._number += 1
        self._answers[self._number] = future = asyncio.get_running_loop().create_future()
        await self._socket.write_message(json.dumps({"id": self._number, "method": method, "params": parameters}))
        answer = await asyncio.wait_for(future, 60)
        assert "error" not in answer, answer
        return answer["result"]

    async def run(self, script: str) -> Any:
        """Value of a JavaScript expression; promises are awaited."""
        result = await self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    async def until(self, script: str, seconds: float = 30.0) -> Any:
        """Wait until an expression is true; returns its value."""
        for _ in range(int(seconds / 0.05)):
            if value := await self.run(script):
                return value
            await asyncio.sleep(0.05)
        raise AssertionError(f"still false after {seconds} s: {script}; errors so far: {self.errors}")

    async def open(self, url: str) -> None:
        """Navigate and wait until the site's own script has finished."""
        await self.call("Page.navigate", url=url)
        await self.until(
            f"location.href.startsWith({json.dumps(url)}) && document.readyState == 'complete' && "
            "document.documentElement.hasAttribute('data-site-ready')"
        )


class Browser:
    """`async with Browser() as page`: one tab of a fresh browser without profile and network."""

    async def __aenter__(self) -> Page:
        # Here, so that collecting the tests needs no extra.
        from tornado.httpclient import AsyncHTTPClient
        from tornado.websocket import websocket_connect

        program = find()
        assert program is not None
        self._folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        command = [program, *FLAGS, f"--user-data-dir={self._folder.name}", "about:blank"]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        note = Path(self._folder.name) / "DevToolsActivePort"
        for _ in range(600):
            if note.exists() and note.read_text().count("\n"):
                break
            await asyncio.sleep(0.05)
        port = note.read_text().splitlines()[0]
        answer = await AsyncHTTPClient().fetch(f"http://127.0.0.1:{port}/json/list")
        target = next(t for t in json.loads(answer.body) if t["type"] == "page")
        page = Page(await websocket_connect(target["webSocketDebuggerUrl"], max_message_size=1 << 28))
        for domain in ("Page", "Runtime", "Log", "Network"):
            await page.call(f"{domain}.enable")
        return page

    async def __aexit__(self, *error: object) -> None:
        self._process.terminate()
        self._process.wait(20)
        self._folder.cleanup()
