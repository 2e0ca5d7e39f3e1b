"""Profiles in AWS's own files: which one counts, what it says, and that trouble with them tells no secret."""

from __future__ import annotations

import json
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest

from marserve.store.sources.aws_profiles import Credentials, Profile, find_profile, get_credentials
from marserve.store.sources.source import Failed

SECRET = "planted-secret"


@pytest.fixture
def home(tmp_path: Path) -> dict[str, str]:
    """A home folder with both files."""
    (tmp_path / ".aws").mkdir()
    (tmp_path / ".aws" / "credentials").write_text(
        f"[default]\naws_access_key_id = AKIADEFAULT\naws_secret_access_key = {SECRET}\n"
        f"[team]\naws_access_key_id=AKIATEAM\naws_secret_access_key={SECRET}\naws_session_token=t\n"
        "[half]\naws_access_key_id=AKIAHALF\n"
    )
    (tmp_path / ".aws" / "config").write_text(
        "[default]\nregion = eu-west-1\n"
        "[profile team]\nregion = mars-1\nendpoint_url = https://minio.example.org\n"
        "[profile role]\nrole_arn = arn:aws:iam::1:role/r\nsource_profile = default\n"
        "[profile bare]\nregion = moon-1\n"
    )
    return {"HOME": str(tmp_path)}


def test_the_default_profile_counts_where_nobody_names_one(home: dict[str, str]) -> None:
    """Its credentials of one file and its region of the other."""
    profile = find_profile(home)

    assert profile is not None
    assert (profile.name, profile.region, profile.endpoint_url) == ("default", "eu-west-1", None)
    assert get_credentials(profile) == Credentials("AKIADEFAULT", SECRET, None)


@pytest.mark.parametrize("how", ["setting", "AWS_PROFILE", "AWS_DEFAULT_PROFILE"])
def test_a_profile_is_named_by_the_setting_or_a_variable(home: dict[str, str], how: str) -> None:
    """The setting goes before the variables."""
    profile = (
        find_profile({**home, "AWS_PROFILE": "bare"}, "team")
        if how == "setting"
        else find_profile({**home, how: "team"})
    )

    assert profile is not None
    assert (profile.region, profile.endpoint_url) == ("mars-1", "https://minio.example.org")
    assert get_credentials(profile).session_token == "t"


def test_the_files_may_lie_elsewhere(home: dict[str, str], tmp_path: Path) -> None:
    """By AWS's variables."""
    (tmp_path / "c").write_text("[default]\naws_access_key_id=A\naws_secret_access_key=s\n")
    profile = find_profile({"AWS_SHARED_CREDENTIALS_FILE": str(tmp_path / "c"), "HOME": "/nonexistent"})

    assert profile is not None
    assert get_credentials(profile).access_key_id == "A"


def test_without_files_there_is_no_profile(tmp_path: Path) -> None:
    """And one that was asked for is missed."""
    assert find_profile({"HOME": str(tmp_path)}) is None
    assert find_profile({}) is None
    with pytest.raises(Failed, match="have no profile team"):
        find_profile({"HOME": str(tmp_path)}, "team")
    with pytest.raises(Failed, match="have no profile team"):
        find_profile({"HOME": str(tmp_path), "AWS_PROFILE": "team"})


def test_a_profile_that_names_none_has_no_credentials(home: dict[str, str]) -> None:
    """Its region counts all the same."""
    bare, half = find_profile(home, "bare"), find_profile(home, "half")
    assert bare is not None
    assert half is not None

    assert (bare.region, bare.has_credentials) == ("moon-1", False)
    with pytest.raises(Failed, match="profile bare of AWS's files has no credentials"):
        get_credentials(bare)
    with pytest.raises(Failed, match="profile half of AWS's files has an aws_access_key_id and no secret"):
        get_credentials(half)


@pytest.mark.parametrize("text", [f"aws_secret_access_key {SECRET}\n", f"[a\n{SECRET}\n", "[a]\n[a"])
def test_a_file_that_is_none_is_told_without_its_lines(tmp_path: Path, text: str) -> None:
    """The reader's own message would quote one."""
    (tmp_path / "c").write_text(text)

    with pytest.raises(Failed, match="a line of AWS's files") as refused:
        find_profile({"AWS_SHARED_CREDENTIALS_FILE": str(tmp_path / "c")})
    assert SECRET not in str(refused.value)
    assert refused.value.__suppress_context__


def _process(folder: Path, program: str) -> Profile:
    (folder / "p.py").write_text(program)
    return Profile("p", {"credential_process": f"{sys.executable} {folder / 'p.py'} --account 'of mine'"})


def test_a_program_tells_credentials_and_how_long_they_count(tmp_path: Path) -> None:
    """It is run without a shell, its arguments taken apart as a shell would."""
    said = {"Version": 1, "AccessKeyId": "A", "SecretAccessKey": SECRET, "Expiration": "2099-01-01T00:00:00Z"}
    profile = _process(tmp_path, f"import sys; assert sys.argv[2] == 'of mine'; print({json.dumps(json.dumps(said))})")

    assert get_credentials(profile) == Credentials("A", SECRET, None, datetime(2099, 1, 1, tzinfo=UTC))


@pytest.mark.parametrize(
    ("program", "words"),
    [
        (f"import sys; print({SECRET!r}); sys.exit(3)", "ended with 3"),
        (f"print({SECRET!r})", "printed no credentials"),
        ("print('{}')", "printed no credentials"),
        ("print('{\"Version\": 2}')", "printed no credentials"),
        ("print('[1]')", "printed no credentials"),
    ],
)
def test_a_program_that_fails_is_told_without_what_it_said(tmp_path: Path, program: str, words: str) -> None:
    """Standard error is not taken in either."""
    with pytest.raises(Failed, match=words) as refused:
        get_credentials(_process(tmp_path, program))
    assert SECRET not in str(refused.value)


def test_a_program_that_is_not_there_is_told() -> None:
    """With what the system says."""
    with pytest.raises(Failed, match=r"cannot be run \(No such file"):
        get_credentials(Profile("p", {"credential_process": "/nonexistent/program"}))


def test_a_role_is_boto3s_to_take_on(home: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it is not installed the sentence says so; what it raises is told by its type alone."""
    profile = find_profile(home, "role")
    assert profile is not None

    monkeypatch.setitem(sys.modules, "boto3", None)
    with pytest.raises(Failed, match="which boto3 knows how to do: pip install boto3"):
        get_credentials(profile)

    class Boto3:
        class Session:
            def __init__(self, profile_name: str) -> None:
                raise RuntimeError(f"{SECRET} {profile_name}")

    monkeypatch.setitem(sys.modules, "boto3", Boto3)
    with pytest.raises(Failed, match=r"boto3 found no credentials for profile role \(RuntimeError\)"):
        get_credentials(profile)


def test_no_text_of_credentials_holds_the_secret(home: dict[str, str]) -> None:
    """Nor of a profile."""
    profile = find_profile(home, "team")
    assert profile is not None

    assert SECRET not in repr(profile) + repr(get_credentials(profile))
