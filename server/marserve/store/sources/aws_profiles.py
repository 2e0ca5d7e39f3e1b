"""Credentials, region and endpoint of a profile in AWS's own files.

Static keys are read here, and programs named by `credential_process` are run here. Profiles that have to ask AWS (roles
to assume, single sign-on) are resolved by boto3, if it is installed. Blocks: run it in a thread.
"""

from __future__ import annotations

import configparser
import json
import shlex
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from marserve.files.regular import open_regular
from marserve.store.sources.source import Failed

PROCESS_LIMIT_S = 60.0
MAX_FILE_BYTES = 1024 * 1024
_WAYS = ("aws_access_key_id", "credential_process", "role_arn", "sso_session", "sso_start_url")


@dataclass(frozen=True)
class Credentials:
    """An access key. `expires` is a moment with a time zone, None if it never expires."""

    access_key_id: str
    secret_access_key: str = field(repr=False)
    session_token: str | None = field(default=None, repr=False)
    expires: datetime | None = None


@dataclass(frozen=True)
class Profile:
    """One profile: `values` of both files; those of the credentials file take precedence."""

    name: str
    values: Mapping[str, str] = field(repr=False)

    @property
    def region(self) -> str | None:
        """Its region, or None."""
        return self.values.get("region")

    @property
    def endpoint_url(self) -> str | None:
        """Its endpoint, or None."""
        return self.values.get("endpoint_url")

    @property
    def has_credentials(self) -> bool:
        """Whether it names any way to credentials."""
        return any(name in self.values for name in _WAYS)


def find_profile(environment: Mapping[str, str], name: str | None = None) -> Profile | None:
    """The profile `name`, or that of `AWS_PROFILE`, or `default`; None if none is named and there is no `default`.

    Raises Failed for a missing profile that was named, and for files that cannot be read.
    """
    asked = name or environment.get("AWS_PROFILE") or environment.get("AWS_DEFAULT_PROFILE")
    wanted = asked or "default"
    home = Path(environment.get("HOME") or "/nonexistent")
    config = _read(Path(environment.get("AWS_CONFIG_FILE") or home / ".aws" / "config"))
    credentials = _read(Path(environment.get("AWS_SHARED_CREDENTIALS_FILE") or home / ".aws" / "credentials"))
    found: dict[str, str] = {}
    is_there = False
    for parser, sections in ((config, (f"profile {wanted}", wanted)), (credentials, (wanted,))):
        for section in sections:
            if parser.has_section(section):
                is_there = True
                found |= {key: value for key, value in parser.items(section) if value}
                break
    if is_there:
        return Profile(wanted, found)
    if asked:
        raise Failed(f"AWS's files have no profile {asked[:60]}; `aws configure --profile …` makes one")
    return None


def _read(path: Path) -> configparser.RawConfigParser:
    parser = configparser.RawConfigParser(strict=False, default_section="\0")
    try:
        with open_regular(path) as file:
            text = file.read(MAX_FILE_BYTES).decode()
    except FileNotFoundError:
        return parser
    except (OSError, UnicodeDecodeError):
        raise Failed("AWS's files (AWS_CONFIG_FILE, AWS_SHARED_CREDENTIALS_FILE) cannot be read") from None
    try:
        parser.read_string(text)
    except configparser.Error:  # its message quotes the line, and that may be a secret
        raise Failed("a line of AWS's files (AWS_CONFIG_FILE, AWS_SHARED_CREDENTIALS_FILE) is no setting") from None
    return parser


def get_credentials(profile: Profile) -> Credentials:
    """Its current credentials. Raises Failed if it has none, or they are not available on this machine."""
    values = profile.values
    if "role_arn" not in values and "aws_access_key_id" in values:
        if "aws_secret_access_key" not in values:
            raise Failed(f"profile {profile.name} of AWS's files has an aws_access_key_id and no secret for it")
        return Credentials(
            values["aws_access_key_id"], values["aws_secret_access_key"], values.get("aws_session_token")
        )
    if "role_arn" not in values and "credential_process" in values:
        return _run(values["credential_process"], profile.name)
    if profile.has_credentials:
        return _ask_boto3(profile.name)
    raise Failed(f"profile {profile.name} of AWS's files has no credentials")


def _run(command: str, name: str) -> Credentials:
    """Run the program of a profile, without a shell, and read what it prints."""
    try:
        done = subprocess.run(
            shlex.split(command),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=PROCESS_LIMIT_S,
            check=True,
        )
        said = json.loads(done.stdout)
        if said["Version"] != 1:
            raise ValueError
        expires = said.get("Expiration")
        return Credentials(
            str(said["AccessKeyId"]),
            str(said["SecretAccessKey"]),
            said.get("SessionToken"),
            None if expires is None else _moment(expires),
        )
    except subprocess.CalledProcessError as error:
        raise Failed(f"the credential_process of profile {name} ended with {error.returncode}") from None
    except subprocess.TimeoutExpired:
        raise Failed(f"the credential_process of profile {name} took more than {PROCESS_LIMIT_S:g} s") from None
    except OSError as error:
        raise Failed(f"the credential_process of profile {name} cannot be run ({error.strerror})") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise Failed(f"the credential_process of profile {name} printed no credentials") from None


def _moment(text: str) -> datetime:
    moment = datetime.fromisoformat(text)
    return moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)


def _ask_boto3(name: str) -> Credentials:
    """The credentials of a profile that has to ask AWS, by boto3."""
    try:
        import boto3  # late, and only where it is installed
    except ImportError:
        raise Failed(
            f"profile {name} of AWS's files takes on a role or signs in, which boto3 knows how to do: pip install "
            "boto3, or give the server credentials of its own"
        ) from None
    try:
        session: Any = boto3.Session(profile_name=name)
        found = session.get_credentials()
        frozen = found.get_frozen_credentials()
        expires = getattr(found, "_expiry_time", None)
        return Credentials(frozen.access_key, frozen.secret_key, frozen.token, expires)
    except Exception as error:  # boto3's errors have no common base, and their texts quote requests
        raise Failed(f"boto3 found no credentials for profile {name} ({type(error).__name__})") from None
