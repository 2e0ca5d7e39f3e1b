"""Tests for what a template looks at before it lets itself be forked.

With the pool around it: `tests/pool/launchers/test_launcher.py`.
"""

from __future__ import annotations

import os
import random
import resource
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import pytest

from marserve.messages import HEAVY_MODULES, Load, Preload, Stop, Templated
from marserve.worker import template
from marserve.worker.template import (
    child_processes,
    heavy_modules,
    lasting_threads,
    open_descriptors,
    refusals,
    reseed,
    thread_names,
)
from support.model_folders import write_model
from support.running_pool import worker_environment
from support.worker_process import WorkerUnderTest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nothing is forked")


def test_a_worker_starts_without_what_few_models_need() -> None:
    """asyncio is a third of what it would import, and every template and worker holds what they import."""
    spared = ("asyncio", "ssl", "random", "difflib", "concurrent.futures", "queue")
    imports = "import sys, marserve.worker.loop, marserve.worker.template\n"

    told = subprocess.run(
        [sys.executable, "-P", "-c", f"{imports}print(sorted(set({spared}) & set(sys.modules)))"],
        env={**worker_environment()},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )

    assert told.stdout == "[]\n"


@contextmanager
def holding_descriptors_up_to(number: int) -> Iterator[None]:
    """Whatever is opened meanwhile gets a larger number."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < number + 100:
        pytest.skip(f"`ulimit -Hn` is {hard}")
    held = [os.open(os.devnull, os.O_RDONLY)]
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, number + 100), hard))
        while held[-1] < number:
            held.append(os.dup(held[0]))
        yield
    finally:
        for descriptor in held:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def found(word: str, known: dict[int, str]) -> list[str]:
    """The refusals that speak of `word`; the process that runs tests may have others, of its own."""
    return [reason for reason in refusals(known) if word in reason]


def test_what_was_open_before_is_no_reason() -> None:
    """It is the template's own."""
    with socket.socket():
        known = open_descriptors()

        assert found("descriptor", known) == []


def test_a_new_socket_is_a_reason_and_a_closed_one_none() -> None:
    """Looked at, not guessed."""
    known = open_descriptors()
    opened = socket.socket()
    number = opened.fileno()

    during = found("socket", known)
    opened.close()
    after = found("socket", known)

    assert during == [f"a socket was opened (descriptor {number})"]
    assert after == []


def test_a_socket_in_place_of_one_that_was_known_is_a_reason() -> None:
    """The number alone says nothing."""
    first = socket.socket()
    known = open_descriptors()
    number = first.fileno()
    first.close()

    with socket.socket() as second:
        assert second.fileno() == number
        assert found("socket", known) == [f"a socket was opened (descriptor {number})"]


def test_files_that_are_only_read_are_no_reason(tmp_path: Path) -> None:
    """Forks share the place in them, which weights that were read do not mind."""
    (tmp_path / "weights").write_bytes(b"x")
    known = open_descriptors()

    with (tmp_path / "weights").open("rb"):
        assert found("file", known) == []
    with (tmp_path / "weights").open("r+b"):
        assert found("file", known) == [f"a file was opened for writing: {tmp_path / 'weights'}"]


def test_a_second_thread_is_named() -> None:
    """So that the author knows whose it is."""
    import threading

    names = lasting_threads()  # a thread of a test before may be ending still
    leave = threading.Event()
    thread = threading.Thread(target=leave.wait)
    thread.start()
    try:
        assert len(thread_names()) == len(names) + 1
        assert len(found("threads run", open_descriptors())) == 1
    finally:
        leave.set()
        thread.join()


def test_a_child_is_named() -> None:
    """By its number."""
    import subprocess

    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        assert child.pid in child_processes()
        assert any(str(child.pid) in reason for reason in found("child processes", open_descriptors()))
    finally:
        child.communicate(b"\n")
    assert child.pid not in child_processes()


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """No heavy module is loaded, as far as is seen; a test puts its own there."""
    for name in HEAVY_MODULES:
        monkeypatch.delitem(sys.modules, name, raising=False)


def put_module(monkeypatch: pytest.MonkeyPatch, name: str, file: str | None) -> None:
    """A module of that name from that file."""
    module = ModuleType(name)
    if file is not None:
        module.__file__ = file
    monkeypatch.setitem(sys.modules, name, module)


