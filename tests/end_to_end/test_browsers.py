"""A true browser before a server without keys: what pages of other sites achieve with it."""

from __future__ import annotations

import contextlib
import http.server
import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.server import Server, make_archive
from support.workplace import ECHO

pytestmark = pytest.mark.long

# What a page may do without leave: a form's POST, `fetch` of the same kind; the title tells that it has done so.
PAGE = """<!doctype html><body><script>
const send = (url, options) => fetch(url, {mode: "no-cors", ...options}).then(() => "sent", () => "failed");
Promise.all([
  send("%(order)s", {method: "POST"}),
  send("%(order)s", {method: "POST", referrerPolicy: "no-referrer"}),
  send("%(management)s/models/echo?min_worker=3", {method: "PUT"}),
]).then(ends => { document.body.textContent = "ends: " + ends.join(" "); });
</script></body>"""


def browser() -> str:
    """Where Chromium is. Skips the test where it is not."""
    for name in ("chromium", "chromium-browser", "google-chrome"):
        found = shutil.which(name)
        if found is not None:
            return found
    pytest.skip("There is no Chromium here (apt-get install chromium)")


def visit(folder: Path, url: str, *flags: str) -> str:
    """What stands on a page once its scripts have run."""
    command = [browser(), "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
    command += [f"--user-data-dir={folder / 'profile'}", "--virtual-time-budget=10000", *flags, "--dump-dom", url]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert run.returncode == 0, run.stderr[-2000:]
    return run.stdout


@contextlib.contextmanager
def site(page: str) -> Iterator[str]:
    """Another site: an address that answers with this page."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = page.encode()
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *words: object) -> None:
            """Nothing is said."""

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://localhost:{server.server_port}/"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.parametrize("entry", ["marserve", "torchserve"])
def test_a_page_of_another_site_neither_orders_nor_reads(tmp_path: Path, entry: str) -> None:
    """Its orders are refused, and under a name of its own that leads here it reads nothing but the refusal."""
    browser()
    make_archive(tmp_path / "echo.mar", ECHO)
    with Server(tmp_path, entry=entry, store=tmp_path) as server:
        port = server.management.rpartition(":")[2]
        order = f"{server.management}/models?url=echo.mar"
        with site(PAGE % {"order": order, "management": server.management}) as page:
            seen = visit(tmp_path, page)
        names_lead_here = "--host-resolver-rules=MAP evil.example 127.0.0.1"
        rebound = visit(tmp_path, f"http://evil.example:{port}/models", names_lead_here)
        own = visit(tmp_path, f"{server.management}/models")
        models = server.client.get(f"{server.management}/models").json()
        refused = [
            server.output().count(f'"{line} HTTP/1.1" 403') for line in ("POST /models?url=echo.mar", "GET /models")
        ]

    assert "ends: sent sent failed" in seen  # a PUT is asked for by a preflight, and not sent
    assert refused == [2, 1]
    assert models == {"models": []}
    assert "ForeignHostException" in rebound
    assert "&quot;models&quot;" in own or '"models"' in own
