"""A walk of what TorchServe's authors can name: imports, handlers, envelopes, members of contexts and metrics.

The lists are the contract's inventory; each entry is a test. What is left out stands below with its reason.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from marserve_handlers.context import Context, RequestProcessor
from marserve_handlers.envelopes import ENVELOPES
from marserve_handlers.metrics import MetricsCache
from marserve_handlers.support.builtin import BUILT_IN
from marserve_handlers.support.torchserve.internals import ServerInternal
from support.inventory import inventory
from support.model_context import FakeItem, make_context

FOLDER = Path(__file__).resolve().parents[2] / "handlers" / "marserve_handlers" / "ts_compat"

PRIVATE = "a private step of TorchServe's own metrics, which are not summed in workers here"
PYTHON_2 = "a class attribute that has meant nothing since Python 3"

# Class and member to why there is none.
LEFT_OUT = {
    ("CachingMetric", "_validate_and_get_dimensions"): PRIVATE,
    ("CachingMetric", "_validate_metric_value"): PRIVATE,
    ("MetricCacheAbstract", "_add_default_dims"): PRIVATE,
    ("MetricCacheAbstract", "_get_req"): PRIVATE,
    ("MetricCacheAbstract", "_get_or_add_metric"): PRIVATE,
    ("MetricsCacheYamlImpl", "_parse_yaml_file"): PRIVATE,
    ("MetricsCacheYamlImpl", "_parse_metrics_section"): PRIVATE,
    ("ModelLoader", "__metaclass__"): PYTHON_2,
    ("ModelService", "__metaclass__"): PYTHON_2,
}

# The server's own: they can be imported, and say one sentence when they are called.
INTERNAL_CLASSES = (
    "ts.arg_parser.ArgParser",
    "ts.async_service.AsyncService",
    "ts.model_loader.ModelLoader",
    "ts.model_loader.ModelLoaderFactory",
    "ts.model_loader.TsModelLoader",
    "ts.model_service_worker.TorchModelServiceWorker",
    "ts.service.Service",
)


@pytest.fixture(autouse=True)
def _ts_on_the_path(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As a worker sets it up."""
    monkeypatch.syspath_prepend(str(FOLDER))
    yield
    for name in [name for name in sys.modules if name == "ts" or name.startswith("ts.")]:
        del sys.modules[name]


@pytest.mark.torch
@pytest.mark.parametrize("entry", inventory("ts_imports"), ids=lambda entry: entry["module"])
def test_every_module_has_its_names(entry: dict[str, Any]) -> None:
    """With the members of its classes, and parameters that can be given by name where authors call or override it."""
    pytest.importorskip("torch")
    module = importlib.import_module(entry["module"])

    for expected in entry["names"]:
        name = expected["name"]
        assert hasattr(module, name), name
        found = getattr(module, name)
        if expected["kind"] == "class":
            assert_members(found, expected)
        elif "function" in expected["kind"]:
            assert_parameters(found, expected["signature"])


def assert_members(found: type, expected: dict[str, Any]) -> None:
    """Attributes and methods of a class."""
    for name in expected.get("class_attributes", []):
        assert (found.__name__, name) in LEFT_OUT or hasattr(found, name), name
    for member in expected.get("members", []):
        name = member["name"]
        if (expected["name"], name) in LEFT_OUT:
            continue
        assert hasattr(found, name), name
        method = inspect.getattr_static(found, name, None)
        if member["kind"] == "async method" and not is_internal(found):
            assert inspect.iscoroutinefunction(method), name
        if "method" in member["kind"] and inspect.isfunction(method):
            assert_parameters(method, member["signature"])


def is_internal(found: type) -> bool:
    """Whether a class stands in for one of the server's own."""
    return f"{getattr(found, 'place', '')}" in INTERNAL_CLASSES


