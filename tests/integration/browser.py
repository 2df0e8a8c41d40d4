"""Chromium without a screen, driven over the WebDriver protocol by its own driver."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.patience import until

DRIVER = shutil.which("chromedriver")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
)  # fmt: skip
LIMIT_S = 60.0
TAB, ENTER, UP = "\ue004", "\ue007", "\ue013"
"""As WebDriver names these keys."""

PICTURES = os.environ.get("PAGE_PICTURES", "")
"""`make screenshots` sets it: the folder where the tests leave a picture of each scene."""


class Browser:
    """One window."""

    def __init__(self, session: str) -> None:
        self._session = session

    def _ask(self, path: str, what: Any = None) -> Any:
        data = None if what is None else json.dumps(what).encode()
        request = urllib.request.Request(f"{self._session}{path}", data, {"content-type": "application/json"})
        with urllib.request.urlopen(request, timeout=LIMIT_S) as answer:
            return json.load(answer)["value"]

    def open(self, url: str) -> None:
        """Goes to a page."""
        self._ask("/url", {"url": url})

    def run(self, script: str, *arguments: Any) -> Any:
        """What a function body of JavaScript returns there."""
        return self._ask("/execute/sync", {"script": script, "args": list(arguments)})

    def text(self, selector: str) -> str:
        """Of one element, as far as it is shown."""
        script = "const e = document.querySelector(arguments[0]); return e && e.checkVisibility() ? e.innerText : ''"
        return str(self.run(script, selector))

    def wait(self, what: Callable[[Browser], Any], why: str) -> Any:
        """What `what` returns, as soon as that is true."""
        return until(lambda: what(self), lambda: f"{why}; the page says:\n{self.text('body')}")

    def resize(self, width: int, height: int) -> None:
        """Of what the page is drawn in, even narrower than a window may be."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.devtools("Emulation.setDeviceMetricsOverride", metrics)

    def scheme(self, scheme: str) -> None:
        """What the user is said to prefer: "light" or "dark"."""
        self.devtools("Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": scheme}]})

    def press(self, keys: str) -> None:
        """These keys in turn, in whatever has the focus."""
        pressed = [{"type": kind, "value": key} for key in keys for kind in ("keyDown", "keyUp")]
        self._ask("/actions", {"actions": [{"type": "key", "id": "keyboard", "actions": pressed}]})

    def picture(self, name: str) -> None:
        """The whole page as build/.../{name}.png, if pictures are wanted."""
        if PICTURES:
            shot = self.devtools("Page.captureScreenshot", {"captureBeyondViewport": True})
            path = Path(PICTURES, f"{name}.png")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(base64.b64decode(shot["data"]))

    def devtools(self, command: str, parameters: dict[str, Any]) -> Any:
        """A command of Chromium's own."""
        return self._ask("/goog/cdp/execute", {"cmd": command, "params": parameters})

    def log(self) -> list[str]:
        """What the console has said, refused content included."""
        return [entry["message"] for entry in self._ask("/se/log", {"type": "browser"})]


@contextmanager
def browser(folder: Path) -> Iterator[Browser]:
    """A window of a browser of its own. folder: for its profile and the driver's log."""
    assert DRIVER is not None
    log = folder / "chromedriver.log"
    with log.open("w") as file:
        driver = subprocess.Popen([DRIVER, "--port=0"], stdout=file, stderr=file)
    try:
        until(lambda: "successfully on port " in log.read_text(), log.read_text)
        port = log.read_text().rpartition("successfully on port ")[2].split(".")[0]
        options = {"binary": CHROMIUM, "args": [*FLAGS, f"--user-data-dir={folder / 'profile'}"]}
        wanted = {
            "capabilities": {"alwaysMatch": {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}}
        }
        base = f"http://127.0.0.1:{port}/session"
        request = urllib.request.Request(base, json.dumps(wanted).encode(), {"content-type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as answer:
            session = f"{base}/{json.load(answer)['value']['sessionId']}"
        try:
            yield Browser(session)
        finally:
            with urllib.request.urlopen(urllib.request.Request(session, method="DELETE"), timeout=LIMIT_S):
                pass
    finally:
        driver.terminate()
        driver.wait(LIMIT_S)
