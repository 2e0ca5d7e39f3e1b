"""`docs/client.md`: each block is run, in order, against a real server, and says what stands below it."""

from __future__ import annotations

import contextlib
import io
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from marserve_client import setup
from support.pages import block, blocks
from support.server import Server, make_archive

PAGE = "docs/client.md"
MODELS = ("sums", "greet", "tokens")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with the models that the page names, and a folder to type in."""
    folder = tmp_path_factory.mktemp("client-page")
    store = folder / "store"
    store.mkdir()
    for name in MODELS:
        config = "minWorkers: 1\nmaxWorkers: 1\n"
        make_archive(store / f"{name}.mar", block("docs/declared-handlers.md", name), config=config)
    with Server(folder, entry="marserve", store=store, settings={"load_models": "none"}) as server:
        for name in MODELS:
            server.register(f"{name}.mar").raise_for_status()
        yield server


def test_each_block_says_what_the_page_says(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One program after another, as a reader types them; nothing but the ports is another."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(setup, "LOCAL_INFERENCE", server.inference)
    monkeypatch.setattr(setup, "LOCAL_MANAGEMENT", server.management)
    shutil.copytree(server.store, tmp_path / "model_store")
    says = {one.name: one.text for one in blocks(PAGE) if one.language == "text"}
    programs = [one for one in blocks(PAGE) if one.language == "python"]
    names: dict[str, Any] = {"__name__": "page"}

    said: dict[str | None, str] = {}
    for program in programs:
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(compile(program.text, f"{PAGE}:{program.name}", "exec"), names)
        if printed.getvalue():
            said[f"{program.name}-says"] = printed.getvalue()
    for value in names.values():
        if isinstance(value, names["Client"]):
            value.close()

    assert said == says
    assert len(programs) >= 10


def test_no_block_is_left_out() -> None:
    """Programs are run above, what they print is compared, and the one line of a shell is package tests'."""
    assert {one.language for one in blocks(PAGE)} == {"python", "text", "sh"}
    assert [one.text for one in blocks(PAGE) if one.language == "sh"] == ["pip install marserve-client\n"]
