"""What the library is told of a store: which of the setting, the environment and AWS's files counts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from marserve.settings.stores import STORES, StoreOptions
from marserve.settings.values import Reading
from marserve.store.sources.object_settings import Connection, connect_az, connect_gs, connect_s3
from marserve.store.sources.source import Failed

SECRET = "planted-secret"


def options(kind: Any, **values: Any) -> StoreOptions:
    """Options of every address of this kind."""
    document = json.dumps({f"{kind}://": values})
    return STORES.read(document, Reading("stores", Path("/here"), lambda sentence: None)).choose(kind, f"{kind}://b/m")


def s3(environment: dict[str, str], bucket: str = "bucket", **values: Any) -> Connection:
    """How a bucket is asked."""
    return connect_s3(bucket, options("s3", **values), environment)


@pytest.fixture
def home(tmp_path: Path) -> dict[str, str]:
    """A home folder with a profile of everything."""
    (tmp_path / ".aws").mkdir()
    (tmp_path / ".aws" / "credentials").write_text(
        f"[default]\naws_access_key_id=AKIAFILE\naws_secret_access_key={SECRET}\n"
        "[bare]\nregion=bare-1\naws_access_key_id=AKIABARE\naws_secret_access_key=s\n"
    )
    (tmp_path / ".aws" / "config").write_text("[default]\nregion=file-1\nendpoint_url=https://file.example.org\n")
    return {"HOME": str(tmp_path)}


def test_the_region_is_the_first_that_is_said(home: dict[str, str]) -> None:
    """The setting, the variables, the profile; and one that always was the default."""
    both = {**home, "AWS_REGION": "env-1", "AWS_DEFAULT_REGION": "env-2"}

    assert s3(both, region="set-1").config["region"] == "set-1"
    assert s3(both).config["region"] == "env-1"
    assert s3({**home, "AWS_DEFAULT_REGION": "env-2"}).config["region"] == "env-2"
    assert s3(home).config["region"] == "file-1"
    assert s3({}).config["region"] == "us-east-1"
    assert s3(both, profile="bare").config["region"] == "bare-1"


def test_the_endpoint_is_the_first_that_is_said(home: dict[str, str]) -> None:
    """And plain http only where the operator says it."""
    both = {**home, "AWS_ENDPOINT_URL": "http://env:9000/", "AWS_ENDPOINT_URL_S3": "https://env-s3"}

    assert s3(both, endpoint_url="http://set/").config["aws_endpoint_url_s3"] == "http://set"
    assert s3(both).config["aws_endpoint_url_s3"] == "https://env-s3"
    assert s3({**home, "AWS_ENDPOINT_URL": "http://env:9000/"}).config["aws_endpoint_url_s3"] == "http://env:9000"
    assert s3(home).config["aws_endpoint_url_s3"] == "https://file.example.org"
    assert "aws_endpoint_url_s3" not in s3({}).config
    assert s3(both, endpoint_url="http://set").client["allow_http"] is True
    assert s3(both).client["allow_http"] is False
    assert s3({}).client["allow_http"] is False


@pytest.mark.parametrize("endpoint", ["ftp://x", f"http://u:{SECRET}@x", "http://x?a=1", "x:9000", "http://"])
def test_an_endpoint_of_the_environment_is_checked(endpoint: str) -> None:
    """And not quoted."""
    with pytest.raises(Failed, match="the endpoint that is set for S3 is no http or https address") as refused:
        s3({"AWS_ENDPOINT_URL": endpoint})
    assert SECRET not in str(refused.value)


@pytest.mark.parametrize(
    ("values", "bucket", "is_virtual", "endpoint"),
    [
        ({}, "bucket", True, None),
        ({}, "my.bucket", False, None),
        ({"endpoint_url": "http://h:1"}, "bucket", False, "http://h:1"),
        ({"endpoint_url": "http://h:1", "addressing_style": "virtual"}, "bucket", True, "http://bucket.h:1"),
        ({"endpoint_url": "http://bucket.h:1", "addressing_style": "virtual"}, "bucket", True, "http://bucket.h:1"),
        ({"addressing_style": "path"}, "bucket", False, None),
    ],
)
def test_where_the_bucket_stands(values: Any, bucket: str, is_virtual: bool, endpoint: str | None) -> None:
    """In the host for Amazon's own, in the path for others; never a bucket with dots in a host's name."""
    config = s3({}, bucket, **values).config

    assert config["virtual_hosted_style_request"] is is_virtual
    assert config.get("aws_endpoint_url_s3") == endpoint


def key_of(connection: Connection) -> str | None:
    """The key that requests are signed with, None for the library's own search."""
    return connection.provider()["access_key_id"] if connection.provider else None


