"""What a search found is used again for the same archive on the same machine, and for nothing else."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from marserve.agent_link import ArchiveRef
from marserve.archive.checkpoints.contents import Checkpoint
from marserve.archive.contents.manifest import Manifest
from marserve.archive.contents.model_config import ModelConfig
from marserve.optimise.background.cache import (
    Damaged,
    NotFit,
    archive_of,
    digest_below,
    folders_in,
    forget_found,
    key_of,
    machine_of,
    read_found,
    write_found,
    write_refused,
)
from marserve.optimise.background.order import Order, read_order
from marserve.optimise.taken import Taken
from marserve.option_values import Optimising, Sample
from marserve.registry.catalogue.plan import FoundCheckpoint, Plan, Unpacked
from marserve.registry.intake.plan import make_plan
from marserve.registry.intake.registration import RegisterParameters, RegistryOptions

ROW: dict[str, Any] = {"whyNot": None, "faults": [], "outputs": [], "agreement": None, "ratios": []}
REPORT: dict[str, Any] = {
    "winner": "onnx",
    "builds": [{"name": "bf16", "passed": False, **ROW}, {"name": "onnx", "passed": True, **ROW}],
}


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    """A version of an archive."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "h.py").write_text("def handle(data, context):\n    return data\n")
    unpacked = Unpacked(folder, Manifest(), ModelConfig(), origin=ArchiveRef("a" * 64, "m.mar"))
    return make_plan(RegisterParameters("m.mar", model_name="m", handler="h.py"), unpacked, RegistryOptions())


@pytest.fixture
def order(plan: Plan) -> Order:
    """The order for it."""
    return Order(Taken.of(plan), "/made", 0.25, batch_size=4, threads=2, within_s=100.0, memory_bytes=1 << 30)


def taken(order: Order, **other: Any) -> Order:
    """With other things taken in."""
    return replace(order, taken=replace(order.taken, **other))


def test_whatever_a_search_depends_on_gives_another_folder(order: Order) -> None:
    """And a place, a share or a limit does not."""
    machine, archive, load = machine_of(), "a" * 64, order.taken.load
    first = key_of(order, archive, machine)

    others = [
        key_of(order, "b" * 64, machine),
        *(
            key_of(each, archive, machine)
            for each in (
                replace(order, batch_size=8),
                replace(order, threads=1),
                taken(order, optimise=Optimising(("onnx",), is_asked=True)),
                taken(order, samples=(Sample(body=b"1"),)),
                taken(order, load=replace(load, packages="/environments/1")),
                taken(order, load=replace(load, handler="other.py")),
            )
        ),
        *(key_of(order, archive, {**machine, part: "other"}) for part in machine),
    ]
    same = [
        replace(order, folder="/x", share=1.0),
        replace(order, within_s=1.0),
        taken(order, load=replace(load, model_dir="/x")),
    ]

    assert len({first, *others}) == 1 + len(others)
    assert {key_of(each, archive, machine) for each in same} == {first}


def test_an_archive_that_is_a_folder_counts_by_its_files(plan: Plan) -> None:
    """What Python compiles beside them does not."""
    folder = Path(plan.load.model_dir)
    bare = dataclasses.replace(plan, unpacked=dataclasses.replace(plan.unpacked, origin=None))
    assert archive_of(plan) == "a" * 64
    first = archive_of(bare)
    (folder / "__pycache__").mkdir()
    (folder / "__pycache__" / "h.pyc").write_bytes(b"x")
    assert archive_of(bare) == first

    (folder / "h.py").write_text("def handle(data, context):\n    return []\n")

    assert archive_of(bare) != first


def test_weights_beside_the_archive_count_by_their_files(plan: Plan, tmp_path: Path) -> None:
    """Else a build of earlier weights would serve once they are replaced. Those in the archive are of its digest."""
    weights = tmp_path / "weights"
    weights.mkdir()
    (weights / "a.safetensors").write_bytes(b"1")
    read = Checkpoint("safetensors", {})

    def digest(*, is_beside: bool, content: str = "") -> str:
        found = FoundCheckpoint(weights, read, may_map=False, is_beside=is_beside, content=content)
        return archive_of(dataclasses.replace(plan, unpacked=dataclasses.replace(plan.unpacked, checkpoint=found)))

    first, fetched = digest(is_beside=True), digest(is_beside=True, content="x")
    assert digest(is_beside=False) == archive_of(plan) != first
    (weights / "a.safetensors").write_bytes(b"2")

    assert digest(is_beside=True) != first
    assert digest(is_beside=True, content="x") == fetched != digest(is_beside=True, content="y")


def test_the_machine_is_its_processor_and_its_packages(tmp_path: Path) -> None:
    """Instructions in any order; a machine that does not say it is one, too."""
    for name, flags in (("a", "sse avx2"), ("b", "avx2 sse"), ("c", "sse avx2 amx_int8")):
        (tmp_path / name).write_text(f"model name\t: Chip 7\nflags\t\t: {flags}\nmodel name\t: other\nbugs\t: x\n")

    a, b, c, none = (machine_of(tmp_path / name) for name in ("a", "b", "c", "none"))

    assert a == b != c
    assert {"processor", "packages", "tools", "python", "marserve"} == set(a)
    assert a["processor"] == {"model name": "7 Chip", "flags": "avx2 sse"}
    assert none["processor"] == {}


def whole(folder: Path) -> Path:
    """A folder with a build."""
    (folder / "optimised").mkdir(parents=True)
    (folder / "optimised" / "model.onnx").write_bytes(b"onnx")
    write_found(folder, REPORT, may_change=False)
    return folder


