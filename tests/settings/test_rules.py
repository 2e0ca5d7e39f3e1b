"""What is refused at start, with which sentence; what is accepted and said once."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from marserve.errors import BadSettings
from marserve.settings import KEYS, Entry, Settings, load_settings


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """A working directory with a model store, a certificate and its key."""
    (tmp_path / "store").mkdir()
    (tmp_path / "cert.pem").write_text("")
    (tmp_path / "key.pem").write_text("")
    return tmp_path


def load(
    here: Path, entry: Entry = "torchserve", environment: Mapping[str, str] | None = None, **keys: str | None
) -> Settings:
    """Settings from a file with these keys beside those that let it start; None leaves one out."""
    lines = {"disable_token_authorization": "true", "model_store": "store"} | keys
    text = "".join(f"{name}={value}\n" for name, value in lines.items() if value is not None)
    (here / "config.properties").write_text(text)
    return load_settings(entry, {}, environment or {}, here)


ASKS_FOR_MORE = {
    "cpu_launcher_enable": "true",
    "debug": "true",
    "ipex_enable": "true",
    "ipex_gpu_enable": "true",
}


def test_every_key_that_is_refused_is_tried_below() -> None:
    """A new one cannot be forgotten."""
    assert {name for name, key in KEYS.items() if key.refuses} == set(ASKS_FOR_MORE)


@pytest.mark.parametrize(("name", "value"), ASKS_FOR_MORE.items(), ids=ASKS_FOR_MORE)
@pytest.mark.parametrize("entry", ["torchserve", "marserve"])
def test_what_is_not_there_is_refused_with_a_sentence(here: Path, entry: Entry, name: str, value: str) -> None:
    """Key, value, line, and the next step."""
    with pytest.raises(BadSettings) as error:
        load(here, entry, **{name: value})

    message = str(error.value)
    assert message.startswith(f"{name}={here / value if KEYS[name].kind.name == 'path' else value} ")
    assert any(step in message for step in ("remove it", "set it to false", "set this to false"))
    assert message.endswith("(config.properties, line 3)")


def test_values_that_switch_such_a_thing_off_are_accepted(here: Path) -> None:
    """In silence: nothing is missing."""
    off = {name: KEYS[name].kind.write(KEYS[name].defaults["torchserve"]) for name in ASKS_FOR_MORE}

    settings = load(here, metrics_mode="prometheus", **off)

    assert (settings.warnings, settings.notes) == ((), ())


def test_what_changes_nothing_is_said_once_for_all_keys_of_a_kind(here: Path) -> None:
    """The Java server's keys never will."""
    settings = load(
        here,
        metrics_mode="prometheus",
        number_of_netty_threads="32",
        vmargs="-Xmx1g",
        io_ratio="50",
    )

    assert settings.notes == ("number_of_netty_threads, vmargs: accepted; the Java server's, without effect here",)


@pytest.mark.parametrize(
    ("mode", "said"), [("log", "stays empty"), ("legacy", "three counters are"), ("prometheus", None)]
)
def test_a_metrics_mode_that_differs_from_torchserves_is_said(here: Path, mode: str, said: str | None) -> None:
    """TorchServe's default, `log`, means an empty page."""
    notes = load(here, metrics_mode=mode).notes

    assert len(notes) == (0 if said is None else 1)
    assert all(note.startswith(f"metrics_mode={mode}: ") and str(said) in note for note in notes)


def test_an_origin_with_a_slash_is_a_warning(here: Path) -> None:
    """Browsers send none, so that it would never match, in silence."""
    said = load(here, cors_allowed_origin="https://a.example/, https://b.example:8443").warnings

    (warning,) = [each for each in said if "cors_allowed_origin" in each]
    assert "'https://a.example/'" in warning
    assert warning.endswith("write https://a.example")
    assert not any("cors" in each for each in load(here, cors_allowed_origin="*").warnings)


