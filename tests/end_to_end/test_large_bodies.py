"""A large body is held once in the server and once in the worker, and nowhere afterwards."""

from __future__ import annotations

from pathlib import Path

from support.server import Server, make_archive

MEASURE = """
class Measure:
    def initialize(self, context):
        pass
    def handle(self, data, context):
        return [str(len(row["body"])) for row in data]
"""
BODY_BYTES = 40_000_000


def peak_bytes(server: Server) -> int:
    """The most memory that the server's processes have had, added up."""
    lines = [Path(f"/proc/{process.pid}/status").read_text() for process in server.family()]
    return sum(int(text.split("VmHWM:")[1].split()[0]) * 1024 for text in lines)


def resident_bytes(server: Server) -> int:
    """The memory that the server's processes have now, added up."""
    return sum(process.memory_info().rss for process in server.family())


def test_a_large_body_costs_little_more_than_two_of_it(tmp_path: Path) -> None:
    """40 MB in, a few bytes out, three times: the peak stays at two copies, and then none is left."""
    store = tmp_path / "store"
    store.mkdir()
    make_archive(store / "measure.mar", MEASURE)
    with Server(tmp_path, store=store, settings={"max_request_size": str(2 * BODY_BYTES)}) as server:
        server.register("measure.mar").raise_for_status()
        server.predict("measure", b"x" * 100)
        peak_before, resident_before = peak_bytes(server), resident_bytes(server)

        answers = [server.predict("measure", b"x" * BODY_BYTES) for _ in range(3)]

        assert [answer.text for answer in answers] == [str(BODY_BYTES)] * 3
        assert peak_bytes(server) - peak_before < 2.5 * BODY_BYTES
        assert resident_bytes(server) - resident_before < 0.5 * BODY_BYTES
