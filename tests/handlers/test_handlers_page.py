"""The first steps of docs/handlers.md work as they are typed."""

from __future__ import annotations

import re
import shlex
import textwrap
from pathlib import Path
from typing import Any

import pytest

from marserve.api.http.request_body import read_parts
from marserve.messages import Item, pack_head
from marserve.worker.rows import rows_of
from support.command_line import marserve

PAGE = (Path(__file__).parents[2] / "docs" / "handlers.md").read_text()
FIRST = PAGE.partition("## The shortest one")[2].partition("\n## ")[0]
HANDLER, COMMANDS, CLASS = (
    textwrap.dedent(block).strip() for block in re.findall(r"(?:^(?: {4}.*)?\n)*^ {4}.*$", FIRST, re.MULTILINE)
)
ARCHIVE, REGISTER, *CURLS = COMMANDS.splitlines()


def row_of(curl: str, folder: Path) -> dict[str, Any]:
    """What a handler gets of this command; `-d` alone is a form to curl, `-T` has no content type."""
    words = shlex.split(curl)
    given = dict(zip(words[1:-1:2], words[2:-1:2], strict=True))
    kind = given.get("-H", "").partition(": ")[2] or ("application/x-www-form-urlencoded" if "-d" in given else None)
    body = given["-d"].encode() if "-d" in given else (folder / given["-T"]).read_bytes()
    parts = read_parts(body, kind)
    item = Item("1", [(part.name, part.content_type) for part in parts], pack_head([], []), None)
    return rows_of([item], [bytearray(part.body) for part in parts], decode_input=True)[0]


@pytest.mark.parametrize("curl", CURLS, ids=lambda curl: curl.split(" http")[0])
@pytest.mark.parametrize("form", ["function", "class"])
def test_the_shortest_handler_answers_what_curl_sends(curl: str, form: str, tmp_path: Path) -> None:
    """Each command of the page, with the content type that curl gives it."""
    (tmp_path / "handler.py").write_text("hello")
    names: dict[str, Any] = {}
    exec(f"{HANDLER}\n\n{CLASS}", names)

    handle = names["handle"] if form == "function" else names["Shout"]().handle
    (answer,) = handle([row_of(curl, tmp_path)], None)

    assert answer in ("HELLO", b"HELLO")


def test_the_archive_lies_where_its_registration_looks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In `model_store`, the store of a server that is started in the same folder, by the name that is registered."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "handler.py").write_text(HANDLER)

    assert marserve(*ARCHIVE.split()[1:]).status == 0

    assert (tmp_path / "model_store" / REGISTER.split()[-1]).is_file()
    assert len(CURLS) == 3