@pytest.mark.parametrize(
    ("vmargs", "is_said"), [("-Xmx1g -Dlog4j.configurationFile=file:///x.xml", True), ("-Xmx1g", False)]
)
def test_a_log4j_configuration_is_answered_with_the_keys_that_do_the_same(
    here: Path, vmargs: str, is_said: bool
) -> None:
    """Other arguments of the Java machine were nobody's wish for logs."""
    warnings = load(here, metrics_mode="prometheus", vmargs=vmargs).warnings

    assert [f"vmargs={vmargs} names a log4j configuration" in warning for warning in warnings] == [True] * is_said
    assert all("log_location and metrics_location" in warning for warning in warnings)


def test_the_two_entries_differ_in_whether_tokens_are_asked_for(here: Path) -> None:
    """TorchServe asks unless told not to; marserve is on loopback and asks when told to."""
    assert not load(here, disable_token_authorization=None).disable_token_authorization
    assert load(here, "marserve", disable_token_authorization=None).disable_token_authorization
    assert not load(here, "marserve", disable_token_authorization="false").disable_token_authorization


def test_the_key_file_lies_in_the_working_directory_unless_told_otherwise(here: Path) -> None:
    """TorchServe's clients look for it there."""
    assert load(here).token_file == here / "key_file.json"
    assert load(here, token_file="run/keys.json").token_file == here / "run" / "keys.json"
    with pytest.raises(BadSettings, match="token_file is empty"):
        load(here, token_file="")


# ---------------------------------------------------------------------------------------------------- folders


def test_torchserve_must_be_told_its_model_store(here: Path) -> None:
    """In its launcher's words."""
    with pytest.raises(BadSettings) as error:
        load(here, model_store=None)

    assert str(error.value) == "Missing mandatory parameter --model-store"


@pytest.mark.parametrize("name", ["model_store", "workflow_store"])
def test_a_folder_that_is_not_there_is_named_as_it_was_given(here: Path, name: str) -> None:
    """Each entry in its own words."""
    with pytest.raises(BadSettings) as theirs:
        load(here, **{name: "nowhere"})
    with pytest.raises(BadSettings) as ours:
        load(here, "marserve", **{name: "nowhere"})

    flag = f"--{name.replace('_', '-')}"
    assert str(theirs.value) == f"{flag} directory not found: nowhere"
    assert str(ours.value).startswith(f"{name} is 'nowhere', and there is no such folder; create it, or name another")


def test_marserve_starts_with_no_store_where_none_was_named(here: Path) -> None:
    """Its default folder is nobody's wish, so its absence is a warning."""
    settings = load(here, "marserve", model_store=None)

    assert settings.model_store == here / "model_store"
    assert settings.warnings == (
        "model_store is 'model_store', and there is no such folder: there is nothing to load; create it, or name "
        "another with --model-store",
    )


def test_an_interpreter_that_is_not_there_is_a_warning(here: Path) -> None:
    """It may be mounted or made later, and other models need none."""
    (here / "python").touch()

    warnings = load(here, allowed_interpreters=f"old=/nowhere/python,{here}/python").warnings

    assert warnings == (
        "allowed_interpreters has old=/nowhere/python, and there is no such file: models that name it are refused",
    )


def test_a_temporary_folder_that_is_not_there_is_named(here: Path) -> None:
    """In TorchServe's words."""
    with pytest.raises(BadSettings) as error:
        load(here, environment={"TEMP": "gone"})

    assert str(error.value) == "Invalid temp directory: gone, please check TEMP environment variable."


# ------------------------------------------------------------------------------------------------------- TLS


def test_https_with_certificate_and_key_is_accepted(here: Path) -> None:
    """Both as PEM files."""
    settings = load(
        here, inference_address="https://127.0.0.1:8443", certificate_file="cert.pem", private_key_file="key.pem"
    )

    assert settings.inference_address.is_tls
    assert settings.certificate_file == here / "cert.pem"


@pytest.mark.parametrize("name", ["inference_address", "management_address", "metrics_address"])
def test_https_with_half_of_a_pair_is_refused(here: Path, name: str) -> None:
    """A certificate without its key says nothing."""
    with pytest.raises(BadSettings) as error:
        load(here, certificate_file="cert.pem", **{name: "https://127.0.0.1:8443"})

    assert f"{name}=https://127.0.0.1:8443 is https, and private_key_file is not given" in str(error.value)