@pytest.mark.usefixtures("modules")
def test_heavy_modules_are_those_that_were_loaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A template that only imports has them ready then."""
    put_module(monkeypatch, "torch", "/site-packages/torch/__init__.py")
    put_module(monkeypatch, "PIL.Image", "/site-packages/PIL/Image.py")

    assert heavy_modules([str(tmp_path)]) == ["torch", "PIL.Image"]


@pytest.mark.usefixtures("modules")
def test_modules_that_the_archive_brings_itself_are_not_imported_for_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What is installed under that name is another one."""
    own, alike = tmp_path / "model", tmp_path / "model-two"
    put_module(monkeypatch, "transformers", str(own / "transformers" / "__init__.py"))
    put_module(monkeypatch, "numpy", str(alike / "numpy.py"))
    put_module(monkeypatch, "torch", None)

    assert heavy_modules([str(own), ""]) == ["numpy"]


def test_a_seed_makes_random_numbers_of_its_own() -> None:
    """The same for the same seed, others for another."""
    state = random.getstate()
    drawn = []
    try:
        for seed in (1, 1, 2**63 - 1):
            reseed(seed)
            numpy = sys.modules.get("numpy")
            drawn.append((random.random(), float(numpy.random.rand()) if numpy else 0.0))
    finally:
        random.setstate(state)

    assert drawn[0] == drawn[1]
    assert drawn[0] != drawn[2]


def test_a_template_reports_what_it_loaded_and_ends_when_told(tmp_path: Path) -> None:
    """Its talk with the server, spelled out."""
    with WorkerUnderTest(role="template") as template:
        template.tell(write_model(tmp_path, "import logging\ndef handle(data, context): return data\n"))
        report, _ = template.hear()
        template.tell(Stop())

        assert type(report) is Templated
        assert report.refusals == []
        assert report.seconds > 0
        assert template.end()[0] == 0


def test_a_template_imports_what_there_is_and_passes_over_the_rest() -> None:
    """A module that was there for one model may be missing here; the one behind it is imported all the same."""
    with WorkerUnderTest(role="template") as template:
        template.tell(Preload(["no_such_module", "PIL.Image", "no_such_module.either"]))

        report, _ = template.hear()

        assert type(report) is Templated
        # Pillow 10 imports numpy.
        assert (report.refusals, [name for name in report.preload if name != "numpy"]) == ([], ["PIL.Image"])


def test_a_template_ends_with_its_control_connection(tmp_path: Path) -> None:
    """A server that died can say nothing more."""
    with WorkerUnderTest(role="template") as template:
        order: Load = write_model(tmp_path, "def handle(data, context): return data\n")
        template.tell(order)
        template.hear()

        template.connection.close()

        assert template.end()[0] == 0


def test_a_template_that_is_sent_noise_ends() -> None:
    """It does not go on guessing."""
    with WorkerUnderTest(role="template") as template:
        template.connection.sendall(b"not a frame at all, but long enough")

        assert template.end()[0] == 1


def test_the_listing_of_descriptors_does_not_list_itself() -> None:
    """What it shows is open when it is shown."""
    assert all(os.path.exists(f"/proc/self/fd/{number}") for number in open_descriptors())


def test_a_template_hears_orders_on_descriptors_of_any_number() -> None:
    """It gets the number that the connection has in the server, which is large where many models are."""
    with holding_descriptors_up_to(1100), WorkerUnderTest(role="template") as template:
        template.tell(Preload([]))
        report, _ = template.hear()
        template.tell(Stop())

        assert type(report) is Templated
        assert template.end()[0] == 0


@pytest.mark.parametrize(
    "target",
    [
        *("/dev/nvidiactl", "/dev/nvidia0", "/dev/nvidia-uvm", "/dev/kfd", "/dev/dri/renderD128"),
        *("/dev/dxg", "/dev/nvmap", "/dev/nvhost-ctrl-gpu"),
    ],
)
def test_an_accelerator_that_was_opened_is_a_reason(monkeypatch: pytest.MonkeyPatch, target: str) -> None:
    """Whichever library did so: asking CUDA how many devices there are begins its driver, and torch need not know."""
    known = open_descriptors()
    monkeypatch.setattr(template, "open_descriptors", lambda: {**known, 99: target})

    assert found("accelerator", known) == [f"an accelerator was opened (descriptor 99, {target})"]
    assert found("accelerator", {**known, 99: target}) == []


@pytest.mark.parametrize(("runtime", "reason"), [("cuda", "a CUDA context"), ("xpu", "an XPU context")])
def test_a_context_on_a_device_is_a_reason(monkeypatch: pytest.MonkeyPatch, runtime: str, reason: str) -> None:
    """As torch tells it; one that has only imported torch has none."""
    torch = ModuleType("torch")
    for name in ("cuda", "xpu"):
        module = ModuleType(name)
        module.is_initialized = lambda name=name: name == runtime  # type: ignore[attr-defined]
        setattr(torch, name, module)
    monkeypatch.setitem(sys.modules, "torch", torch)

    assert found("context", open_descriptors()) == [f"{reason} is initialised"]
