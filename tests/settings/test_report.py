"""The block of lines that the server log begins with."""

from __future__ import annotations

from pathlib import Path

from marserve.settings import load_settings, sources_report, startup_report


def test_the_report_has_torchserves_labels(tmp_path: Path) -> None:
    """Tools look for these; absent values are N/A."""
    (tmp_path / "config.properties").write_text("load_models=a.mar,b=c.mar\nallowed_urls=http://h/.*\n")
    (tmp_path / "model_store").mkdir()
    settings = load_settings("torchserve", {"model_store": str(tmp_path / "model_store")}, {}, tmp_path)

    lines = startup_report(settings, version="1.2.3", cores=4, accelerators=0)

    assert lines[0] == "Torchserve version: 1.2.3"
    for line in (
        "Number of GPUs: 0",
        "Number of CPUs: 4",
        f"Config file: {tmp_path / 'config.properties'}",
        "Inference address: http://127.0.0.1:8080",
        f"Model Store: {tmp_path / 'model_store'}",
        "Initial Models: a.mar,b=c.mar",
        f"Log dir: {tmp_path / 'logs'}",
        "Default workers per model: 4",
        "Blacklist Regex: N/A",
        "Allowed Urls: http://h/.*",
        "Metrics mode: log",
        "Model API enabled: false",
    ):
        assert line in lines
    assert len(lines) == 35


def test_under_marserve_the_report_has_no_labels_of_a_jvm(tmp_path: Path) -> None:
    """What its server has no part of is left out, and it has its own name."""
    (tmp_path / "model_store").mkdir()

    lines = startup_report(load_settings("marserve", {}, {}, tmp_path), version="1.2.3", cores=4, accelerators=0)

    assert lines[0] == "marserve version: 1.2.3"
    assert "Number of CPUs: 4" in lines
    assert [line for line in lines if "heap" in line or "Netty" in line or "TS Home" in line] == []


def test_default_workers_are_one_an_accelerator(tmp_path: Path) -> None:
    """And what was set goes before both."""
    (tmp_path / "model_store").mkdir()

    by_device = startup_report(load_settings("marserve", {}, {}, tmp_path), version="1", cores=4, accelerators=2)
    by_setting = startup_report(
        load_settings("marserve", {"default_workers_per_model": 3}, {}, tmp_path), version="1", cores=4, accelerators=2
    )

    assert "Default workers per model: 2" in by_device
    assert "Default workers per model: 3" in by_setting


def test_the_report_shows_no_secret_of_an_address_or_a_variable(tmp_path: Path) -> None:
    """Presigned addresses are settings too, and so is a command with a key in it."""
    (tmp_path / "model_store").mkdir()
    (tmp_path / "config.properties").write_text(
        "load_models=a=https://h/a.mar?sig=planted,https://me:planted@h/b.mar\n"
        "system_metrics_cmd=measure --key $$KEY$$\nmodel_store=$$STORE$$\n"
    )
    variables = {"KEY": "planted", "STORE": str(tmp_path / "model_store")}
    settings = load_settings("marserve", {}, variables, tmp_path)
    other = tmp_path / "other"
    (other / "model_store").mkdir(parents=True)
    declared = load_settings("marserve", {"desired_state": "https://h/m.yaml?sig=planted"}, {}, other)

    told = [*startup_report(settings, version="1", cores=1, accelerators=0), *sources_report(settings)]

    assert "planted" not in "\n".join([*told, settings.explain("load_models"), *sources_report(declared)])


def test_the_report_says_which_source_set_what(tmp_path: Path) -> None:
    """File, variable, argument, each with what it went before; and what decides about models."""
    (tmp_path / "model_store").mkdir()
    (tmp_path / "config.properties").write_text(
        "job_queue_size=5\ndefault_response_timeout=7\nload_models=a.mar\ncors_allowed_origin=x\n"
    )
    variables = {"MARSERVE_DEFAULT_RESPONSE_TIMEOUT": "8", "MARSERVE_JOB_QUEUE_SIZE": "6"}

    told = sources_report(load_settings("marserve", {"job_queue_size": 9}, variables, tmp_path))

    assert told == [
        "Which models there are is said by: load_models=a.mar",
        "cors_allowed_origin=x is set by config.properties, line 4",
        "default_response_timeout=8 is set by MARSERVE_DEFAULT_RESPONSE_TIMEOUT, over config.properties, line 2",
        "job_queue_size=9 is set by --job-queue-size, over MARSERVE_JOB_QUEUE_SIZE, over config.properties, line 1",
        "load_models=a.mar is set by config.properties, line 3",
    ]


def test_the_report_names_a_snapshot_and_a_desired_state(tmp_path: Path) -> None:
    """A snapshot that is restored is a source of settings, too; a document decides alone."""
    (tmp_path / "model_store").mkdir()
    snapshot = tmp_path / "logs" / "config" / "20250131120000001-startup.cfg"
    snapshot.parent.mkdir(parents=True)
    snapshot.write_text(
        'job_queue_size=5\nversion=0.1.0\nmodel_snapshot={"name": "x", "modelCount": 0, "models": {}}\n'
    )
    (tmp_path / "m.yaml").write_text("models: {}\n")
    switches = {"MARSERVE_CONFIG_SNAPSHOTS": "true"}

    restored = sources_report(load_settings("marserve", {}, switches, tmp_path))
    declared = sources_report(load_settings("marserve", {"desired_state": "m.yaml"}, switches, tmp_path))

    assert restored == [
        f"Which models there are is said by: the snapshot logs/config/{snapshot.name}",
        "config_snapshots=true is set by MARSERVE_CONFIG_SNAPSHOTS",
        f"job_queue_size=5 is set by logs/config/{snapshot.name}, line 1",
    ]
    assert declared == [
        "Which models there are is said by: the desired state m.yaml decides alone (calls that change models: refuse; "
        "snapshots are written and not read)",
        "config_snapshots=true is set by MARSERVE_CONFIG_SNAPSHOTS",
        "desired_state=m.yaml is set by --desired-state",
    ]
