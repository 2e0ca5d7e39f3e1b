"""Credentials never appear: six secrets are planted, used with and without success, and looked for everywhere."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import grpc
import pytest

from marserve.api.grpc.schema import MANAGEMENT, Schema
from support.file_server import FileServer, file_server, status, whole
from support.hub_server import HubServer, hub_server
from support.object_stores import S3Server
from support.odd_store import OddStore, odd_store
from support.server import Server, make_archive

pytestmark = pytest.mark.system

pytest.importorskip("obstore")
pytest.importorskip("huggingface_hub")

# What each handler sees of its surroundings is part of what is searched.
TELLS = """
import json, os
def handle(data, context):
    return [json.dumps(dict(os.environ)) for row in data] if data else None
"""
OF_THE_ENVIRONMENT = "PlantedSecretOfTheEnvironment0000000000001"
OF_THE_SETTING = "PlantedSecretOfTheSetting00000000000000002"
OF_A_PRESIGNED_URL = "PlantedSecretOfAPresignedUrl0000000000003"
OF_USER_INFORMATION = "PlantedSecretOfUserInformation00000000004"
OF_A_SIGNATURE = "PlantedSecretOfASharedAccessSignature0005"
OF_THE_HUB = "hf_PlantedSecretOfTheHub000000000000000006"
PLANTED = {
    "environment": OF_THE_ENVIRONMENT,
    "setting": OF_THE_SETTING,
    "presigned URL": OF_A_PRESIGNED_URL,
    "user information": OF_USER_INFORMATION,
    "shared access signature": OF_A_SIGNATURE,
    "hub": OF_THE_HUB,
}


def talkative(handler: BaseHTTPRequestHandler) -> None:
    """An origin that answers with all that it was sent, as S3 does when a signature is wrong."""
    echoed = f"{handler.command} {handler.path}\n{handler.headers}{' '.join(PLANTED.values())}"
    body = f"<Error><Code>SignatureDoesNotMatch</Code><StringToSign>{echoed}</StringToSign></Error>".encode()
    handler.send_response(403, OF_THE_SETTING)
    handler.send_header("content-length", str(len(body)))
    handler.end_headers()
    if handler.command != "HEAD":
        handler.wfile.write(body)


class House:
    """All that a server of this test speaks with."""

    def __init__(self, s3: S3Server, files: FileServer, hub: HubServer, odd: OddStore, folder: Path) -> None:
        self.s3, self.files, self.hub, self.odd, self.folder = s3, files, hub, odd, folder
        self.said: list[str] = []
        (folder / "made").mkdir()
        self.archives = {
            name: make_archive(folder / "made" / f"{name}.mar", TELLS).read_bytes() for name in ("s", "e", "p", "h")
        }

    def server(self, **settings: str) -> Server:
        """A server with every secret planted."""
        stores = {
            "s3://settingbucket/": {
                "endpoint_url": self.s3.url,
                "access_key_id": "AKIASETTING",
                "secret_access_key": OF_THE_SETTING,
                "session_token": OF_THE_SETTING,
            },
            "s3://proxied/": {
                "endpoint_url": "http://store.invalid",
                "proxy_url": self.odd.url.replace("//", f"//user:{OF_THE_SETTING}@"),
                "access_key_id": "AKIASETTING",
                "secret_access_key": {"env": "NAMED_SECRET"},
            },
            "s3://refused/": {"endpoint_url": self.odd.url},
            "s3://broken/": {"access_key_id": OF_THE_SETTING},
            "az://box/": {
                "endpoint_url": self.odd.url,
                "account_name": "account1",
                "sas_token": f"sig={OF_A_SIGNATURE}",
            },
            "gs://gone/": {"endpoint_url": self.odd.url, "credentials": OF_THE_SETTING},
        }
        return Server(
            self.folder / "server",
            entry="marserve",
            settings={
                "allowed_urls": f"s3://.*,az://.*,gs://.*,hf://.*,{self.files.url}/.*,http://.*@.*",
                "stores": json.dumps(stores),
                "load_models": f"atstart={self.files.url}/start.mar?X-Amz-Signature={OF_A_PRESIGNED_URL}",
                "config_snapshots": "true",
                "log_location": str(self.folder / "server" / "logs"),
                "metrics_location": str(self.folder / "server" / "logs"),
                "log_level": "debug",
                "download_cache": str(self.folder / "server" / "cache"),
                **settings,
            },
            environment={
                "AWS_ENDPOINT_URL": self.s3.url,
                "AWS_ACCESS_KEY_ID": "AKIAENVIRONMENT",
                "AWS_SECRET_ACCESS_KEY": OF_THE_ENVIRONMENT,
                "NAMED_SECRET": OF_THE_ENVIRONMENT,
                "HF_ENDPOINT": self.hub.url,
                "HF_HOME": str(self.folder / "cache-of-the-hub"),
                "HF_HUB_DISABLE_XET": "1",
                "HF_TOKEN": OF_THE_HUB,
                "RUST_LOG": "trace",
            },
        )

    def hear(self, answer: Any) -> int:
        """Keep an answer to be searched; its status."""
        self.said.append(f"{answer.status_code} {answer.headers} {answer.text}")
        status_code: int = answer.status_code
        return status_code


@pytest.fixture
def house(s3: S3Server, tmp_path: Path) -> Iterator[House]:
    """Origins of every kind, with archives and with troubles."""
    with file_server() as files, hub_server() as hub, odd_store(talkative) as odd:
        yield House(s3, files, hub, odd, tmp_path)


def fill(house: House) -> None:
    """Put archives where the server will look for them."""
    bucket = house.s3.bucket()
    known = {"authorization": "AWS4-HMAC-SHA256 Credential=known/20260101/us-east-1/s3/aws4_request"}
    import httpx

    httpx.put(f"{house.s3.url}/settingbucket", headers=known).raise_for_status()
    type(bucket)(house.s3.url, "settingbucket").put("s.mar", house.archives["s"])
    bucket.put("e.mar", house.archives["e"])
    house.hub.token = OF_THE_HUB
    house.hub.commit("org/model", {"h.mar": house.archives["h"]})
    house.files.on(f"/p.mar?X-Amz-Signature={OF_A_PRESIGNED_URL}", whole(house.archives["p"]))
    house.files.on(f"/start.mar?X-Amz-Signature={OF_A_PRESIGNED_URL}", whole(house.archives["p"]))
    house.files.on(f"/gone.mar?X-Amz-Signature={OF_A_PRESIGNED_URL}", status(403))
    house.files.on(
        f"/moved.mar?X-Amz-Signature={OF_A_PRESIGNED_URL}",
        status(302, location=f"{house.files.url}/gone.mar?X-Amz-Signature={OF_A_PRESIGNED_URL}"),
    )
    house.good = [  # type: ignore[attr-defined]
        f"s3://{bucket.name}/e.mar",
        "s3://settingbucket/s.mar",
        f"{house.files.url}/p.mar?X-Amz-Signature={OF_A_PRESIGNED_URL}",
        "hf://org/model@main",
    ]
    host = house.files.url.removeprefix("http://")
    house.bad = [  # type: ignore[attr-defined]
        "s3://refused/m.mar",
        "s3://proxied/m.mar",
        "s3://broken/m.mar",
        f"s3://{bucket.name}/none.mar",
        f"s3://AKIA:{OF_USER_INFORMATION}@bucket/m.mar",
        f"s3://bucket/m.mar?X-Amz-Signature={OF_A_PRESIGNED_URL}",
        "az://box/m.mar",
        f"az://box/m.mar?sig={OF_A_SIGNATURE}",
        "gs://gone/m.mar",
        "hf://org/nobody@main",
        "hf://org/model@none",
        f"hf://user:{OF_USER_INFORMATION}@org/model",
        f"http://user:{OF_USER_INFORMATION}@{host}/m.mar",
        f"https://user:{OF_USER_INFORMATION}@example.invalid/m.mar",
        f"https://not-allowed.example.invalid/m.mar?X-Amz-Signature={OF_A_PRESIGNED_URL}",
        f"{house.files.url}/gone.mar?X-Amz-Signature={OF_A_PRESIGNED_URL}",
        f"{house.files.url}/moved.mar?X-Amz-Signature={OF_A_PRESIGNED_URL}",
        f"{house.files.url}/none.mar?X-Amz-Signature={OF_A_PRESIGNED_URL}#sha256=00",
        f"ftp://user:{OF_USER_INFORMATION}@example.invalid/m.mar?sig={OF_A_SIGNATURE}",
        f"m.mar?X-Amz-Signature={OF_A_PRESIGNED_URL}",
        f"s3://AKIA:a/{OF_USER_INFORMATION}/b@bucket/m.mar",
        f"https:/user:{OF_USER_INFORMATION}@example.invalid/m.mar",
        f"https://example.invalid/m.mar#sig={OF_A_SIGNATURE}",
    ]


def test_no_planted_secret_appears_anywhere(house: House) -> None:
    """In logs, descriptions, errors, metrics, snapshots, lists of downloads, and what workers see of the setting's."""
    fill(house)
    schema = Schema()
    with house.server() as server:
        for url in house.good:  # type: ignore[attr-defined]
            assert house.hear(server.register(url)) == 200, house.said[-1]
        for url in house.bad:  # type: ignore[attr-defined]
            assert house.hear(server.register(url)) in (400, 404, 500), url
            house.hear(server.client.post(f"{server.management}/workflows", params={"url": url}))
        with grpc.insecure_channel(server.grpc_management) as channel:
            register = channel.unary_unary(
                f"/{MANAGEMENT}.ManagementAPIsService/RegisterModel",
                request_serializer=lambda message: message.SerializeToString(),
                response_deserializer=schema.message(f"{MANAGEMENT}.ManagementResponse").FromString,
            )
            for url in house.bad:  # type: ignore[attr-defined]
                with pytest.raises(grpc.RpcError) as refused:
                    register(schema.message(f"{MANAGEMENT}.RegisterModelRequest")(url=url), timeout=60)
                house.said.append(f"{refused.value.details()} {refused.value.trailing_metadata()}")  # type: ignore[attr-defined]
        for path in ("/models", "/models/e", "/models/s", "/models/p", "/models/h", "/downloads", "/api-description"):
            assert house.hear(server.client.get(f"{server.management}{path}")) == 200
        for path in ("/ping", "/readyz", "/startupz"):
            house.hear(server.client.get(f"{server.inference}{path}"))
        assert house.hear(server.client.get(f"{server.metrics}/metrics")) == 200
        seen = server.predict("e", b"x").json()
        assert seen["AWS_SECRET_ACCESS_KEY"] == OF_THE_ENVIRONMENT  # as TorchServe; blacklist_env_vars hides it
        assert "NAMED_SECRET" not in seen
        assert "MARSERVE_STORES" not in seen
        assert "PlantedSecretOfTheSetting" not in json.dumps(seen)
        command = [
            sys.executable,
            "-m",
            "marserve.cli",
            "check",
            "--ts-config",
            str(server.folder / "config.properties"),
        ]
        checked = subprocess.run(command, capture_output=True, text=True, cwd=server.folder, timeout=60, check=False)
        house.said += [checked.stdout, checked.stderr]
    config = server.folder / "config.properties"
    found = _search([path for path in server.folder.rglob("*") if path.is_file() and path != config])
    logged = {path.name for path in (server.folder / "logs").rglob("*") if path.is_file()}

    assert {"ts_log.log", "access_log.log", "model_log.log"} <= logged
    assert any("snapshot" in str(path) for path in (server.folder / "logs").rglob("*.cfg")), logged
    assert found == []
    for where, secret in PLANTED.items():
        for said in house.said:
            assert secret not in said, where
    assert server.output()
    assert any("access was denied" in said for said in house.said)
    assert any(OF_A_SIGNATURE in asked.target for asked in house.odd.asked)  # it was used, and not told
    assert house.hub.tokens.count(f"Bearer {OF_THE_HUB}") > 2


def _search(files: list[Path]) -> list[tuple[str, str]]:
    """Which secret stands in which file."""
    return [
        (path.name, where)
        for path in files
        for where, secret in PLANTED.items()
        if secret.encode() in path.read_bytes()
    ]
