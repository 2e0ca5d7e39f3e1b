"""Which file is read, what goes before what, and what is said about a file's mistakes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from marserve.errors import BadSettings
from marserve.model_options import BY_KEY
from marserve.settings import KEYS, Entry, ModelToLoad, Settings, load_settings

BASE = "disable_token_authorization=true\nmodel_store=store\n"


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """A working directory with a model store."""
    (tmp_path / "store").mkdir()
    return tmp_path


def load(
    here: Path,
    config: str | None = None,
    flags: Mapping[str, object] | None = None,
    environment: Mapping[str, str] | None = None,
    entry: Entry = "torchserve",
) -> Settings:
    """Settings from a `config.properties` with these lines beside the usual ones."""
    if config is not None:
        (here / "config.properties").write_bytes((BASE + config).encode("latin-1"))
    return load_settings(entry, flags or {}, environment or {}, here)


# ------------------------------------------------------------------------------------------------ which file


def test_torchserve_reads_the_variables_file_before_the_flags_before_the_local_one(here: Path) -> None:
    """Exactly one file is read."""
    for name, number in (("config.properties", 1), ("flag.cfg", 2), ("env.cfg", 3)):
        (here / name).write_text(f"{BASE}job_queue_size={number}\n")

    def size(**flags: str) -> int:
        return load(here, flags=flags, environment=environment).job_queue_size

    environment: dict[str, str] = {}
    assert size() == 1
    assert size(ts_config="flag.cfg") == 2
    environment = {"TS_CONFIG_FILE": str(here / "env.cfg")}
    assert size(ts_config="flag.cfg") == 3


def test_marserve_reads_the_flags_file_first(here: Path) -> None:
    """Flag, `MARSERVE_CONFIG_FILE`, `TS_CONFIG_FILE`, the local one."""
    for name, number in (("config.properties", 1), ("flag.cfg", 2), ("ours.cfg", 3), ("theirs.cfg", 4)):
        (here / name).write_text(f"{BASE}job_queue_size={number}\n")
    variables = {"MARSERVE_CONFIG_FILE": "ours.cfg", "TS_CONFIG_FILE": "theirs.cfg"}

    def size(environment: dict[str, str], **flags: str) -> int:
        return load(here, flags=flags, environment=environment, entry="marserve").job_queue_size

    assert size(variables, ts_config="flag.cfg") == 2
    assert size(variables) == 3
    assert size({"TS_CONFIG_FILE": "theirs.cfg"}) == 4
    assert size({}) == 1


def test_a_file_that_was_named_must_be_there(here: Path) -> None:
    """In the words that TorchServe's launcher prints."""
    with pytest.raises(BadSettings) as error:
        load(here, flags={"ts_config": "nope.properties"})

    assert str(error.value) == "--ts-config file not found: nope.properties"


def test_a_file_without_end_is_refused_by_its_size(here: Path) -> None:
    """A sparse file costs nothing to make. Reading it whole ended with a MemoryError."""
    with (here / "config.properties").open("wb") as file:
        file.truncate(1 << 40)

    with pytest.raises(BadSettings, match=r"config\.properties cannot be read \(it has more than \d+ bytes\)"):
        load(here)


def test_without_a_file_the_defaults_of_the_entry_count(here: Path) -> None:
    """Two columns of one table."""
    (here / "model_store").mkdir()

    ours = load(here, entry="marserve")
    theirs = load(here, flags={"model_store": "store", "disable_token_authorization": True})

    assert ours.source_file is None
    assert (ours.disable_token_authorization, ours.enable_model_api, ours.metrics_mode) == (True, True, "prometheus")
    assert (ours.model_store, ours.log_location) == (here / "model_store", None)
    assert (theirs.enable_model_api, theirs.metrics_mode) == (False, "log")
    assert (theirs.model_store, theirs.log_location) == (here / "store", here / "logs")
    assert theirs.workflow_store == here / "store"


# ------------------------------------------------------------------------------------------- what goes before what


def test_torchserves_flags_go_before_the_file(here: Path) -> None:
    """`--models` replaces `load_models`."""
    settings = load(here, "load_models=inspect.mar\n", {"load_models": ["one=echo.mar", "echo.mar"]})

    assert settings.load_models == (ModelToLoad("echo.mar", "one"), ModelToLoad("echo.mar"))
    assert settings.explain("load_models") == (
        "load_models=one=echo.mar,echo.mar (--models, over config.properties, line 3 (inspect.mar))"
    )