def test_https_without_a_certificate_has_one_made_up_with_a_warning(here: Path) -> None:
    """As TorchServe does, silently."""
    (warning,) = load(here, inference_address="https://127.0.0.1:8443").warnings

    assert "no certificate is given: one is made up at each start" in warning


def test_a_keystore_takes_the_place_of_both_files(here: Path) -> None:
    """With its password, which is shown nowhere."""
    (here / "keys.p12").write_bytes(b"")

    settings = load(here, inference_address="https://127.0.0.1:8443", keystore="keys.p12", keystore_pass="hush")

    assert settings.keystore == here / "keys.p12"
    assert settings.warnings == ()
    assert "hush" not in settings.explain("keystore_pass")
    with pytest.raises(BadSettings, match=r"keystore is 'gone\.p12', and there is no such file"):
        load(here, keystore="gone.p12")


def test_a_certificate_that_is_not_there_is_named(here: Path) -> None:
    """Before anything listens."""
    with pytest.raises(BadSettings, match=r"certificate_file is 'gone\.pem', and there is no such file"):
        load(here, certificate_file="gone.pem")


@pytest.mark.parametrize("key", ["certificate_file", "private_key_file", "keystore", "desired_state"])
@pytest.mark.parametrize(
    ("put", "why"),
    [
        (os.mkfifo, "it is a named pipe, not a regular file"),
        (lambda path: path.symlink_to("/dev/zero"), "it is a character device, not a regular file"),
        (Path.mkdir, "it is a folder, not a regular file"),
        (lambda path: path.symlink_to(path), "it cannot be looked at"),
        (lambda path: None, "there is no such file"),
    ],
)
def test_what_stands_in_the_place_of_a_file_is_named(
    here: Path, key: str, put: Callable[[Path], None], why: str
) -> None:
    """A pipe was said not to be there."""
    put(here / "odd")

    with pytest.raises(BadSettings, match=f"{key} is 'odd', and {why}"):
        load(here, **{key: "odd"})


def test_tls_on_the_grpc_ports_needs_pem_files(here: Path) -> None:
    """No keystore and no certificate made up, as in TorchServe."""
    with pytest.raises(BadSettings, match="enable_grpc_ssl is true, and private_key_file is not given"):
        load(here, enable_grpc_ssl="true", certificate_file="cert.pem")

    settings = load(here, enable_grpc_ssl="true", certificate_file="cert.pem", private_key_file="key.pem")
    assert settings.enable_grpc_ssl


# ------------------------------------------------------------------------------------------------- addresses


def test_unix_addresses_are_accepted_unless_native_io_is_off(here: Path) -> None:
    """As in TorchServe."""
    assert load(here, inference_address="unix:/run/x.sock").inference_address.path == "/run/x.sock"
    with pytest.raises(BadSettings, match=r"inference_address=unix:/run/x\.sock is a socket file"):
        load(here, inference_address="unix:/run/x.sock", use_native_io="false")


def test_marserve_opens_management_only_when_told(here: Path) -> None:
    """Any client that reaches it can run code here."""
    with pytest.raises(BadSettings, match="MARSERVE_ALLOW_OPEN_MANAGEMENT=true"):
        load(here, "marserve", management_address="http://0.0.0.0:8081")

    environment = {"MARSERVE_ALLOW_OPEN_MANAGEMENT": "true"}
    opened = load(here, "marserve", environment, management_address="http://0.0.0.0:8081")
    assert opened.warnings == ()
    assert load(here, "marserve", management_address="http://0.0.0.0:8081", allow_open_management="true")


@pytest.mark.parametrize("entry", ["torchserve", "marserve"])
def test_management_that_asks_for_tokens_may_be_open(here: Path, entry: Entry) -> None:
    """Nobody manages models unasked then."""
    settings = load(here, entry, management_address="http://0.0.0.0:8081", disable_token_authorization="false")

    assert settings.warnings == ()


