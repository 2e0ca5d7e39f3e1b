"""Start scripts in a survey: Java, registrations by address, plug-ins, and the trial of what a command starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from marserve.errors import BadSettings
from marserve.settings import Settings
from support.archives import manifest, zip_of
from support.surveys import actions, look, write

ENDS = "the script ends here where there is no Java"


@pytest.mark.parametrize(
    "script",
    [
        "java -version || exit 1",
        "java -version >/dev/null 2>&1 || { echo 'no java'; exit 1; }",
        "command -v java >/dev/null || exit 2",
        "which java || exit",
        "if ! command -v java; then",
        "if ! $JAVA_HOME/bin/java -version; then exit 1; fi",
        "java -version && torchserve --start --model-store .",
        '[ -z "$JAVA_HOME" ] && exit 1',
        ": ${JAVA_HOME:?must be set}",
        "set -e; true\njava -version",
        "#!/bin/bash -eu\njava -version",
        "set -o errexit\n/usr/bin/keytool -list",
    ],
)
def test_a_script_that_ends_without_java_needs_action(tmp_path: Path, script: str) -> None:
    """The server behind that line would not be started."""
    write(tmp_path, {"start.sh": script + "\n"})

    assert ENDS in actions(tmp_path).values()


@pytest.mark.parametrize(
    "script",
    [
        "export JAVA_HOME=/usr/lib/jvm/java-17",
        "java -version || true",
        "java -version || echo 'no java, no matter'",
        "java -version",
        "set -e\nif command -v java; then echo yes; fi",
        "# java -version || exit 1",
        "echo 'needs java' || exit 1",
        "cp model.java /tmp || exit 1",
    ],
)
def test_a_line_that_only_speaks_of_java_needs_none(tmp_path: Path, script: str) -> None:
    """It may stay."""
    write(tmp_path, {"start.sh": script + "\n", "config.properties": ""})

    assert ENDS not in actions(tmp_path).values()


def test_an_image_whose_build_runs_java_needs_action(tmp_path: Path) -> None:
    """A failed RUN ends the build."""
    write(tmp_path, {"Dockerfile": "FROM python:3.11\nRUN java -version\n"})

    assert actions(tmp_path)["Dockerfile:2"] == ENDS


@pytest.mark.parametrize("address", ["https://models.test/a.mar", "s3://bucket/a.mar", "hf%3A%2F%2Forg%2Fa%40main"])
def test_a_registration_by_an_address_that_is_not_allowed_needs_action(tmp_path: Path, address: str) -> None:
    """TorchServe allowed all that nobody forbade. The advice names allowed_urls."""
    write(tmp_path, {"register.sh": f'curl -X POST "localhost:8081/models?initial_workers=1&url={address}"\n'})

    (found,) = [each for each in look(tmp_path) if each.place == "register.sh:1"]

    assert found.verdict == "action"
    assert "does not match any allowed URL" in found.what
    assert "allowed_urls" in found.fix


def test_a_registration_by_an_address_that_is_allowed_needs_nothing(tmp_path: Path) -> None:
    """By the settings' own pattern."""
    write(
        tmp_path,
        {
            "register.sh": "curl -X POST 'localhost:8081/models?url=s3://bucket/a.mar'\n",
            "config.properties": "allowed_urls=s3://bucket/.*\n",
        },
    )

    assert actions(tmp_path) == {}


def test_an_address_of_s3_in_the_settings_names_allowed_urls(tmp_path: Path) -> None:
    """It is no name in the store."""
    write(tmp_path, {"config.properties": "load_models=s3://bucket/a.mar\n"})

    (found,) = [each for each in look(tmp_path) if each.verdict == "action"]

    assert found.place == "config.properties:1"
    assert "allowed_urls" in found.fix


@pytest.mark.parametrize(
    ("files", "place"),
    [
        ({"plugins/reports.jar": "", "config.properties": "plugins_path=/opt/plugins\n"}, "config.properties:1"),
        ({"plugins/reports.jar": "", "run.sh": "torchserve --start --model-store . --ppath plugins\n"}, "run.sh:1"),
        ({"run.sh": "torchserve --start --model-store . --plugins-path /opt/gone\n"}, "run.sh:1"),
    ],
)
def test_java_plugins_need_action(tmp_path: Path, files: dict[str, str], place: str) -> None:
    """Nothing of what they do would be done; a folder that is not here may hold any."""
    write(tmp_path, files)

    assert "Java plug-ins are not loaded" in actions(tmp_path)[place]


def test_the_plugin_of_sagemaker_needs_none(tmp_path: Path) -> None:
    """A setting does what it does."""
    write(tmp_path, {"plugins/sagemaker-endpoints.jar": "", "config.properties": "plugins_path=plugins\n"})

    assert actions(tmp_path) == {}


def test_a_start_is_tried_with_what_a_command_gives(tmp_path: Path) -> None:
    """Its flags and its file together; what fails then needs action at the command's line."""
    archive = zip_of({"h.py": b"def handle(d, c):\n    return d\n", "MAR-INF/MANIFEST.json": manifest("good")})
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "good.mar").write_bytes(archive)
    write(
        tmp_path,
        {
            "ts.properties": "job_queue_size=7\n",
            "run.sh": "torchserve --start --model-store /srv/store --ts-config ts.properties "
            "--models m=good.mar --dt\n",
        },
    )
    tried: list[Settings] = []

    def fail(settings: Settings) -> list[BadSettings]:
        tried.append(settings)
        return [BadSettings("no way")] if settings.load_models else []

    found = {each.place: each.what for each in look(tmp_path, fail) if each.verdict == "action"}

    assert found == {"run.sh:1": "a start was tried and failed: no way"}
    assert tried[-1].model_store == tmp_path / "store"
    assert (tried[-1].job_queue_size, tried[-1].disable_token_authorization) == (7, True)


def test_a_command_with_settings_at_fault_is_not_tried(tmp_path: Path) -> None:
    """They are told once, where they stand."""
    write(
        tmp_path,
        {
            "config.properties": "job_queue_size=many\n",
            "run.sh": "torchserve --start --model-store . --ts-config config.properties\n",
        },
    )

    assert list(actions(tmp_path)) == ["config.properties:1"]


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (
            "torchserve --start --model-store . --ts-config conf/ts.properties",
            "there is no such file, but ts.properties",
        ),
        ("torchserve --start --model-store old/store", "there is no such folder, but store"),
    ],
)
def test_a_path_that_only_its_last_name_fits_needs_action_in_a_script(tmp_path: Path, command: str, said: str) -> None:
    """The server would not find it; in a container, or behind a `cd`, it may."""
    (tmp_path / "store").mkdir()
    write(tmp_path, {"run.sh": f"{command}\n", "ts.properties": ""})
    wrong = actions(tmp_path)
    write(tmp_path, {"run.sh": f"cd /srv\n{command}\n"})

    assert said in wrong["run.sh:1"]
    assert actions(tmp_path) == {}
