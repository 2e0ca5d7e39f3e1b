"""Which certificate the listeners have, who is asked for a key, and what becomes of the file of keys."""

from __future__ import annotations

import contextlib
import json
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import trustme

from marserve.api.browsers import BrowserRules
from marserve.api.errors import ForeignHost, ForeignOrigin
from marserve.api.tls import Identity, make_up_identity
from marserve.app.building.access import grpc_identity, listeners_identity, prepare_access
from marserve.app.building.cannot_start import CannotStart
from marserve.errors import BadSettings, InvalidToken, UploadsClosed
from marserve.settings import Address, Settings, load_settings
from marserve.settings.table import Entry

HTTPS = "inference_address=https://127.0.0.1:8443\n"


@pytest.fixture(scope="module")
def identity() -> Identity:
    """A certificate and its key."""
    return make_up_identity(["localhost"])


def load(here: Path, lines: str) -> Settings:
    """Settings from these lines."""
    (here / "config.properties").write_text(f"model_store=.\n{lines}")
    return load_settings("marserve", {}, {}, here)


def test_a_certificate_is_looked_for_only_where_an_address_is_https(tmp_path: Path, identity: Identity) -> None:
    """Files that are named beside http addresses are not opened."""
    (tmp_path / "cert.pem").write_bytes(b"")
    (tmp_path / "key.pem").write_bytes(b"")

    assert listeners_identity(load(tmp_path, "certificate_file=cert.pem\nprivate_key_file=key.pem\n")) is None


def test_a_keystore_goes_before_files_and_files_before_a_made_up_certificate(
    tmp_path: Path, identity: Identity
) -> None:
    """As TorchServe has it."""
    (tmp_path / "cert.pem").write_bytes(identity.chain_pem)
    (tmp_path / "key.pem").write_bytes(identity.key_pem)
    (tmp_path / "keys.p12").write_bytes(b"no keystore")
    files = HTTPS + "certificate_file=cert.pem\nprivate_key_file=key.pem\n"

    assert listeners_identity(load(tmp_path, files)) == identity
    made_up = listeners_identity(load(tmp_path, HTTPS))
    assert made_up is not None
    assert made_up != identity
    with pytest.raises(BadSettings, match="no PKCS12 keystore"):
        listeners_identity(load(tmp_path, f"{files}keystore=keys.p12\n"))


@pytest.mark.anyio
async def test_with_tokens_off_nobody_is_asked(tmp_path: Path) -> None:
    """And no file of keys is written."""
    settings = load(tmp_path, "disable_token_authorization=true\n")
    access = await prepare_access(settings)

    async with contextlib.AsyncExitStack() as stack:
        await access.write_tokens(stack)
        assert not settings.token_file.exists()

    assert access.tls is None
    assert access.authorize("inference") is None
    assert access.inference_tokens is None


@pytest.mark.anyio
async def test_clients_find_their_keys_while_the_server_runs(tmp_path: Path) -> None:
    """A key opens what it is for and nothing else; the file goes with the server."""
    settings = load(tmp_path, "disable_token_authorization=false\n")
    access = await prepare_access(settings)
    check = access.authorize("management")
    assert check is not None

    async with contextlib.AsyncExitStack() as stack:
        assert not settings.token_file.exists()
        await access.write_tokens(stack)
        keys = {kind: held["key"] for kind, held in json.loads(settings.token_file.read_text()).items()}
        check(f"Bearer {keys['management']}")
        for wrong in (None, f"Bearer {keys['inference']}"):
            with pytest.raises(InvalidToken):
                check(wrong)

    assert not settings.token_file.exists()
    assert access.inference_tokens is not None


@pytest.mark.anyio
async def test_keys_that_nobody_could_find_keep_the_server_from_starting(tmp_path: Path) -> None:
    """A server that nobody can call is none."""
    settings = load(tmp_path, "disable_token_authorization=false\n")
    settings.token_file.mkdir()
    access = await prepare_access(settings)

    async with contextlib.AsyncExitStack() as stack:
        with pytest.raises(CannotStart, match=settings.token_file.name):
            await access.write_tokens(stack)