def test_torchserve_takes_tokens_switched_off_for_being_told_and_warns(here: Path) -> None:
    """Its images bind all interfaces so."""
    settings = load(here, management_address="http://0.0.0.0:8081")

    (warning,) = settings.warnings
    assert "any client that reaches it can run code here" in warning
    assert not load(here, management_address="http://0.0.0.0:8081", allow_open_management="true").warnings


def test_inference_and_metrics_may_be_open(here: Path) -> None:
    """Only management needs the word."""
    settings = load(here, "marserve", inference_address="http://0.0.0.0:80", metrics_address="http://0.0.0.0:82")

    assert settings.warnings == ()


def test_management_over_grpc_is_opened_only_when_told(here: Path) -> None:
    """It can do what HTTP's can."""
    with pytest.raises(BadSettings, match=r"grpc_management_address=0\.0\.0\.0 can be reached from other machines"):
        load(here, "marserve", grpc_management_address="0.0.0.0")

    [warning] = load(here, grpc_management_address="0.0.0.0", metrics_mode="prometheus").warnings
    assert warning.startswith("grpc_management_address=0.0.0.0 can be reached")
    assert load(here, "marserve", grpc_inference_address="0.0.0.0").warnings == ()
    assert load(here, "marserve", grpc_management_address="localhost").warnings == ()


@pytest.mark.parametrize(("former", "now"), [("kfserving", "kserve"), ("kfservingv2", "kservev2")])
def test_former_words_for_envelopes_name_those_of_today(here: Path, former: str, now: str) -> None:
    """No model would load with them; other words may name modules of the archives."""
    with pytest.raises(BadSettings, match=f"service_envelope={former} is the former name of {now}; write that"):
        load(here, service_envelope=former)

    assert load(here, service_envelope="our_envelope").service_envelope == "our_envelope"


@pytest.mark.parametrize("name", ["ray_listen", "ray_advertise"])
@pytest.mark.parametrize("value", ["7443", "host", "host:", ":7443", "host:port", "host:70000"])
def test_where_agents_connect_to_is_a_host_and_a_port(here: Path, name: str, value: str) -> None:
    """Key, value, and what it must be."""
    with pytest.raises(BadSettings, match=f"{name} is '{value}', and must be HOST:PORT"):
        load(here, **{name: value})
    assert getattr(load(here, **{name: "[::]:7443"}), name) == "[::]:7443"


@pytest.mark.parametrize("name", ["inference_address", "grpc_inference_address"])
def test_control_at_inference_is_opened_to_other_machines_only_with_keys_or_when_told(here: Path, name: str) -> None:
    """It can do what management can."""
    given = {name: "0.0.0.0" if name.startswith("grpc") else "http://0.0.0.0:80", "open_inference_control": "true"}
    with pytest.raises(BadSettings, match=rf"open_inference_control=true lets callers at {name}=.*0\.0\.0\.0"):
        load(here, "marserve", **given)

    assert load(here, "marserve", **given, disable_token_authorization="false").open_inference_control
    assert load(here, "marserve", **given, allow_open_management="true").open_inference_control
    assert load(here, "marserve", open_inference_control="true").warnings == ()


def test_a_server_that_would_end_itself_before_a_stall_counts_is_refused(here: Path) -> None:
    """0 is off, and a minute is well."""
    with pytest.raises(BadSettings, match=r"abort_when_stuck is '0.5', shorter than loop_stall_threshold, 1 s"):
        load(here, abort_when_stuck="0.5")

    assert load(here, abort_when_stuck="0").abort_when_stuck == 0
    assert load(here, abort_when_stuck="60").abort_when_stuck == 60
    assert load(here, abort_when_stuck="0.5", loop_stall_threshold="0.2").abort_when_stuck == 0.5


def test_a_sampled_access_log_is_noted_with_its_rule(here: Path) -> None:
    """Who counts its lines must know."""
    assert not any("access_log_sample" in note for note in load(here).notes)

    notes = load(here, access_log_sample="0.01", access_log_slow="2").notes

    assert (
        "access_log_sample=0.01: the access log has that share of the requests that were answered well within "
        "access_log_slow, 2 s, and all others"
    ) in notes