def test_torchserves_switches_can_only_switch_on(here: Path) -> None:
    """A flag that was not given is false, and must not undo the file."""
    flags = {"enable_model_api": False, "disable_token_authorization": False}

    settings = load(here, "enable_model_api=true\n", flags)

    assert settings.enable_model_api
    assert settings.disable_token_authorization


@pytest.mark.parametrize(("switch", "size"), [("", 5), ("enable_envvars_config=TRUE\n", 17)])
def test_torchserves_variables_count_if_the_file_says_so(here: Path, switch: str, size: int) -> None:
    """And then before file and command line."""
    (here / "elsewhere").mkdir()
    environment = {"TS_JOB_QUEUE_SIZE": "17", "TS_MODEL_STORE": "elsewhere", "TS_ENABLE_ENVVARS_CONFIG": "true"}

    settings = load(here, f"job_queue_size=5\n{switch}", {"model_store": "store"}, environment)

    assert settings.job_queue_size == size
    assert settings.model_store == here / ("elsewhere" if switch else "store")
    note = "TS_MODEL_STORE, TS_JOB_QUEUE_SIZE are set and not read: that needs enable_envvars_config=true in the file"
    assert (note in settings.notes) is not bool(switch)


def test_a_variable_counts_even_when_it_is_empty(here: Path) -> None:
    """As in TorchServe: set is set."""
    with pytest.raises(BadSettings, match=r"job_queue_size is ''.*\(TS_JOB_QUEUE_SIZE\)"):
        load(here, "enable_envvars_config=true\n", environment={"TS_JOB_QUEUE_SIZE": ""})


@pytest.mark.parametrize(("switch", "urls"), [("", ()), ("use_env_allowed_urls=true\n", ("http://b/.*",))])
def test_allowed_urls_come_from_the_environment_only_on_a_second_word(
    here: Path, switch: str, urls: tuple[str, ...]
) -> None:
    """A container's environment alone must not open the door."""
    environment = {"TS_ALLOWED_URLS": "http://b/.*"}

    settings = load(here, f"enable_envvars_config=true\n{switch}", environment=environment)

    assert settings.allowed_urls == urls


def test_marserve_puts_flag_before_variable_before_file(here: Path) -> None:
    """The other order; TorchServe's variables stand between if the file lets them."""
    config = "job_queue_size=1\ndefault_response_timeout=1\nmax_request_size=1\nmax_response_size=1\n"
    environment = {
        "MARSERVE_JOB_QUEUE_SIZE": "2",
        "MARSERVE_DEFAULT_RESPONSE_TIMEOUT": "2",
        "TS_DEFAULT_RESPONSE_TIMEOUT": "3",
        "TS_MAX_REQUEST_SIZE": "3",
    }

    settings = load(here, f"enable_envvars_config=true\n{config}", {"job_queue_size": 4}, environment, "marserve")

    assert settings.job_queue_size == 4
    assert settings.default_response_timeout == 2
    assert settings.max_request_size == 3
    assert settings.max_response_size == 1
    assert settings.explain("job_queue_size") == (
        "job_queue_size=4 (--job-queue-size, over MARSERVE_JOB_QUEUE_SIZE (2), over config.properties, line 4 (1))"
    )


def test_keys_torchserve_does_not_have_are_set_by_our_variables_under_both(here: Path) -> None:
    """TorchServe's own keys are not, under `torchserve`."""
    environment = {"MARSERVE_DRAIN_TIMEOUT": "2.5", "MARSERVE_JOB_QUEUE_SIZE": "3"}

    theirs = load(here, "drain_timeout=9\n", environment=environment)
    ours = load(here, entry="marserve", environment=environment)

    assert (theirs.drain_timeout, theirs.job_queue_size) == (2.5, 100)
    assert (ours.drain_timeout, ours.job_queue_size) == (2.5, 3)


@pytest.mark.parametrize("entry", ["torchserve", "marserve"])
def test_some_variables_are_always_read(here: Path, entry: Entry) -> None:
    """Folders of logs and temporary files, as every launcher sets them."""
    (here / "tmp").mkdir()

    settings = load(here, "", environment={"LOG_LOCATION": "mylogs", "TEMP": str(here / "tmp")}, entry=entry)

    assert settings.log_location == here / "mylogs"
    assert settings.temporary_folder == here / "tmp"


