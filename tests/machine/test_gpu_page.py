"""What `docs/deploy/gpu.md` tells to write and to type."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import yaml

from marserve.archive.contents.model_config import parse_model_config
from marserve.settings import load_settings
from support.machines import EIGHT_H100, put_nvidia_smi
from support.pages import block
from support.server import Server

PAGE = "docs/deploy/gpu.md"


def test_the_models_configuration_is_one() -> None:
    """Every key of it is known, and used."""
    config = parse_model_config(block(PAGE, "model").encode())

    assert config.warnings == []
    assert (config.options.device_ids, config.options.device_memory_bytes, config.options.cpu_pinning) == (
        (0, 1),
        12 << 30,
        "near",
    )


def test_the_model_that_makes_room_is_one_that_may_sleep() -> None:
    """Its configuration says so, and how much it takes."""
    config = parse_model_config(block(PAGE, "on-demand").encode())

    assert config.warnings == []
    assert (config.options.load, config.options.device_memory_bytes) == ("on_demand", 12 << 30)


def test_the_settings_are_settings(tmp_path: Path) -> None:
    """Read as a file of their own."""
    (tmp_path / "config.properties").write_text(block(PAGE, "settings"))
    (tmp_path / "model_store").mkdir()
    settings = load_settings("marserve", {}, {}, tmp_path)

    assert (settings.number_of_gpu, settings.cpu_pinning) == (4, "near")
    assert settings.warnings == ()


class Typed(Server):
    """A server that is started by what stands on the page, on ports of the test's."""

    def command(self) -> list[str]:
        """The page's line, by a shell, in this environment's marserve."""
        config = super().command()[super().command().index("--ts-config") + 1]
        line = block(PAGE, "start").strip()
        assert " marserve start " in line
        program = f" {shlex.quote(sys.executable)} -m marserve.cli start --ts-config {shlex.quote(config)} "
        return ["sh", "-c", "exec env " + line.replace(" marserve start ", program)]


def test_the_start_is_one_that_starts(tmp_path: Path) -> None:
    """On a machine of eight GPUs, of which it uses two."""
    tool = put_nvidia_smi(tmp_path / "tools")
    tool.install(EIGHT_H100)
    tool.use(*[0] * 8)
    (tmp_path / "model_store").mkdir()
    with Typed(tmp_path, entry="marserve", environment=tool.environment) as server:
        page = server.client.get(f"{server.metrics}/metrics").text

        assert 'marserve_device_busy_ratio{gpu_id="0"} 0.1' in page
        assert 'marserve_device_busy_ratio{gpu_id="1"} 0.0' in page
        assert 'gpu_id="2"' not in page


def test_the_options_of_onnx_are_options() -> None:
    """Those that `marserve_handlers.runtimes.onnx` has for providers."""
    config = parse_model_config(block(PAGE, "onnx").encode())
    options = yaml.safe_load(block(PAGE, "onnx"))["onnx"]

    assert config.warnings == []
    assert set(options) == {"providers", "fallback"}
