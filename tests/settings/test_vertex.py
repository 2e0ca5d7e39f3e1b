"""What Vertex AI's variables say of settings."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from marserve.errors import BadSettings
from marserve.settings import load_settings
from marserve.settings.table import Entry, Settings
from marserve.settings.vertex import vertex_settings


def load(here: Path, lines: str, entry: Entry = "torchserve", **environment: str) -> Settings:
    """The settings of a folder with this file, in this environment."""
    (here / "config.properties").write_text(f"model_store=.\n{lines}")
    return load_settings(entry, {}, environment, here)


@pytest.mark.parametrize("entry", ["torchserve", "marserve"])
def test_the_models_files_are_fetched_from_where_vertex_says(tmp_path: Path, entry: Entry) -> None:
    """`model.mar` in that folder, and nothing that is not in it; allowed beside what the operator allows."""
    settings = load(tmp_path, "allowed_urls=s3://mine/.*\n", entry, AIP_STORAGE_URI="gs://caip-tenant/a.b-7/")

    assert [str(model) for model in settings.load_models] == ["model=gs://caip-tenant/a.b-7/model.mar"]
    ours, vertexs = settings.allowed_urls
    assert ours == "s3://mine/.*"
    assert re.fullmatch(vertexs, "gs://caip-tenant/a.b-7/model.mar")
    assert not re.fullmatch(vertexs, "gs://caip-tenant/axb-7/model.mar")


@pytest.mark.parametrize("entry", ["torchserve", "marserve"])
@pytest.mark.parametrize(
    ("lines", "expected"),
    [("load_models=other.mar\n", ["other.mar"]), ("load_models=$$AIP_STORAGE_URI$$/b.mar\n", ["gs://a/b/b.mar"])],
)
def test_models_that_the_operator_names_go_first(tmp_path: Path, entry: Entry, lines: str, expected: list[str]) -> None:
    """An archive of another name can be named in the same folder."""
    settings = load(tmp_path, lines, entry, AIP_STORAGE_URI="gs://a/b")

    assert [str(model) for model in settings.load_models] == expected
    assert settings.allowed_urls == ("gs://a/b/.*",)


def test_a_folder_of_this_machine_is_read_where_it_is(tmp_path: Path) -> None:
    """As Vertex AI's local endpoints mount it."""
    settings = load(tmp_path, "", AIP_STORAGE_URI=str(tmp_path))

    assert [str(model) for model in settings.load_models] == [f"model={tmp_path}/model.mar"]
    assert (settings.model_roots, settings.allowed_urls) == ((tmp_path,), ())


def test_an_empty_variable_says_nothing(tmp_path: Path) -> None:
    """Vertex AI sets it so for a model without files."""
    assert vertex_settings({"AIP_STORAGE_URI": "", "AIP_HTTP_PORT": ""}, ()) == {}


@pytest.mark.parametrize(
    ("variable", "value", "right"),
    [
        ("AIP_HTTP_PORT", "abc", "a whole number from 1 to 65534"),
        ("AIP_HTTP_PORT", "0", "a whole number from 1 to 65534"),
        ("AIP_HTTP_PORT", "65535", "a whole number from 1 to 65534"),
        ("AIP_STORAGE_URI", "bucket/model", "gs://bucket/folder"),
        ("AIP_STORAGE_URI", "s3://bucket/model", "gs://bucket/folder"),
        ("AIP_STORAGE_URI", "gs://bucket/a,b", "gs://bucket/folder"),
        ("AIP_HEALTH_ROUTE", "health", "a path such as"),
        ("AIP_PREDICT_ROUTE", "/a b", "a path such as"),
    ],
)
def test_a_variable_that_cannot_be_used_is_named_with_its_value(
    tmp_path: Path, variable: str, value: str, right: str
) -> None:
    """And with what would be right."""
    with pytest.raises(BadSettings) as error:
        load(tmp_path, "", **{variable: value})

    assert error.value.key
    assert repr(value) in error.value.message
    assert right in error.value.message
    assert error.value.message.endswith(f"({variable})")
