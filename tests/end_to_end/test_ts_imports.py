"""Every name that TorchServe's handlers can import is there inside a real worker."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from support.inventory import inventory
from support.server import Server, make_archive

pytestmark = pytest.mark.torch

HANDLER = """
import importlib
import json

missing = []
for module, names in json.load(open("names.json")).items():
    try:
        loaded = importlib.import_module(module)
        missing += [f"{module}.{name}" for name in names if not hasattr(loaded, name)]
    except Exception as error:
        missing.append(f"{module}: {error!r}")


def handle(data, context):
    return data and [{"missing": missing} for _ in data]
"""


def test_all_names_are_there_in_a_worker(tmp_path: Path) -> None:
    """All modules of the inventory, in the process and the folder that handlers run in."""
    pytest.importorskip("torch")
    modules = inventory("ts_imports")
    names = {entry["module"]: [name["name"] for name in entry["names"]] for entry in modules}
    store = tmp_path / "store"
    store.mkdir()
    make_archive(store / "imports.mar", HANDLER, **{"names.json": json.dumps(names).encode()})

    with Server(tmp_path, store=store) as server:
        server.register("imports.mar").raise_for_status()

        assert server.predict("imports", b"x").json() == {"missing": []}