@pytest.mark.anyio
async def test_a_certificate_that_does_not_fit_keeps_the_server_from_starting(
    tmp_path: Path, identity: Identity
) -> None:
    """Before any port is taken."""
    (tmp_path / "cert.pem").write_bytes(identity.chain_pem)
    (tmp_path / "key.pem").write_bytes(make_up_identity(["localhost"]).key_pem)

    with pytest.raises(BadSettings):
        await prepare_access(load(tmp_path, HTTPS + "certificate_file=cert.pem\nprivate_key_file=key.pem\n"))


# ------------------------------------------------------------------------------------------------- browsers

MANAGEMENT = ["Management"]
INFERENCE = ["Inference"]
HERE_ONLY = Address("http", "127.0.0.1", 8081)


async def rules_of(
    here: Path,
    lines: str,
    names: list[str],
    address: Address = HERE_ONLY,
    *,
    is_here: bool = True,
    entry: Entry = "marserve",
) -> BrowserRules:
    """The rules of an address with these APIs."""
    (here / "config.properties").write_text(f"model_store=.\ndisable_token_authorization=true\n{lines}")
    access = await prepare_access(load_settings(entry, {}, {}, here))
    return access.browser_rules(address, names, is_here=is_here)


def takes(rules: BrowserRules, host: bytes, method: str = "GET", **headers: str) -> bool:
    """Whether a request for this host passes."""
    with contextlib.suppress(ForeignHost, ForeignOrigin):
        rules.check(method, [(b"Host", host), *((name.encode(), value.encode()) for name, value in headers.items())])
        return True
    return False


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("entry", "names", "is_here", "lines", "takes_any"),
    [
        ("marserve", MANAGEMENT, True, "", False),
        ("marserve", INFERENCE, True, "", False),
        ("torchserve", MANAGEMENT, True, "", False),
        ("torchserve", [*INFERENCE, *MANAGEMENT], True, "", False),
        ("torchserve", INFERENCE, True, "", True),
        ("marserve", MANAGEMENT, False, "", True),
        ("marserve", INFERENCE, False, "", True),
        ("torchserve", INFERENCE, True, "allowed_hosts=models.example.com\n", False),
        ("torchserve", INFERENCE, False, "allowed_hosts=models.example.com\n", False),
        ("marserve", MANAGEMENT, False, "allowed_hosts=models.example.com\n", False),
        ("marserve", MANAGEMENT, True, "allowed_hosts=*\n", True),
    ],
)
async def test_a_foreign_host_is_refused_where_the_servers_names_are_known(
    tmp_path: Path, entry: Entry, names: list[str], is_here: bool, lines: str, takes_any: bool
) -> None:
    """On loopback and with `allowed_hosts`; TorchServe answers predictions whatever the Host, as is recorded."""
    rules = await rules_of(tmp_path, lines, names, is_here=is_here, entry=entry)

    assert takes(rules, b"evil.example") is takes_any
    assert takes(rules, b"models.example.com:443") is (bool(lines) or takes_any)
    assert takes(rules, b"localhost:8081")


@pytest.mark.anyio
@pytest.mark.parametrize("entry", ["marserve", "torchserve"])
@pytest.mark.parametrize("names", [MANAGEMENT, INFERENCE])
@pytest.mark.parametrize("is_here", [True, False])
async def test_a_foreign_page_changes_nothing_anywhere(
    tmp_path: Path, entry: Entry, names: list[str], is_here: bool
) -> None:
    """Unless `cors_allowed_origin` names its origin."""
    rules = await rules_of(tmp_path, "cors_allowed_origin=https://ui.example\n", names, is_here=is_here, entry=entry)

    assert not takes(rules, b"localhost", "POST", Origin="https://evil.example")
    assert takes(rules, b"localhost", "POST", Origin="https://ui.example")
    assert takes(rules, b"localhost", "POST")


