"""The dashboard's page of a model's builds in a true browser: which one serves, and what was tried.

`make test-browser` runs these; what the browser showed is in `build/browser`, to be looked at. What a search found is
put into the state folder, as an earlier start would have left it, so that none runs.
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from marserve.files.digests import digest_of
from marserve.machine.describe import count_cores
from marserve.messages import Load
from marserve.optimise.background.cache import key_of, machine_of, write_found
from marserve.optimise.background.order import Order
from marserve.optimise.taken import Taken
from marserve.option_values import Optimising
from support.browsing import NAMELESS, PHONE, Browsing, launched
from support.server import Server, make_archive, poll

pytestmark = pytest.mark.browser

HOSTILE = "<img src=x onerror='window.hit = 1'>"
NET = """
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.layer = torch.nn.Linear(4, 3)

    def forward(self, rows):
        return self.layer(rows)
"""
HANDLER = "from ts.torch_handler.base_handler import BaseHandler\n\nclass Handler(BaseHandler):\n    pass\n"
LOAD = Load("", "", "", "handler.py", None, None, 4)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A headless Chromium; skips where Playwright or Chromium is missing."""
    with launched() as found:
        yield found


def archive_of(path: Path, config: str) -> Path:
    """An eager model of one layer."""
    archive = make_archive(path, HANDLER, config=config)
    with zipfile.ZipFile(archive) as file:
        members = {name: file.read(name) for name in file.namelist()}
    manifest = json.loads(members["MAR-INF/MANIFEST.json"])
    manifest["model"]["modelFile"] = "net.py"
    with zipfile.ZipFile(archive, "w") as file:
        for name, content in (members | {"MAR-INF/MANIFEST.json": json.dumps(manifest), "net.py": NET}).items():
            file.writestr(name, content)
    return archive


def row(name: str, **more: Any) -> dict[str, Any]:
    """A row of a report."""
    usual = {"passed": True, "whyNot": None, "faults": [], "notes": [], "outputs": [], "agreement": None}
    return {"name": name, **usual, "ratios": [], "seconds": 3.0, "bytes": 200_000, **more}


def measured(middle: float, threads: int) -> list[dict[str, Any]]:
    """Ratios at one row and at four."""
    return [
        {"rows": rows, "threads": threads, "middle": middle * scale, "low": middle - 0.2, "high": middle + 0.3}
        for rows, scale in ((1, 1.0), (4, 1.25))
    ]


def report_of(winner: str | None, threads: int) -> dict[str, Any]:
    """What a search showed."""
    return {
        "modelName": "net",
        "modelVersion": "1.0",
        "goal": "latency",
        "batchSize": 4,
        "threads": threads,
        "calibrated": 16,
        "compared": 48,
        "seconds": 61.2,
        "winner": winner,
        "notes": ["the inputs are the 64 samples of the archive, which can hold 64: a folder for --inputs shows more"],
        "builds": [
            row("channels-last", outputs=[{"meanError": 2.4e-7}], ratios=measured(0.9, threads)),
            row(
                "bf16",
                outputs=[{"meanError": 0.0033}],
                agreement={"shown": 0.9394},
                ratios=measured(2.34, threads),
                bytes=100_000,
            ),
            row("onnx", passed=False, whyNot=f"onnxscript is not installed: {HOSTILE}", bytes=0),
            row(
                "onnx-int8",
                passed=False,
                faults=["47 of 48 inputs agree by top-1 of output: 89.1 % is shown, 98.0 % is wanted"],
                outputs=[{"meanError": None}],
                agreement={"shown": 0.891},
            ),
        ],
    }


