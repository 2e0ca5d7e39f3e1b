"""Tiny distributions with entry points, installed into a folder as pip would leave them."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path

_COUNT = itertools.count()

ENDPOINT = """
from marserve.plugins import EndpointAnswer
import json

class Reports:
    pattern = "reports"
    listener = "management"
    access = "management"

    def answer(self, call):
        told = {
            "method": call.method, "path": call.path, "query": list(call.query), "body": call.body.decode(),
            "models": call.models.names(),
        }
        return EndpointAnswer(json.dumps(told), status=201, headers={"x-report": "yes"})
"""

HOLDS = """
import time
from marserve.plugins import EndpointAnswer

class Holds:
    pattern = "hold"
    listener = "inference"
    access = "inference"

    async def answer(self, call):
        time.sleep(float(call.body))
        return EndpointAnswer("done")
"""

STORE = """
from pathlib import Path

class Store:
    where = "the planted store"
    folder = Path(__file__).parent / "planted"

    def save(self, name, text):
        self.folder.mkdir(exist_ok=True)
        with (self.folder / name).open("xb") as file:
            file.write(text)

    def newest(self):
        names = sorted(path.name for path in self.folder.iterdir()) if self.folder.is_dir() else []
        return (names[-1], (self.folder / names[-1]).read_bytes()) if names else None
"""


class Installation:
    """A folder for `sys.path` or PYTHONPATH."""

    def __init__(self, root: Path) -> None:
        self.folder = root / "site"
        self.folder.mkdir()

    def install(self, name: str, source: str, entry_points: Mapping[str, Mapping[str, str]]) -> None:
        """Install a distribution of one module; `{module}` in an entry point stands for the module's name.

        The name is new each time, so that no earlier test's module is imported in its place.
        """
        module = f"{name.replace('-', '_')}_{next(_COUNT)}"
        (self.folder / f"{module}.py").write_text(source)
        info = self.folder / f"{name.replace('-', '_')}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        lines = []
        for group, points in entry_points.items():
            lines += [f"[{group}]", *(f"{key} = {value.format(module=module)}" for key, value in points.items())]
        (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