@pytest.mark.parametrize("entry", ["torchserve", "marserve"])
def test_vertexs_port_counts_where_nothing_else_names_the_address(here: Path, entry: Entry) -> None:
    """File, variable and flag go before it; its routes are always read."""
    vertex = {"AIP_HTTP_PORT": "7080", "AIP_HEALTH_ROUTE": "/health", "AIP_PREDICT_ROUTE": "/v1/endpoints/1:predict"}
    named = "inference_address=http://127.0.0.1:9\n"

    alone = load(here, "", environment=vertex, entry=entry)
    by_file = load(here, named, environment=vertex, entry=entry)
    by_variable = load(
        here,
        "enable_envvars_config=true\n",
        environment=vertex | {"TS_INFERENCE_ADDRESS": "http://127.0.0.1:10"},
        entry=entry,
    )

    assert str(alone.inference_address) == "http://0.0.0.0:7080"
    assert (alone.health_route, alone.predict_route) == ("/health", "/v1/endpoints/1:predict")
    assert (by_file.inference_address.port, by_variable.inference_address.port) == (9, 10)
    with pytest.raises(BadSettings, match=r"\(AIP_HTTP_PORT\)"):
        load(here, "", environment={"AIP_HTTP_PORT": "http"}, entry=entry)


@pytest.mark.parametrize("route", ["health", "/", "/a b", "/a?b", "/a//b", "//a"])
def test_a_route_is_a_plain_path(here: Path, route: str) -> None:
    """Nothing that would have to be decoded or that has a query."""
    with pytest.raises(BadSettings, match="it must be a path such as"):
        load(here, f"health_route={route}\n")


def test_the_commands_own_key_is_no_unknown_setting(here: Path) -> None:
    """Whoever has it in the environment is not told off."""
    assert not [
        note for note in load(here, "", environment={"MARSERVE_TOKEN": "x"}, entry="marserve").notes if "TOKEN" in note
    ]


def test_a_value_without_origin_is_a_default(here: Path) -> None:
    """`explain` says so, hides secrets and knows no other names."""
    settings = load(here, "keystore_pass=hunter2\n")

    assert settings.explain("job_queue_size") == "job_queue_size=100 (default of torchserve)"
    assert "hunter2" not in settings.explain("keystore_pass") + " ".join(settings.notes)
    with pytest.raises(KeyError):
        settings.explain("no_such_key")


# --------------------------------------------------------------------------------------------- how a file is read


def test_javas_syntax_is_understood(here: Path) -> None:
    """Comments, escapes, continuation lines, colons; line numbers are those of the file."""
    config = "! comment\n\\u0061llowed_urls : http\\://a/.*,\\\n   http://b/.*\r\n\r\njob_queue_size  7\n"

    settings = load(here, config)

    assert settings.allowed_urls == ("http://a/.*", "http://b/.*")
    assert settings.job_queue_size == 7
    assert settings.origins["job_queue_size"][0].where == "config.properties, line 7"


def test_variables_in_values_are_replaced(here: Path) -> None:
    """Several in one value, whatever `enable_envvars_config` says."""
    environment = {"HOST": "127.0.0.1", "PORT": "81"}

    settings = load(here, "inference_address=http://$$HOST$$:$$PORT$$\n", environment=environment)

    assert str(settings.inference_address) == "http://127.0.0.1:81"


def test_a_variable_that_is_not_set_stops_the_server(here: Path) -> None:
    """TorchServe's words, the key and the line."""
    with pytest.raises(BadSettings) as error:
        load(here, "job_queue_size=$$MY_LIMIT$$\n")

    assert str(error.value).startswith("Invalid Environment Variable MY_LIMIT: job_queue_size needs it")
    assert str(error.value).endswith("(config.properties, line 3)")
    assert error.value.key == "job_queue_size"


def test_a_bad_value_names_key_value_and_line(here: Path) -> None:
    """And what would be right."""
    with pytest.raises(BadSettings) as error:
        load(here, "\n# many\njob_queue_size=many\n")

    assert str(error.value) == (
        "Invalid configuration: job_queue_size is 'many'; it must be a whole number of 1 or more "
        "(config.properties, line 5)"
    )