def found_before(state: Path, archive: Path, candidates: tuple[str, ...], winner: str | None) -> None:
    """Put what a search found into the state folder; with a winner its build, in bfloat16."""
    import torch

    from marserve_handlers.optimising.builds import find_build
    from marserve_handlers.optimising.call_arrays import Call
    from marserve_handlers.optimising.machine import cpu_flags, versions
    from marserve_handlers.optimising.material import Material
    from marserve_handlers.optimising.sample_calls import write_samples

    threads = max(1, count_cores())
    taken = Taken(LOAD, Optimising(candidates, is_asked=True), (), (), 1)
    order = Order(taken, "", 0.25, batch_size=4, threads=threads, within_s=1.0, memory_bytes=1)
    folder = state / "optimised" / key_of(order, digest_of(archive), machine_of())
    folder.mkdir(parents=True, mode=0o700)
    report = report_of(winner, threads)
    if winner is not None:
        names: dict[str, Any] = {}
        exec(NET, names)
        calls, build = [Call((torch.randn(1, 4),), {}) for _ in range(3)], find_build(winner)
        (folder / "optimised").mkdir()
        build.build(Material(names["Net"]().eval(), calls, 4), folder / "optimised")
        made = build.load(lambda: names["Net"]().eval(), folder / "optimised", 1)
        write_samples(folder / "optimised" / "samples.npz", made, calls)
        machine = {"cpu": cpu_flags(), "versions": versions()}
        proof = {"format": 1, "build": winner, "files": {}, **machine, "ratios": {"1": [2.34, 2.1, 2.6]}}
        (folder / "MAR-INF").mkdir()
        (folder / "MAR-INF" / "optimised.json").write_text(json.dumps(proof))
    write_found(folder, report, may_change=False)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with a model whose build serves, one whose parent stays, and one without the key."""
    pytest.importorskip("torch")
    folder = tmp_path_factory.mktemp("built")
    state = folder / "state"
    serves = archive_of(folder / "net.mar", "batchSize: 4\noptimise: {candidates: [bf16]}\n")
    parent = archive_of(folder / "slow.mar", "batchSize: 4\noptimise: {candidates: [onnx]}\n")
    archive_of(folder / "plain.mar", "batchSize: 4\n")
    found_before(state, serves, ("bf16",), "bf16")
    found_before(state, parent, ("onnx",), None)
    settings = {"load_models": "all", "default_workers_per_model": "1", "state_folder": str(state)}
    with Server(folder, entry="marserve", store=folder, settings=settings) as running:
        for name, wanted in (("net", "serves"), ("slow", "parent")):
            for _ in poll(60, f"what serves {name}"):
                if running.client.get(f"{running.management}/models/{name}/optimise").json()["state"] == wanted:
                    break
        yield running


def test_the_build_that_serves_is_shown_with_the_table_of_all(browser: Any, server: Server) -> None:
    """From the model's page; what was refused has its reason, as text."""
    browsing = Browsing(browser)
    page = browsing.open(f"{server.management}/#/models/net", "a:text-is('Builds')")
    page.click("a:text-is('Builds')")
    page.wait_for_selector("table.builds")
    browsing.picture("optimise-light-1100")

    text = page.inner_text("main")
    assert "A build serves: bf16" in text
    assert "1 worker with bf16; found by an earlier search" in text
    assert "2.34 ×" in text
    results = dict(
        zip(
            page.locator("table.builds tbody th").all_inner_texts(),
            page.locator("table.builds tbody td:last-child").all_inner_texts(),
            strict=True,
        )
    )
    assert results == {
        "channels-last": "equal",
        "bf16": "serves",
        "onnx": f"onnxscript is not installed: {HOSTILE}",
        "onnx-int8": "47 of 48 inputs agree by top-1 of output: 89.1 % is shown, 98.0 % is wanted",
    }
    assert "not finite" in text
    assert not page.evaluate(NAMELESS)
    assert page.evaluate("window.hit") is None
    browsing.check_calm(server.management)


def test_a_parent_that_stays_is_shown_with_the_reason(browser: Any, server: Server) -> None:
    """On a phone, in the dark."""
    browsing = Browsing(browser, scheme="dark", size=PHONE)
    page = browsing.open(f"{server.management}/#/optimise/slow/1.0", "table.builds")
    browsing.picture("optimise-dark-390")

    text = page.inner_text("main")
    assert "The parent serves" in text
    assert "channels-last, bf16 are equal and not surely faster" in text
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert not page.evaluate(NAMELESS)


def test_a_model_without_the_key_says_what_to_do(browser: Any, server: Server) -> None:
    """And an unknown one has a way back."""
    browsing = Browsing(browser)
    page = browsing.open(f"{server.management}/#/optimise/plain", "#standing")
    assert "add optimise: {candidates: auto} to model-config.yaml" in page.inner_text("main")
    browsing.picture("optimise-none-light-1100")

    page = browsing.open(f"{server.management}/#/optimise/nobody", "[role=alert]")
    assert "Model not found: nobody" in page.inner_text("[role=alert]")