def test_credentials_are_the_first_that_are_there(home: dict[str, str]) -> None:
    """The setting's key or profile, the variables, a web identity, the profile; and then the machine's own."""
    mine = {"access_key_id": "AKIASET", "secret_access_key": SECRET}
    keys = {"AWS_ACCESS_KEY_ID": "AKIAENV", "AWS_SECRET_ACCESS_KEY": "s"}
    identity = {"AWS_WEB_IDENTITY_TOKEN_FILE": "/t", "AWS_ROLE_ARN": "r"}

    assert key_of(s3({**home, **keys, **identity}, **mine)) == "AKIASET"
    assert key_of(s3({**home, **keys, **identity}, profile="default")) == "AKIAFILE"
    assert key_of(s3({**home, **keys, **identity})) == "AKIAENV"
    assert (key_of(s3({**home, **identity})), "web identity" in s3({**home, **identity}).how) == (None, True)
    assert key_of(s3(home)) == "AKIAFILE"
    assert (key_of(s3({})), "machine's own" in s3({}).how) == (None, True)


def test_anonymous_is_the_settings_word_before_the_variables() -> None:
    """In both directions."""
    keys = {"AWS_ACCESS_KEY_ID": "AKIAENV", "AWS_SECRET_ACCESS_KEY": "s"}

    assert s3({**keys, "AWS_SKIP_SIGNATURE": "true"}).config["skip_signature"] is True
    assert s3({**keys, "AWS_SKIP_SIGNATURE": "true"}, anonymous=False).config["skip_signature"] is False
    assert s3(keys, anonymous=True).config["skip_signature"] is True
    assert s3(keys, anonymous=True).provider is None


def test_half_a_key_is_refused() -> None:
    """Of the setting, and of the environment."""
    with pytest.raises(Failed, match="and not both"):
        s3({}, secret_access_key=SECRET)
    with pytest.raises(Failed, match="AWS_ACCESS_KEY_ID is set, and AWS_SECRET_ACCESS_KEY is not"):
        s3({"AWS_ACCESS_KEY_ID": "A"})


def test_a_rotated_secret_is_found(tmp_path: Path) -> None:
    """Credentials of files expire, so that they are read again."""
    (tmp_path / "key").write_text("one")
    connection = s3({}, access_key_id="A", secret_access_key={"file": str(tmp_path / "key")})
    assert connection.provider is not None
    first = connection.provider()
    (tmp_path / "key").write_text("two")

    assert (first["secret_access_key"], connection.provider()["secret_access_key"]) == ("one", "two")
    assert first["expires_at"] is not None


def test_no_text_of_a_connection_holds_a_secret() -> None:
    """It is an object that a traceback may show."""
    connection = s3({}, access_key_id="A", secret_access_key=SECRET, proxy_url=f"http://u:{SECRET}@p")

    assert SECRET not in repr(connection)


def az(environment: dict[str, str], account: str | None = None, **values: Any) -> Connection:
    """How a container is asked."""
    return connect_az("box", account, options("az", **values), environment)