def test_a_broken_escape_names_its_line(here: Path) -> None:
    """Windows paths with single backslashes are the usual reason."""
    with pytest.raises(BadSettings, match=r"is no character.*\(config.properties, line 4\)"):
        load(here, "job_queue_size=1\nlog_location=C:\\users\\me\n")


def test_an_unknown_key_is_reported_with_the_nearest_one(here: Path) -> None:
    """It is ignored, as by TorchServe, but not in silence."""
    settings = load(here, "job_queue_sise=5\nsomething_else_entirely=1\n")

    assert settings.warnings == (
        "job_queue_sise is no key that is known; it is ignored; did you mean job_queue_size? "
        "(config.properties, line 3)",
        "something_else_entirely is no key that is known; it is ignored (config.properties, line 4)",
    )
    assert settings.job_queue_size == 100


def test_an_unknown_flag_is_an_error(here: Path) -> None:
    """Whoever types it is still there to correct it."""
    with pytest.raises(BadSettings, match="job_queue_sise is no key that is known; did you mean job_queue_size"):
        load(here, "", {"job_queue_sise": "5"}, entry="marserve")


def test_an_unknown_variable_of_ours_is_noted(here: Path) -> None:
    """With the nearest one."""
    settings = load(here, "", environment={"MARSERVE_JOB_QUEUE_SISE": "5"}, entry="marserve")

    assert settings.notes == (
        "MARSERVE_JOB_QUEUE_SISE is set, and is no setting; did you mean MARSERVE_JOB_QUEUE_SIZE?",
    )


def test_a_key_that_stands_twice_is_reported(here: Path) -> None:
    """The later one counts, as in Java."""
    settings = load(here, "job_queue_size=1\njob_queue_size=2\n")

    assert settings.job_queue_size == 2
    assert settings.warnings == ("job_queue_size stands twice; the later counts (config.properties, line 4)",)


@pytest.mark.parametrize("value", [["a.mar", "b=c.mar"], ("a.mar", "b=c.mar"), "a.mar,b=c.mar"])
def test_flags_may_be_lists(here: Path, value: Any) -> None:
    """As argument parsers give them; None is a flag that was not given."""
    settings = load(here, "", {"load_models": value, "workflow_store": None})

    assert settings.load_models == (ModelToLoad("a.mar"), ModelToLoad("c.mar", "b"))


# ------------------------------------------------------------------------------------------------ snapshots

NAME = "20260131120000000-shutdown.cfg"
EMPTY = '{"name": "x", "modelCount": 0, "created": 1, "models": {}}'


def write_snapshot(here: Path, lines: str = "", name: str = NAME, folder: str = "logs") -> Path:
    """A snapshot in a log folder."""
    path = here / folder / "config" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{BASE}version=1.0\nmodel_snapshot={EMPTY}\n{lines}")
    return path


def test_the_newest_snapshot_takes_the_place_of_a_file_that_nobody_named(here: Path) -> None:
    """One warning says which it is, what is passed over, and how to start without it."""
    write_snapshot(here, "job_queue_size=5\n", name="20250131120000000-startup.cfg")
    path = write_snapshot(here, "job_queue_size=6\n")

    settings = load(here, "job_queue_size=7\n")

    assert (settings.job_queue_size, settings.model_snapshot, settings.source_file) == (6, EMPTY, path)
    assert settings.restored_from == f"logs/config/{NAME}"
    (warning,) = settings.warnings
    for word in (f"logs/config/{NAME}", "config.properties is not read", "--ncs", "--ts-config"):
        assert word in warning


@pytest.mark.parametrize(
    ("flags", "environment", "config"),
    [
        ({"config_snapshots": False}, {}, ""),
        ({}, {"MARSERVE_CONFIG_SNAPSHOTS": "false"}, ""),
        ({}, {}, "config_snapshots=false\n"),
        ({"ts_config": "config.properties"}, {}, ""),
        ({}, {"TS_CONFIG_FILE": "config.properties"}, ""),
    ],
    ids=["--ncs", "variable", "file", "--ts-config", "TS_CONFIG_FILE"],
)
def test_no_snapshot_is_read_where_it_should_not_be(
    here: Path, flags: dict[str, object], environment: dict[str, str], config: str
) -> None:
    """Switched off in any way, or another file named."""
    write_snapshot(here)

    settings = load(here, config, flags, environment)

    assert (settings.restored_from, settings.model_snapshot) == (None, None)
    assert settings.warnings == ()


