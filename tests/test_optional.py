"""What is said of a package that an extra brings: missing, too old, or broken, with the versions, on one line."""

from __future__ import annotations

import logging
import re
import sys
from importlib import metadata
from typing import Any

import pytest

from marserve.api import tls
from marserve.app import server
from marserve.app.grpc_ports import bind_grpc, taken_grpc_ports
from marserve.errors import BadSettings
from marserve.machine.device_readings import DeviceReader
from marserve.machine.vendors.tools import ToolOutput
from marserve.optional import is_the_packages, trouble

REQUIRES = [
    "fastapi>=0.165",
    "h2>=4.3; extra == 'grpc'",
    'protobuf>=7 ; extra == "grpc"',
    "obstore>=0.12; extra == 'cloud'",
]


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Versions of packages, to be changed by the test."""
    versions = {"h2": "4.4.1", "protobuf": "7.1", "obstore": "0.12.0"}

    def version(name: str) -> str:
        if name not in versions:
            raise metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(metadata, "requires", lambda name: REQUIRES)
    monkeypatch.setattr(metadata, "version", version)
    return versions


def test_what_is_missing_is_named_with_its_version(installed: dict[str, str]) -> None:
    """All that the extra brings and that is not there."""
    del installed["protobuf"]
    assert trouble("grpc", ModuleNotFoundError("No module named 'google'")) == "protobuf>=7 is not installed"
    del installed["h2"]
    assert trouble("grpc", ImportError()) == "h2>=4.3, protobuf>=7 are not installed"


@pytest.mark.parametrize("old", ["6.33.6", "6", "5.29.0rc1", "4.25.3"])
def test_what_is_too_old_is_named_with_both_versions(installed: dict[str, str], old: str) -> None:
    """And with the error, whose further lines are left out."""
    installed["protobuf"] = old

    said = trouble("grpc", RuntimeError("gencode 7.35.1\nand a page of advice"))

    assert said == f"protobuf {old} is installed, and protobuf>=7 is needed (RuntimeError: gencode 7.35.1)"


@pytest.mark.parametrize("new", ["7", "7.0.0", "8.1", "10.0", "7.1.dev3"])
def test_what_is_new_enough_and_cannot_be_used_says_its_error(installed: dict[str, str], new: str) -> None:
    """Cut where it is long."""
    installed["protobuf"] = new

    said = trouble("grpc", OSError("libstdc++.so.6: " + "x" * 500))

    found = f"h2 4.4.1 (>=4.3 is needed), protobuf {new} (>=7 is needed)"
    assert said.startswith(f"{found} cannot be used (OSError: libstdc++.so.6: xxx")
    assert len(said) < 300


def test_a_mistake_in_marserve_is_not_blamed_on_a_package(installed: dict[str, str]) -> None:
    """It would close ports in silence; an error of a package, or one of the wrong version, does so."""
    here = {"__name__": "marserve.api.grpc.schema"}
    with pytest.raises(NameError) as mistake:
        exec("undefined", here)
    with pytest.raises(TypeError) as broken:
        exec("len(1)", {"__name__": "google.protobuf.internal"})

    assert not is_the_packages("grpc", mistake.value)
    assert not is_the_packages("grpc", ModuleNotFoundError("", name="marserve.api.gone"))
    assert is_the_packages("grpc", broken.value)
    assert is_the_packages("grpc", ModuleNotFoundError("", name="h2"))
    installed["h2"] = "3.2"
    assert is_the_packages("grpc", mistake.value)


class Broken:
    """Finds these packages, and raises what it was given where one is imported."""

    def __init__(self, error: BaseException, *names: str) -> None:
        self.error, self.names = error, names

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        """Raise for the names."""
        if name.partition(".")[0] in self.names:
            raise self.error


class Panic(BaseException):
    """What a broken extension module raises that was written in Rust."""


def break_packages(monkeypatch: pytest.MonkeyPatch, error: BaseException, *names: str) -> None:
    """Have imports of these packages fail from here on, in modules of marserve that use them too."""
    users = ("marserve.api.grpc", *names)
    for module in [name for name in sys.modules if name.startswith(users)]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setattr(sys, "meta_path", [Broken(error, *names), *sys.meta_path])


class Parts:
    """The settings alone: nothing else is looked at before the packages are."""

    class settings:
        grpc_inference_port, grpc_management_port = 7070, 7071


@pytest.mark.parametrize(
    "error",
    [
        ImportError("no"),
        RuntimeError("gencode"),
        AttributeError("no such"),
        OSError("lib"),
        SystemExit(3),
        Panic("lock"),
    ],
)
def test_broken_packages_close_the_grpc_ports_in_one_line(
    error: BaseException, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The server starts without them; a dry run of the start says nothing of ports."""
    break_packages(monkeypatch, error, "grpc", "google")
    parts: Any = Parts

    assert bind_grpc(parts) == []
    assert list(taken_grpc_ports(parts.settings)) == []

    [record] = caplog.records
    assert record.levelno == logging.WARNING
    assert record.getMessage().startswith("gRPC ports 7070 and 7071 stay closed: ")
    assert re.search(r"h2 [0-9.]+ \(>=[0-9.]+ is needed\), protobuf [0-9.]+ \(>=", record.getMessage())
    assert f"cannot be used ({type(error).__name__}: {error})" in record.getMessage()
    assert record.getMessage().endswith("pip install 'marserve[grpc]' opens them")


def test_ctrl_c_while_the_packages_are_imported_ends_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is no fault of theirs."""
    break_packages(monkeypatch, KeyboardInterrupt(), "grpc", "google")
    parts: Any = Parts

    with pytest.raises(KeyboardInterrupt):
        bind_grpc(parts)


def test_a_broken_uvloop_leaves_asyncios_loop(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Slower, and said."""

    async def serve() -> None:
        """Nothing."""

    break_packages(monkeypatch, ImportError("undefined symbol: uv_now"), "uvloop")

    server._run_loop()(serve())

    assert "uvloop cannot be used (ImportError: undefined symbol: uv_now)" in caplog.text


def test_a_broken_nvml_leaves_nvidias_command(caplog: pytest.LogCaptureFixture) -> None:
    """Whatever importing it raises."""
    caplog.set_level(logging.INFO)

    def load() -> Any:
        raise OSError("libnvidia-ml.so: wrong ELF class")

    reader = DeviceReader("nvidia", lambda command: ToolOutput(""), load)

    reader.read()

    assert not reader.is_quick
    assert "Devices are read by nvidia-smi" in caplog.text
    assert "OSError: libnvidia-ml.so: wrong ELF class" in caplog.text


def test_a_panic_of_cryptography_is_a_sentence_about_the_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    """An https address with its key store cannot be served: the start is refused, in words."""
    break_packages(monkeypatch, Panic("Python API call failed"), "cryptography")

    with pytest.raises(BadSettings, match=r"needs the library cryptography, and cryptography .*Panic: Python API"):
        tls._cryptography("x509", "keystore", "is a PKCS12 file")