def assert_parameters(function: Any, signature: str) -> None:
    """The parameters of the signature are all there; `_` is one without a name."""
    here = inspect.signature(function).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in here.values()):
        return
    text = signature.strip("()").replace("[]", "")
    names = [part.partition("=")[0].strip().lstrip("*") for part in text.split(",") if part.strip()]

    assert not [name for name in names if name not in ("_", "self") and name not in here], signature


def test_what_is_left_out_is_really_missing() -> None:
    """A reason that is no longer needed is removed."""
    pytest.importorskip("torch")
    classes = {
        name["name"]: getattr(importlib.import_module(entry["module"]), name["name"])
        for entry in inventory("ts_imports")
        for name in entry["names"]
        if name["kind"] == "class"
    }

    assert not [place for place in LEFT_OUT if hasattr(classes[place[0]], place[1])]


@pytest.mark.parametrize("place", INTERNAL_CLASSES)
def test_the_servers_own_classes_say_what_to_use_instead(place: str) -> None:
    """Made or called, they raise one sentence."""
    module, _, name = place.rpartition(".")
    found = getattr(importlib.import_module(module), name)

    with pytest.raises(ServerInternal, match=f"{place} is part of TorchServe's own server, which marserve replaces"):
        found()
    with pytest.raises(ServerInternal, match=rf"{place}\.load is part of"):
        found.load("m", "folder")


@pytest.mark.parametrize(
    "place",
    ["ts.metrics.system_metrics.cpu_utilization", "ts.protocol.otf_message_handler.retrieve_msg"],
)
def test_the_servers_own_functions_say_what_to_use_instead(place: str) -> None:
    """Called, they raise one sentence."""
    module, _, name = place.rpartition(".")

    with pytest.raises(ServerInternal, match=f"{place} is part of"):
        getattr(importlib.import_module(module), name)()


@pytest.mark.torch
@pytest.mark.parametrize("entry", inventory("handler_modules"), ids=lambda entry: entry["handler"])
def test_every_handler_is_built_in_and_can_be_imported(entry: dict[str, Any]) -> None:
    """Under the word of the manifest and under TorchServe's module; both are one class."""
    pytest.importorskip("torch")
    module, name = BUILT_IN[entry["handler"]]

    found = getattr(importlib.import_module(entry["module"]), entry["class"])

    assert found is getattr(importlib.import_module(module), name)
    assert callable(found.handle)
    assert callable(found.initialize)
    if entry.get("asynchronous"):
        assert inspect.iscoroutinefunction(found.handle)


@pytest.mark.parametrize("entry", inventory("envelopes"), ids=lambda entry: entry["word"])
def test_every_envelope_is_there(entry: dict[str, Any]) -> None:
    """Under the word of the settings and under TorchServe's module."""
    pytest.importorskip("numpy")
    module, name = ENVELOPES[entry["word"]]

    found = getattr(importlib.import_module(entry["module"]), entry["class"])

    assert found is getattr(importlib.import_module(module), name)


@pytest.mark.parametrize("entry", inventory("context_members"), ids=lambda entry: entry["name"])
def test_every_member_of_a_context_is_there(entry: dict[str, Any]) -> None:
    """Attributes, properties, methods with their parameters, keys of `system_properties`."""
    context = make_context()
    context.begin_batch([FakeItem()])

    assert hasattr(context, entry["name"])
    if entry["kind"] == "method":
        assert_parameters(getattr(Context, entry["name"]), entry["signature"])
    assert set(entry.get("keys", [])) <= set(context.system_properties)


@pytest.mark.parametrize("entry", inventory("request_processor_members"), ids=lambda entry: entry["name"])
def test_every_member_of_a_request_processor_is_there(entry: dict[str, Any]) -> None:
    """With its parameters."""
    assert_parameters(getattr(RequestProcessor, entry["name"]), entry["signature"])


@pytest.mark.parametrize("name", inventory("metrics_cache_members"))
def test_every_member_of_the_metrics_is_there(name: str) -> None:
    """On `context.metrics`."""
    assert hasattr(MetricsCache(model_name="m"), name)
