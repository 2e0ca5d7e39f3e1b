"""What a type checker knows of the clients' methods, which are made of the functions that build calls."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

PROGRAM = """\
from marserve_client import AsyncClient, Client, Event


async def use(client: Client, other: AsyncClient) -> None:
    with client.stream("m", b"x", silence=1) as pieces:
        for piece in pieces:
            chunk: bytes = piece
    for event in client.events("m"):
        data: str = event.data
    async with await other.events("m") as events:
        async for each in events:
            found: Event = each
    text: str = client.predict("m", {"a": 1}, version="1").text
    again: str = (await other.predict("m")).text
    described: list[dict[str, object]] = client.describe("m")
    client.wait_until_ready(timeout=3)
    client.register("m.mar", batch_size=3)
    client.predict(3)  # wrong
    client.predict("m", versoin="1")  # wrong
    number: int = client.predict("m").text  # wrong
    client.infer("m", {"x": [1]}).json()  # wrong
    other.predict("m").text  # wrong
"""


@pytest.mark.system
def test_arguments_and_answers_have_types(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Right uses pass, wrong ones are found, each in its line."""
    mypy = pytest.importorskip("mypy.api", reason="mypy belongs to the group `lint`")
    (tmp_path / "program.py").write_text(PROGRAM)
    monkeypatch.setenv("MYPYPATH", str(ROOT / "client"))

    said, errors, _ = mypy.run(["--strict", "--cache-dir", str(tmp_path / "cache"), str(tmp_path / "program.py")])

    wrong = {number for number, line in enumerate(PROGRAM.splitlines(), 1) if line.endswith("# wrong")}
    assert {int(number) for number in re.findall(r"program\.py:(\d+): error", said)} == wrong, said + errors