def test_the_account_is_the_first_that_is_said() -> None:
    """The address's, if the credentials are for it; the setting's; a connection string's; the variables'."""
    connection = "AccountName=said;AccountKey=a2V5;EndpointSuffix=core.chinacloudapi.cn"

    assert az({}, "own").config["account_name"] == "own"
    assert az({"AZURE_STORAGE_ACCOUNT": "env"}, account_name="set").config["account_name"] == "set"
    assert az({"AZURE_STORAGE_ACCOUNT": "env", "AZURE_STORAGE_CONNECTION_STRING": connection}).config == {
        "container_name": "box",
        "account_name": "said",
        "endpoint": "https://said.blob.core.chinacloudapi.cn",
        "skip_signature": False,
    }
    assert az({"AZURE_STORAGE_ACCOUNT": "env"}).config["account_name"] == "env"
    with pytest.raises(Failed, match="no storage account is named"):
        az({})


@pytest.mark.parametrize(
    ("values", "environment", "found"),
    [
        ({"account_key": SECRET}, {}, {"access_key": SECRET}),
        ({"sas_token": f"?sig={SECRET}"}, {}, {"sas_token": f"sig={SECRET}"}),
        ({"bearer_token": SECRET}, {"AZURE_STORAGE_KEY": "x"}, {"token": SECRET}),
        (
            {"connection_string": f"AccountName=a;SharedAccessSignature=sig={SECRET}"},
            {},
            {"sas_token": f"sig={SECRET}"},
        ),
        ({"connection_string": f"BlobEndpoint=https://a.example.org;AccountKey={SECRET}"}, {}, {"access_key": SECRET}),
        ({}, {"AZURE_STORAGE_ACCESS_KEY": SECRET}, {"access_key": SECRET}),
        ({}, {"AZURE_STORAGE_SAS_TOKEN": f"sig={SECRET}"}, {"sas_token": f"sig={SECRET}"}),
    ],
)
def test_azures_credentials(values: Any, environment: dict[str, str], found: dict[str, str]) -> None:
    """Each of the ways, and one alone: the library would mix them."""
    if "connection_string" not in values:
        environment = {**environment, "AZURE_STORAGE_ACCOUNT": "a"}
    connection = az(environment, **values)

    assert connection.provider is not None
    said = connection.provider()
    said.pop("expires_at")
    assert said == found


def test_a_service_principal_is_told_the_library_alone() -> None:
    """It fetches the tokens; nothing else of the environment is tried."""
    config = az({"AZURE_STORAGE_ACCOUNT": "a"}, tenant_id="t", client_id="c", client_secret=SECRET).config

    assert (config["credential_type"], config["tenant_id"], config["client_secret"]) == ("client_secret", "t", SECRET)


@pytest.mark.parametrize("text", ["UseDevelopmentStorage=true", f"AccountKey={SECRET}", SECRET])
def test_a_connection_string_that_is_none_is_told_without_it(text: str) -> None:
    """With what it lacks."""
    with pytest.raises(Failed) as refused:
        az({"AZURE_STORAGE_CONNECTION_STRING": text})
    assert SECRET not in str(refused.value)


def test_googles_emulator_is_asked_without_credentials() -> None:
    """As its own libraries do; a setting's credentials count all the same."""
    emulated = connect_gs("b", options("gs"), {"STORAGE_EMULATOR_HOST": "localhost:4443"})
    own = connect_gs("b", options("gs", bearer_token=SECRET), {"STORAGE_EMULATOR_HOST": "localhost:4443"})

    assert (emulated.config["base_url"], emulated.config["skip_signature"]) == ("http://localhost:4443", True)
    assert own.config["skip_signature"] is False
    assert connect_gs("b", options("gs"), {}).how.startswith("the machine's own")


def test_googles_credentials_of_gcloud_are_a_file_of_their_own_kind(tmp_path: Path) -> None:
    """The library reads them itself; they cannot stand in the setting."""
    file = tmp_path / "adc.json"
    file.write_text(json.dumps({"type": "authorized_user", "refresh_token": SECRET}))

    config = connect_gs("b", options("gs"), {"GOOGLE_APPLICATION_CREDENTIALS": str(file)}).config
    assert config["application_credentials"] == str(file)
    with pytest.raises(Failed, match="'authorized_user': name the file itself with credentials_file") as refused:
        connect_gs("b", options("gs", credentials=file.read_text()), {})
    assert SECRET not in str(refused.value)
