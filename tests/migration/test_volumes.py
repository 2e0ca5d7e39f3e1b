"""What containers see: volumes of compose files and of `docker run` are followed to this machine's folders."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.archives import manifest, zip_of
from support.surveys import actions, look, write

COMPOSE = """\
services:
  models:
    image: example.org/torchserve:mine
    volumes:
      - {source}:/home/model-server/store:ro
      - type: bind
        source: ./settings
        target: /config
    command: torchserve --start --model-store /home/model-server/store --models {models} --ts-config /config/ts.cfg
  web:
    image: nginx
    volumes:
      - ./gone:/usr/share/nginx/html
"""


def make_archive(folder: Path, name: str) -> None:
    """A sound archive."""
    folder.mkdir(parents=True, exist_ok=True)
    content = {"h.py": b"def handle(d, c):\n    return d\n", "MAR-INF/MANIFEST.json": manifest(name)}
    (folder / f"{name}.mar").write_bytes(zip_of(content))


def make_compose(root: Path, source: str, models: str = "good.mar") -> None:
    """A compose file, the settings that it names, and an archive in `models`."""
    write(root, {"compose.yaml": COMPOSE.format(source=source, models=models), "settings/ts.cfg": ""})


@pytest.mark.parametrize("source", ["./models", "${MODELS:-./models}"])
def test_folders_of_a_container_are_found_by_its_volumes(tmp_path: Path, source: str) -> None:
    """In both forms; their names inside differ from those outside. Other services are nobody's business."""
    make_compose(tmp_path, source)
    make_archive(tmp_path / "models", "good")

    assert actions(tmp_path) == {}
    works = {each.what for each in look(tmp_path) if each.verdict == "works"}
    assert "/home/model-server/store is models here" in works


def test_an_archive_that_the_volume_lacks_is_missing(tmp_path: Path) -> None:
    """By the line of the command that names it."""
    make_compose(tmp_path, "./models", models="lost.mar")
    make_archive(tmp_path / "models", "good")

    assert actions(tmp_path) == {"compose.yaml:9": "--models: lost.mar is in no store here"}


def test_a_volume_that_is_not_there_needs_action(tmp_path: Path) -> None:
    """Docker would make an empty folder, and the server would find no model."""
    make_compose(tmp_path, "./modles")
    make_archive(tmp_path / "models", "good")

    assert actions(tmp_path)["compose.yaml:5"] == "volume ./modles: there is no such folder or file here"


def test_a_volume_outside_of_the_folder_is_looked_through(tmp_path: Path) -> None:
    """Its archives are judged as those below the folder are."""
    make_archive(tmp_path / "elsewhere", "good")
    (tmp_path / "elsewhere" / "cut.mar").write_bytes(b"PK cut")
    make_compose(tmp_path / "project", "../elsewhere")

    assert list(actions(tmp_path / "project")) == [str(tmp_path / "elsewhere" / "cut.mar")]


def test_a_volume_that_docker_keeps_is_told_and_not_called_missing(tmp_path: Path) -> None:
    """Nobody can see here what is in it."""
    make_compose(tmp_path, "model-data", models="all")

    found = {each.place: each for each in look(tmp_path)}

    assert actions(tmp_path) == {}
    assert found["compose.yaml:5"].verdict == "differs"
    assert "model-data" in found["compose.yaml:5"].what


def test_volumes_of_docker_run_are_followed(tmp_path: Path) -> None:
    """In a script, over several lines, by -v and by --mount."""
    make_archive(tmp_path / "models", "good")
    write(
        tmp_path,
        {
            "conf/ts.properties": "model_store=/srv/store\nmetrics_config=/etc/ts/gone.yaml\n",
            "run.sh": "docker run --rm -v $(pwd)/models:/srv/store \\\n"
            '  --mount "type=bind,source=$PWD/conf,target=/etc/ts" mine/torchserve \\\n'
            "  torchserve --start --model-store /srv/store --ts-config /etc/ts/ts.properties --models good.mar\n",
        },
    )

    assert actions(tmp_path) == {"conf/ts.properties:2": "metrics_config=/etc/ts/gone.yaml: there is no such file here"}