@pytest.mark.anyio
async def test_a_page_of_a_server_behind_tls_is_its_own_only_where_it_speaks_tls(tmp_path: Path) -> None:
    """The scheme is the listener's."""
    tls = await rules_of(tmp_path, "", MANAGEMENT, Address("https", "127.0.0.1", 8443))
    plain = await rules_of(tmp_path, "", MANAGEMENT)

    origin = {"Origin": "https://localhost:8443"}
    assert [takes(rules, b"localhost:8443", "POST", **origin) for rules in (tls, plain)] == [True, False]


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("lines", "client", "origin", "error"),
    [
        ("", "127.0.0.1", "", None),
        ("", "10.0.0.7", "", UploadsClosed),
        ("allow_uploads=true\n", "10.0.0.7", "", None),
        ("allow_uploads=true\n", "10.0.0.7", "https://ui.example", ForeignOrigin),
        ("cors_allowed_origin=*\n", "127.0.0.1", "https://ui.example", ForeignOrigin),
        ("disable_token_authorization=false\n", "10.0.0.7", "https://ui.example", None),
    ],
)
async def test_uploads_without_keys_are_this_machines_and_no_other_pages(
    tmp_path: Path, lines: str, client: str, origin: str, error: type[Exception] | None
) -> None:
    """Whatever `cors_allowed_origin` says; where there are keys, these were checked before."""
    (tmp_path / "config.properties").write_text(f"model_store=.\ndisable_token_authorization=true\n{lines}")
    access = await prepare_access(load_settings("marserve", {}, {}, tmp_path))
    headers = [(b"host", b"localhost:8081"), *([(b"origin", origin.encode())] if origin else [])]
    scope = {"type": "http", "method": "PUT", "path": "/archives/m.mar", "headers": headers, "client": (client, 1)}

    with pytest.raises(error) if error else contextlib.nullcontext():
        access.upload_check()(scope)


@pytest.mark.anyio
async def test_an_addresss_own_name_is_known(tmp_path: Path) -> None:
    """A machine's name in `/etc/hosts` may be loopback."""
    rules = await rules_of(tmp_path, "", MANAGEMENT, Address("http", "Box", 8081))

    assert (takes(rules, b"box:8081"), takes(rules, b"bax:8081")) == (True, False)


@pytest.mark.anyio
async def test_a_certificate_that_has_expired_is_a_warning_at_the_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Of https addresses and of gRPC ports; the server starts all the same."""
    ended = datetime.now(UTC) - timedelta(days=1)
    issued = trustme.CA().issue_cert("localhost", not_before=ended - timedelta(days=9), not_after=ended)
    issued.cert_chain_pems[0].write_to_path(tmp_path / "cert.pem")
    issued.private_key_pem.write_to_path(tmp_path / "key.pem")
    lines = (
        "inference_address=https://127.0.0.1:8443\nenable_grpc_ssl=true\ndisable_token_authorization=true\n"
        f"certificate_file={tmp_path / 'cert.pem'}\nprivate_key_file={tmp_path / 'key.pem'}\n"
    )
    settings = load(tmp_path, lines)

    access = await prepare_access(settings)
    grpc_identity(settings)

    assert access.tls is not None
    told = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert [message.partition(" has expired")[0] for message in told] == [
        "The certificate of the https addresses",
        "The certificate of the gRPC ports",
    ]


@pytest.mark.anyio
async def test_only_a_key_of_the_listener_shows_what_its_description_says_of_models(tmp_path: Path) -> None:
    """Any request does where there are no keys."""
    access = await prepare_access(load(tmp_path, "disable_token_authorization=false\n"))
    without = await prepare_access(load(tmp_path, "disable_token_authorization=true\n"))
    assert access.tokens is not None
    inference = b"Bearer " + access.tokens.key_of("inference")

    assert [access.has_key(kind, inference) for kind in ("inference", "either", "management")] == [True, True, False]
    assert [access.has_key("either", value) for value in (None, b"Bearer x")] == [False, False]
    assert without.has_key("inference", None)