def test_marserve_reads_snapshots_only_where_a_key_asks_for_them(here: Path) -> None:
    """The key may stand in the file that the snapshot then takes the place of."""
    write_snapshot(here)

    assert load(here, "", entry="marserve").restored_from is None
    assert load(here, "config_snapshots=true\n", entry="marserve").restored_from == f"logs/config/{NAME}"


@pytest.mark.parametrize(
    ("text", "missing"),
    [
        (b"", "has no version and no model_snapshot"),
        (bytes(2000), "has no version and no model_snapshot"),
        (b"version=1.0\nlog_location=there\n", "has no model_snapshot"),
        (b'model_snapshot={"models"\\: {}}\n', "has no version"),
    ],
    ids=["empty", "zeros", "cut", "without a version"],
)
def test_a_snapshot_without_its_version_or_models_is_refused_by_name(here: Path, text: bytes, missing: str) -> None:
    """Taken for "no models" it would be followed by newer empty ones. `torchserve` restores what others wrote."""
    write_snapshot(here).write_bytes(text)

    with pytest.raises(BadSettings) as refused:
        load(here, "config_snapshots=true\n", entry="marserve")

    for word in (NAME, missing, "--ncs"):
        assert word in str(refused.value)
    flags = {"model_store": str(here)}
    assert load(here, "", flags).restored_from == f"logs/config/{NAME}"


@pytest.mark.parametrize(
    ("environment", "config"),
    [({"LOG_LOCATION": "there"}, ""), ({}, "log_location=there\n")],
    ids=["variable", "file"],
)
def test_snapshots_are_looked_for_beside_the_logs(here: Path, environment: dict[str, str], config: str) -> None:
    """Wherever these are."""
    write_snapshot(here, folder="there")

    assert load(here, config, environment=environment).restored_from == f"there/config/{NAME}"


def test_files_of_other_names_are_passed_over_with_a_warning(here: Path) -> None:
    """They ended TorchServe's start."""
    write_snapshot(here)
    (here / "logs" / "config" / "notes.txt").write_text("")

    settings = load(here)

    assert settings.restored_from == f"logs/config/{NAME}"
    assert settings.warnings[0] == "logs/config/notes.txt is not called as snapshots are; it is ignored"


def test_flags_go_before_a_snapshot_but_for_its_models(here: Path) -> None:
    """What is passed over is said, with the way out."""
    write_snapshot(here, "job_queue_size=6\nload_models=all\n")

    settings = load(here, flags={"load_models": ["a.mar"], "model_store": str(here)})

    assert settings.model_store == here
    assert settings.model_snapshot == EMPTY
    (warning,) = [warning for warning in settings.warnings if "load_models" in warning]
    assert warning.startswith("load_models=a.mar is not used")
    assert "--ncs" in warning


def test_what_a_snapshot_says_of_load_models_needs_no_word(here: Path) -> None:
    """Nobody asked for it now."""
    write_snapshot(here, "load_models=all\n")

    settings = load(here)

    assert len(settings.warnings) == 1
    assert not any("load_models" in note for note in settings.notes)


def test_a_file_with_model_snapshot_and_load_models_gets_a_note(here: Path) -> None:
    """KServe's files have both."""
    settings = load(here, f"load_models=all\nmodel_snapshot={EMPTY}\n", {"config_snapshots": False})

    assert settings.model_snapshot == EMPTY
    assert settings.warnings == ()
    assert any(note.startswith("load_models=all is not used") for note in settings.notes)


def test_facts_of_a_snapshot_are_no_settings(here: Path) -> None:
    """How many accelerators there were, and where they came from, was found and not asked for."""
    write_snapshot(
        here, "version=0.12.0\ntsConfigFile=\nnumber_of_gpu=0\npython=/old\nmarserveFacts=number_of_gpu,python\n"
    )

    settings = load(here)

    assert (settings.number_of_gpu, settings.python) == (None, None)
    assert len(settings.warnings) == 1


