"""Tests for archives that a node fetches from an object store by itself."""

from __future__ import annotations

import hashlib
import json
import zipfile
from pathlib import Path
from typing import Any

import pytest

from marserve.agent_link import ArchiveRef, StoreAt
from marserve.errors import MarserveError
from marserve.node.archives import NodeArchives
from marserve.node.origins import origins
from marserve.settings.stores import STORES
from marserve.settings.values import Reading
from support.object_stores import S3Server

pytest.importorskip("obstore")


def told(document: dict[str, dict[str, Any]]) -> list[StoreAt]:
    """What the server tells nodes of such a setting."""
    stores = STORES.read(json.dumps(document), Reading("stores", Path("/"), lambda sentence: None))
    return [StoreAt(each.kind, each.prefix, each.public, each.is_private) for each in stores.options]


def no_server(target: Path) -> None:
    """The server is not to be asked."""
    raise MarserveError("the server was asked")


def put(s3: S3Server, path: Path) -> ArchiveRef:
    """An archive in a new bucket."""
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("h.py", b"x = 1")
    bucket = s3.bucket()
    bucket.put("models/m.mar", path.read_bytes())
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    return ArchiveRef(digest, path.name, address=f"s3://{bucket.name}/models/m.mar")


def test_a_node_reads_the_store_where_the_server_says_with_credentials_of_its_own(s3: S3Server, tmp_path: Path) -> None:
    """The bytes do not pass the server."""
    ref = put(s3, tmp_path / "m.mar")
    own = {name: value for name, value in s3.environment.items() if name != "AWS_ENDPOINT_URL"}
    openers = origins(told({"s3://": {"endpoint_url": s3.url}}), own)

    prepared = NodeArchives(tmp_path / "node", openers=openers).prepare(ref, no_server)

    assert (prepared.folder / "h.py").read_bytes() == b"x = 1"
    prepared.release()


def test_a_store_that_needs_the_servers_credentials_is_not_asked(s3: S3Server, tmp_path: Path) -> None:
    """Nodes hear where it is, and that it is not for them: the server sends the archive."""
    ref = put(s3, tmp_path / "m.mar")
    keys = {"access_key_id": "AKIA", "secret_access_key": "planted-secret"}
    stores = told({"s3://": {"endpoint_url": s3.url, **keys}})
    openers = origins(stores, s3.environment)

    assert stores == [StoreAt("s3", "s3://", {"endpoint_url": s3.url}, True)]
    with pytest.raises(MarserveError, match="the server was asked"):
        NodeArchives(tmp_path / "node", openers=openers).prepare(ref, no_server)


def test_what_is_needed_for_writing_keeps_no_node_from_reading() -> None:
    """A key that written objects are encrypted with."""
    (store,) = told({"s3://b/": {"region": "eu-west-1", "kms_key_id": "id"}})

    assert store == StoreAt("s3", "s3://b/", {"region": "eu-west-1"}, False)
