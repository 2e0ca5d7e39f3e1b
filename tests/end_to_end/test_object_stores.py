"""Models from object stores, registered in a real server by REST, gRPC and command, and at its start."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import grpc
import pytest

from marserve.api.grpc.schema import MANAGEMENT, Schema
from support.command_line import marserve
from support.hub_server import hub_server
from support.object_stores import Bucket, S3Server
from support.server import Server, make_archive, poll
from support.workflow_archives import write_war

pytest.importorskip("obstore")

ECHO = "def handle(data, context):\n    return [bytes(row['body']) for row in data] if data else None\n"
SECRET = "planted-secret"
SCHEMA = Schema()


@pytest.fixture
def made(tmp_path: Path) -> Path:
    """Where archives are made before they are put into a bucket."""
    (tmp_path / "made").mkdir()
    return tmp_path / "made"


@pytest.fixture
def bucket(s3: S3Server, made: Path) -> Bucket:
    """A bucket with an archive."""
    bucket = s3.bucket()
    bucket.put("models/echo.mar", make_archive(made / "echo.mar", ECHO).read_bytes())
    return bucket


def server_of(s3: S3Server, folder: Path, *arguments: str, **settings: str) -> Server:
    """A server that finds the stand-in by the variables that everybody uses."""
    settings = {"allowed_urls": "s3://.*", **settings}
    return Server(folder, settings=settings, arguments=arguments, environment=s3.environment)


def test_an_archive_of_a_bucket_is_served(s3: S3Server, bucket: Bucket, made: Path, tmp_path: Path) -> None:
    """Registered by REST, by command and by gRPC; each lies in the store then, and describe says where it is from."""
    bucket.put("two.mar", make_archive(made / "two.mar", ECHO).read_bytes())
    bucket.put("three.mar", make_archive(made / "three.mar", ECHO).read_bytes())
    url = f"s3://{bucket.name}/models/echo.mar"
    with server_of(s3, tmp_path / "server") as server:
        answer = server.register(url)
        ran = marserve("register", f"s3a://{bucket.name}/two.mar", "--management", server.management, "--json")
        with grpc.insecure_channel(server.grpc_management) as channel:
            register = channel.unary_unary(
                f"/{MANAGEMENT}.ManagementAPIsService/RegisterModel",
                request_serializer=lambda message: message.SerializeToString(),
                response_deserializer=SCHEMA.message(f"{MANAGEMENT}.ManagementResponse").FromString,
            )
            asked = SCHEMA.message(f"{MANAGEMENT}.RegisterModelRequest")(
                url=f"s3://{bucket.name}/three.mar", initial_workers=1, synchronous=True, s3_sse_kms=True
            )
            told = register(asked, timeout=60)

        assert (answer.status_code, answer.json()["status"]) == (
            200,
            'Model "echo" Version: 1.0 registered with 1 initial workers',
        )
        assert (ran.status, ran.err) == (0, "")
        assert 'Model "three" Version: 1.0 registered with 1 initial workers' in told.msg
        for model in ("echo", "two", "three"):
            assert server.predict(model, b"from S3").content == b"from S3"
        assert server.describe("echo")["modelUrl"] == url
        assert {path.name for path in server.store.iterdir()} == {"echo.mar", "two.mar", "three.mar"}


def wait_for_model(server: Server) -> None:
    """A start waits for its models for a second only, and loads on after it."""
    for _ in poll(60, "the model is loaded"):
        if server.predict("mine", b"x").status_code == 200:
            return


@pytest.mark.system
def test_a_server_starts_with_models_of_a_bucket(s3: S3Server, bucket: Bucket, tmp_path: Path) -> None:
    """`load_models` names their addresses; a second start has what the first one fetched."""
    url = f"s3://{bucket.name}/models/echo.mar"
    with server_of(s3, tmp_path / "server", load_models=f"mine={url}") as server:
        wait_for_model(server)
        assert server.predict("mine", b"x").content == b"x"
        assert server.describe("mine")["modelUrl"] == url
    bucket.delete("models/echo.mar")
    with server_of(s3, tmp_path / "server", load_models=f"mine={url}") as server:
        wait_for_model(server)
        assert server.predict("mine", b"y").content == b"y"


def test_the_digest_of_an_address_is_compared(s3: S3Server, bucket: Bucket, made: Path, tmp_path: Path) -> None:
    """What is another thing is not taken."""
    url = f"s3://{bucket.name}/models/echo.mar"
    digest = hashlib.sha256((made / "echo.mar").read_bytes()).hexdigest()
    with server_of(s3, tmp_path / "server") as server:
        wrong = server.register(f"{url}#sha256={'0' * 64}")
        left = list(server.store.iterdir())
        right = server.register(f"{url}#sha256={digest}")

    assert (wrong.status_code, left) == (400, [])
    assert right.status_code == 200


def test_torchserves_flag_asks_for_an_https_address_with_a_signature(s3: S3Server, made: Path, tmp_path: Path) -> None:
    """The bucket and key of S3's own address, at the endpoint that the operator names for S3."""
    pattern = "https://signed.s3.eu-west-1.amazonaws.com/.*"
    with server_of(s3, tmp_path / "server", allowed_urls=pattern) as server:
        signed = Bucket(s3.url, "signed")
        server.client.put(
            f"{s3.url}/signed", headers={"authorization": "AWS4-HMAC-SHA256 Credential=x/1/us-east-1/s3/y"}
        )
        signed.put("a/m.mar", make_archive(made / "m.mar", ECHO).read_bytes())
        url = "https://signed.s3.eu-west-1.amazonaws.com/a/m.mar"

        answer = server.register(url, s3_sse_kms="true")
        other = server.register("https://other.s3.eu-west-1.amazonaws.com/a/m.mar", s3_sse_kms="true")
        unsigned = server.register("s3+https://evil.example.org/a/m.mar")
        here = server.register("m.mar", s3_sse_kms="true")

        assert answer.status_code == 200
        assert server.predict("m", b"x").content == b"x"
        assert (other.status_code, here.status_code) == (404, 400)
        assert "does not match any allowed URL(s)" in other.json()["message"]
        assert "this is no host of S3" in unsigned.json()["message"]
        assert "name s3://bucket/key or https://bucket.s3" in here.json()["message"]