def test_what_was_written_is_read_again(tmp_path: Path) -> None:
    """With its winner, and the digest of each file."""
    found = read_found(whole(tmp_path / "found"))

    assert found.winner == REPORT["builds"][1]
    assert list(found.files) == ["optimised/model.onnx"]
    assert not list((tmp_path / "found").glob("*.part"))


def test_native_code_that_was_not_built_here_is_not_used(tmp_path: Path) -> None:
    """A file that was changed, one that came later, one that is gone, a result of another form."""
    for spoil in (
        lambda folder: (folder / "optimised" / "model.onnx").write_bytes(b"other"),
        lambda folder: (folder / "optimised" / "more.so").write_bytes(b"native"),
        lambda folder: (folder / "optimised" / "more.so").symlink_to("/usr/lib/other.so"),
        lambda folder: (
            (folder / "optimised" / "model.onnx").rename(folder.parent / "there")
            or (folder / "optimised" / "model.onnx").symlink_to(folder.parent / "there")
        ),
        lambda folder: (folder / "optimised" / "model.onnx").unlink(),
        lambda folder: (folder / "result.json").write_text("{"),
        lambda folder: (folder / "result.json").write_text('{"report": {}, "files": {}, "format": 9}'),
    ):
        folder = whole(tmp_path / f"f{len(list(tmp_path.iterdir()))}")
        spoil(folder)
        with pytest.raises(Damaged):
            read_found(folder)


@pytest.mark.parametrize(
    ("was", "now"),
    [
        (b'"winner":"onnx"', b'"winner":"on\xffx"'),
        (b'"winner":"onnx"', b'"winner":"bf16"'),
        (b'"winner":"onnx"', b'"winner":["onnx"]'),
        (b'"winner":"onnx",', b""),
        (b'"builds":[', b'"builds":' + b"[" * 100_000),
        (b'"builds":[', b'"builds":[1,'),
        (b'"ratios":[]', b'"ratios":[{"rows":1,"threads":1,"middle":"9","low":2,"high":3}]'),
        (b'"outputs":[]', b'"outputs":[{}]'),
        (b'"agreement":null', b'"agreement":0.9'),
    ],
)
def test_a_result_with_other_values_than_were_written_is_damaged(was: bytes, now: bytes, tmp_path: Path) -> None:
    """So the search begins anew, and no start fails again and again; a parent comes back nevertheless."""
    folder = whole(tmp_path / "found")
    text = (folder / "result.json").read_bytes()
    assert was in text
    (folder / "result.json").write_bytes(text.replace(was, now))

    with pytest.raises(Damaged, match="cannot be read"):
        read_found(folder)
    with pytest.raises(Damaged):
        write_refused(folder, "3 workers died")


def test_a_folder_where_others_may_write_is_not_used(tmp_path: Path) -> None:
    """They could put code there that runs as the server."""
    folder = whole(tmp_path / "found")
    folder.chmod(0o777)

    with pytest.raises(NotFit, match="others on this machine may write there") as refused:
        read_found(folder)
    assert not isinstance(refused.value, Damaged)


def test_a_folder_is_whole_once_its_result_is_there(tmp_path: Path) -> None:
    """Before, and after it was forgotten, it is missing: the next one makes it."""
    folders = folders_in(tmp_path)
    lease = folders.lease("key")
    assert lease is not None
    assert lease.is_exclusive
    folders.publish(whole(folders.stage("key") / "whole"), "key")
    assert folders.share(lease)
    second = folders.lease("key")
    assert second is not None
    assert not second.is_exclusive
    for each in (lease, second):
        each.release()

    forget_found(lease.folder)

    third = folders.lease("key")
    assert third is not None
    assert third.is_exclusive
    third.release()
    assert [path.name for path in tmp_path.iterdir()] == ["optimised"]


def test_an_order_goes_through_a_pipe(order: Order, tmp_path: Path) -> None:
    """Whole; a server that ended meanwhile is none."""
    file = tmp_path / "order"
    file.write_bytes(order.write())
    with file.open("rb") as read:
        assert read_order(read) == order

    for data in (b"", order.write()[:-1]):
        file.write_bytes(data)
        with file.open("rb") as read, pytest.raises(EOFError):
            read_order(read)


def test_a_digest_of_files_knows_their_names(tmp_path: Path) -> None:
    """Two files that changed places are another archive."""
    (tmp_path / "a").write_text("1")
    (tmp_path / "b").write_text("2")
    first = digest_below(tmp_path)
    (tmp_path / "a").write_text("2")
    (tmp_path / "b").write_text("1")
    assert digest_below(tmp_path) != first


def test_a_digest_of_files_knows_what_links_lead_to(tmp_path: Path) -> None:
    """Weights may lie elsewhere, and a link to other ones is another archive; one that leads nowhere is none."""
    folder, elsewhere = tmp_path / "model", tmp_path / "elsewhere"
    for each in (folder, elsewhere):
        each.mkdir()
    weights, link = elsewhere / "1.pt", folder / "model.pt"
    weights.write_bytes(b"1")
    link.symlink_to(weights)
    first = digest_below(folder)

    weights.write_bytes(b"2")
    second = digest_below(folder)
    link.unlink()
    link.symlink_to(elsewhere / "none")
    third = digest_below(folder)
    link.unlink()
    link.symlink_to(elsewhere)
    fourth = digest_below(folder)

    assert len({first, second, third, fourth}) == 4
    link.unlink()
    link.symlink_to(folder)
    assert digest_below(folder)  # a circle ends
