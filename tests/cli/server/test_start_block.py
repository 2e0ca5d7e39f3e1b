"""What a start shows on a terminal."""

from __future__ import annotations

from typing import Any

from marserve.cli.server.start_block import Started, block, coloured, device_line, device_of_workers, listening_at

BASE = "http://127.0.0.1:8080"


def version(name: str, *, ready: int = 1, **more: Any) -> dict[str, Any]:
    """What describe says of a version."""
    workers = [{"status": "READY"}] * ready
    return {"modelName": name, "modelVersion": "1.0", "workers": workers, "minWorkers": 1, "maxWorkers": 1, **more}


def failed(name: str, detail: str) -> dict[str, Any]:
    """A version whose workers cannot load it."""
    return version(name, ready=0, lastDeath={"cause": "import_error", "detail": detail})


def started(*models: dict[str, Any], **more: Any) -> Started:
    """A start with these models."""
    listening = listening_at([(["Inference"], BASE), (["Management", "Metrics"], "http://127.0.0.1:8081")], [])
    return Started(listening, models, BASE, **more)


def test_the_block_says_what_listens_what_is_ready_and_how_to_ask() -> None:
    """The whole of it, as a person reads it."""
    lines = block(started(version("digits"), device="CPU, 2 cores, 1 thread a worker", seconds={"digits 1.0": 0.42}))

    assert lines[1].endswith("   CPU, 2 cores, 1 thread a worker")
    assert lines[3:] == [
        "  Inference                http://127.0.0.1:8080",
        "  Management and metrics   http://127.0.0.1:8081",
        "",
        "  digits 1.0   ready in 0.4 s   1 worker",
        "",
        "  curl -T FILE http://127.0.0.1:8080/predictions/digits",
        "",
    ]


def test_a_server_without_models_says_how_to_add_one() -> None:
    """There is no command to try."""
    said = "\n".join(block(started()))

    assert "no model is loaded; `marserve register ARCHIVE` adds one" in said
    assert "curl" not in said


def test_a_model_that_failed_has_its_reason_and_the_command_for_the_rest() -> None:
    """One line, however long the reason, and whatever characters it has; a model that answers is asked."""
    lines = block(started(failed("bad", "No module named 'cv2' \x1b[31m" + "x" * 500), version("good", ready=2)))

    [line] = [each for each in lines if "failed" in each]
    assert "import_error: No module named 'cv2' \\x1b[31m" in line
    assert line.endswith("…; `marserve models bad` shows all of it")
    assert len(line) < 260
    assert any("/predictions/good" in each for each in lines)


def test_a_model_that_cannot_be_registered_is_in_the_block() -> None:
    """It has no version to describe."""
    said = "\n".join(block(started(failures=["gone.mar: there is no such archive"])))

    assert "failed  gone.mar: there is no such archive" in said
    assert "no model is loaded" not in said


def test_of_thirty_models_a_few_are_shown_and_every_failure() -> None:
    """The block stays on the screen."""
    lines = block(started(*(version(f"m{number}") for number in range(29)), failed("bad", "boom")))

    assert len(lines) < 30
    assert any("bad 1.0" in line for line in lines)
    assert "  … and 17 more that are ready; `marserve models` lists all" in lines


def test_a_sleeping_and_a_loading_model_are_told_apart() -> None:
    """A model without workers may be meant so."""
    said = "\n".join(block(started(version("s", ready=0, minWorkers=0), version("l", ready=0))))

    assert "s 1.0   asleep" in said
    assert "l 1.0   loading" in said


def test_colours_are_only_where_they_are_asked_for() -> None:
    """A pipe gets plain text."""
    assert not any("\x1b" in line for line in block(started(version("m"))))
    assert any("\x1b[32mready\x1b[0m" in line for line in block(started(version("m")), coloured))


def test_the_device_is_what_the_workers_compute_on() -> None:
    """Of a server that another process runs only its workers are known; threads are shared among the most of them."""
    on_devices = version("m", workers=[{"gpuId": 0}, {"gpuIds": [0, 1]}, {}])

    assert device_line(device_of_workers([version("m")]), 5, [version("m", maxWorkers=2)]) == (
        "CPU, 5 cores, 2 threads a worker"
    )
    assert device_line(device_of_workers([on_devices]), 1, []) == "2 accelerators, 1 core, 1 thread a worker"