def test_a_snapshot_that_torchserve_wrote_is_read(here: Path) -> None:
    """It marks nothing: its number of accelerators counts, as there."""
    write_snapshot(here, "version=0.12.0\ntsConfigFile=/etc/gone.properties\nnumber_of_gpu=1\n")

    settings = load(here)

    assert settings.number_of_gpu == 1
    assert len(settings.warnings) == 1


def test_secrets_are_read_again_from_the_file_before_the_snapshot(here: Path) -> None:
    """A snapshot has none; the next one remembers the same file."""
    (here / "first.properties").write_text("keystore_pass=secret\njob_queue_size=5\n")
    write_snapshot(here, "tsConfigFile=first.properties\n")

    settings = load(here)

    assert (settings.keystore_pass, settings.job_queue_size) == ("secret", 100)
    assert settings.original_file == here / "first.properties"


def test_the_file_that_was_read_is_what_snapshots_go_back_to(here: Path) -> None:
    """Where there is none, there is none."""
    assert load(here, "").original_file == here / "config.properties"
    (here / "config.properties").unlink()
    assert load(here, flags={"model_store": "store"}).original_file is None


class Elsewhere:
    """A place for snapshots that is no folder."""

    where = "the moon"

    def __init__(self, text: bytes | None, error: OSError | None = None) -> None:
        self._text, self._error = text, error

    def save(self, name: str, text: bytes) -> None:
        """Nothing is saved here."""
        raise AssertionError

    def newest(self) -> tuple[str, bytes] | None:
        """The one there is."""
        if self._error is not None:
            raise self._error
        return None if self._text is None else (NAME, self._text)


def test_snapshots_may_lie_elsewhere(here: Path) -> None:
    """Then the folder is not looked at."""
    write_snapshot(here, "job_queue_size=6\n")
    text = f"{BASE}job_queue_size=8\nmodel_snapshot={EMPTY}\n".encode()

    settings = load_settings("torchserve", {}, {}, here, lambda: Elsewhere(text))
    without = load_settings("torchserve", {"model_store": "store"}, {}, here, lambda: Elsewhere(None))

    assert (settings.job_queue_size, settings.restored_from, settings.source_file) == (8, NAME, None)
    assert "the moon" in settings.warnings[0]
    assert (without.job_queue_size, without.restored_from) == (100, None)


def test_snapshots_that_cannot_be_read_stop_the_start(here: Path) -> None:
    """A server that silently has none of its models would be worse."""
    with pytest.raises(BadSettings, match=r"the moon cannot be read .down.; mend that, or start with --ncs"):
        load_settings("torchserve", {}, {}, here, lambda: Elsewhere(None, OSError("down")))


def test_variables_of_a_service_in_kubernetes_are_nobodys_mistake(here: Path) -> None:
    """A service called marserve puts them into every container beside it."""
    told = {
        "MARSERVE_SERVICE_HOST": "10.0.0.1",
        "MARSERVE_SERVICE_PORT_PREDS": "8080",
        "MARSERVE_PORT": "tcp://10.0.0.1:8080",
        "MARSERVE_PORT_8080_TCP_ADDR": "10.0.0.1",
        "MARSERVE_METRICS_SERVICE_PORT": "8082",
        "MARSERVE_JOB_QUEUE_SIZ": "3",
    }

    notes = " ".join(load(here, environment=told, entry="marserve").notes)

    assert "MARSERVE_JOB_QUEUE_SIZ is set, and is no setting; did you mean MARSERVE_JOB_QUEUE_SIZE?" in notes
    assert notes.count("MARSERVE_") == 2


@pytest.mark.parametrize("key", BY_KEY)
def test_a_key_of_a_model_is_said_to_be_one(here: Path, key: str) -> None:
    """Rather than likened to another key; a setting of the same name is one."""
    if key in KEYS:
        return
    settings = load(here, f"{key}=4\n")

    assert settings.warnings == (
        f"{key} is a key of a model, for its model-config.yaml; it is ignored (config.properties, line 3)",
    )
    with pytest.raises(BadSettings, match=f"{key} is a key of a model, for its model-config.yaml"):
        load(here, "", {key: "4"}, entry="marserve")


def test_a_key_of_a_model_in_another_spelling_is_one_too(here: Path) -> None:
    """As the API spells it."""
    with pytest.raises(BadSettings, match="batch_size is no key of the server, batchSize one of a model"):
        load(here, "", {"batch_size": "4"}, entry="marserve")