def test_nothing_is_asked_for_what_is_not_allowed(s3: S3Server, bucket: Bucket, tmp_path: Path) -> None:
    """An address that no pattern allows is refused, although the store has a file of that name."""
    with server_of(s3, tmp_path / "server", allowed_urls=f"s3://{bucket.name}/public/.*") as server:
        url = f"s3://{bucket.name}/models/echo.mar"
        make_archive(server.store / "echo.mar", ECHO)
        refused = server.register(url)
        local = server.register("echo.mar")

        assert refused.status_code == 404
        assert refused.json()["message"] == f"Given URL {url} does not match any allowed URL(s)"
        assert local.status_code == 200


def test_what_went_wrong_is_told_to_who_registers(s3: S3Server, bucket: Bucket, tmp_path: Path) -> None:
    """With the reason, which is free of secrets; and nothing is left in the store."""
    stores = {
        "s3://denied/": {"endpoint_url": "http://127.0.0.1:9", "access_key_id": "A", "secret_access_key": SECRET},
        "s3://half/": {"secret_access_key": SECRET},
    }
    with server_of(s3, tmp_path / "server", stores=json.dumps(stores)) as server:
        missing = server.register(f"s3://{bucket.name}/none.mar")
        nowhere = server.register("s3://nowhere/none.mar")
        half = server.register("s3://half/m.mar")
        refused = server.register("s3://denied/m.mar")

        assert [answer.status_code for answer in (missing, nowhere, half, refused)] == [400] * 4
        assert missing.json() == {
            "code": 400,
            "type": "DownloadArchiveException",
            "message": f"Failed to download archive from: s3://{bucket.name}/none.mar (S3: there is no such object)",
        }
        assert nowhere.json()["message"].endswith("(S3: there is no bucket nowhere)")
        assert "one of access_key_id and secret_access_key for s3://half/, and not both" in half.json()["message"]
        assert "the connection was refused" in refused.json()["message"]
        assert list(server.store.iterdir()) == []
        assert SECRET not in server.output()


@pytest.mark.system
def test_a_workflow_of_a_bucket_is_registered(s3: S3Server, bucket: Bucket, made: Path, tmp_path: Path) -> None:
    """Its archive, and those of its nodes."""
    spec = f"models:\n  echo:\n    url: s3://{bucket.name}/models/echo.mar\ndag:\n  echo: [finish]\n"
    bucket.put("w.war", write_war(made / "w.war", spec).read_bytes())
    with server_of(s3, tmp_path / "server") as server:
        answer = server.client.post(f"{server.management}/workflows", params={"url": f"s3://{bucket.name}/w.war"})
        assert answer.status_code == 200, answer.text
        assert server.client.post(f"{server.inference}/wfpredict/w", content=b"x").content == b"f(x)"


@pytest.mark.system
def test_a_repository_of_a_hub_is_served_in_place(tmp_path: Path) -> None:
    """A model folder from the hub's cache, and describe names the commit that its branch was; an archive as one."""
    pytest.importorskip("huggingface_hub")
    manifest = {"model": {"modelName": "hubbed", "modelVersion": "2.0", "handler": "handler.py"}}
    folder = {"MAR-INF/MANIFEST.json": json.dumps(manifest).encode(), "handler.py": ECHO.encode()}
    cache = tmp_path / "cache"
    with hub_server() as hub:
        commit = hub.commit("org/model", folder)
        (tmp_path / "made").mkdir()
        hub.commit("org/archive", {"m.mar": make_archive(tmp_path / "made" / "m.mar", ECHO).read_bytes()})
        hub.commit("org/unsafe", {**folder, "weights.pt": b"cos\nsystem\n(S'true'\ntR."})
        server = Server(
            tmp_path / "server",
            settings={"allowed_urls": "hf://org/.*"},
            environment={"HF_ENDPOINT": hub.url, "HF_HOME": str(cache), "HF_HUB_DISABLE_XET": "1"},
        )
        with server:
            answers = [server.register(f"hf://org/{name}@main") for name in ("model", "archive", "unsafe")]
            other = server.register("hf://other/model@main")

            assert [answer.status_code for answer in (*answers, other)] == [200, 200, 400, 404]
            assert server.predict("hubbed", b"x").content == b"x"
            assert server.predict("m", b"y").content == b"y"
            described = server.describe("hubbed")
            assert described["modelUrl"] == "hf://org/model@main"
            assert described["resolvedUrl"] == f"hf://org/model@{commit}"
            [worker] = server.worker_pids("hubbed")
            assert Path(f"/proc/{worker}/cwd").resolve().is_relative_to(cache)
            assert list(server.store.iterdir()) == []
        assert (cache / "hub").is_dir()
