"""Real servers whose stores change under them: archives that are put, cut, renamed, replaced and deleted in use."""

from __future__ import annotations

import json
import os
import random
import re
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from marserve.answers.management import EventsTaken, WatchDescription, WatchList
from support.documents import document_of
from support.fault_proxy import Fault, fault_proxy
from support.object_stores import Bucket, S3Server
from support.server import Server, make_archive, poll

ANSWER = "def handle(data, context):\n    return [{value!r} for _ in data] if data else None\n"
LIMIT_S = 30.0


def archive(path: Path, value: str, *, name: str = "m", version: str = "1.0", padding: int = 0) -> Path:
    """An archive whose model answers `value`; `padding` are bytes that do not compress."""
    noise = random.Random(value).randbytes(padding)
    return make_archive(path, ANSWER.format(value=value), name=name, version=version, noise__bin=noise)


def watching(folder: Path, policy: str = "load", **settings: str) -> Server:
    """A server that watches its model store."""
    chosen = {"watch_model_store": policy, "watch_settle_time": "0.2", "default_workers_per_model": "1"}
    return Server(folder, settings={**chosen, **settings})


def watch(server: Server, name: str = "model_store") -> dict[str, Any]:
    """What the server says of a watch."""
    answer = server.client.get(f"{server.management}/watches/{name}")
    assert answer.status_code == 200, answer.text
    described: dict[str, Any] = answer.json()
    return described


def state(server: Server, key: str, name: str = "model_store") -> tuple[str, str]:
    """State and reason of an archive; empty before it is known."""
    found = [each for each in watch(server, name)["archiveList"] if each["key"] == key]
    return (found[0]["state"], found[0].get("reason", "")) if found else ("", "")


def wait_for(server: Server, key: str, wanted: str) -> str:
    """Wait until an archive has come to a state; returns the reason."""
    for _ in poll(LIMIT_S, f"{key} is {wanted}"):
        found, reason = state(server, key)
        if found == wanted:
            return reason
    raise AssertionError


def versions(server: Server, model: str = "m") -> list[str]:
    """The versions of a model."""
    answer = server.client.get(f"{server.management}/models/{model}/all")
    return [each["modelVersion"] for each in answer.json()] if answer.status_code == 200 else []


def test_an_archive_that_is_put_into_the_store_is_served(tmp_path: Path) -> None:
    """Without a call; a newer version beside it leaves the default alone, a restart finds both."""
    with watching(tmp_path) as server:
        archive(server.store / "m.mar", "one")
        wait_for(server, "m.mar", "loaded")
        assert server.predict("m").text == "one"
        archive(server.store / "m-2.mar", "two", version="2.0")
        wait_for(server, "m-2.mar", "loaded")
        assert server.predict("m").text == "one"
        assert server.predict("m/2.0").text == "two"
        described = server.describe("m", "2.0")

    assert described["modelUrl"] == "m-2.mar"
    assert described["minWorkers"] == 1


@pytest.mark.system
def test_a_version_that_makes_itself_the_default_fails_no_request(tmp_path: Path) -> None:
    """Requests go on while three versions come; each answer is of one of them, at last of the last."""
    with watching(tmp_path, "load-and-default") as server:
        archive(server.store / "m-1.0.mar", "v1", version="1.0")
        wait_for(server, "m-1.0.mar", "loaded")
        seen: list[tuple[int, str]] = []
        stop = threading.Event()

        def ask() -> None:
            with httpx.Client(timeout=30) as client:
                while not stop.is_set():
                    answer = client.post(f"{server.inference}/predictions/m")
                    seen.append((answer.status_code, answer.text))

        threads = [threading.Thread(target=ask) for _ in range(2)]
        for thread in threads:
            thread.start()
        try:
            for number in (2, 3, 4):
                archive(server.store / f"m-{number}.0.mar", f"v{number}", version=f"{number}.0")
                for _ in poll(LIMIT_S, "the new version answers"):
                    if seen and seen[-1] == (200, f"v{number}"):
                        break
        finally:
            stop.set()
            for thread in threads:
                thread.join()
        for _ in poll(LIMIT_S, "old versions are unloaded"):
            if versions(server) == ["3.0", "4.0"]:
                break

    assert {status for status, _ in seen} == {200}
    assert {text for _, text in seen} == {"v1", "v2", "v3", "v4"}


@pytest.mark.system
@pytest.mark.parametrize("uploads", [8, pytest.param(50, marks=pytest.mark.long)])
def test_uploads_cut_at_random_points_load_no_half_model(tmp_path: Path, uploads: int) -> None:
    """Cut, renamed, replaced in place, deleted in use: what is whole is loaded, what is in use answers on."""
    chance = random.Random(uploads)
    source = tmp_path / "source"
    source.mkdir()
    whole = {
        number: archive(source / f"{number}.mar", f"n{number}", name=f"n{number}", padding=20_000).read_bytes()
        for number in range(uploads)
    }
    with watching(tmp_path, watch_settle_time="0.05") as server:
        archive(server.store / "m.mar", "in use", padding=1000)
        wait_for(server, "m.mar", "loaded")
        answers: list[tuple[int, str]] = []
        stop = threading.Event()

        def ask() -> None:
            with httpx.Client(timeout=30) as client:
                while not stop.is_set():
                    answer = client.post(f"{server.inference}/predictions/m")
                    answers.append((answer.status_code, answer.text))
                    stop.wait(0.01)

        asking = threading.Thread(target=ask)
        asking.start()
        try:
            finished: set[int] = set()
            for number, content in whole.items():
                path = server.store / f"n{number}.mar"
                cut = chance.randrange(len(content))
                way = chance.choice(["cut", "cut and whole", "part and rename", "reserved", "pieces"])
                if way == "cut":
                    path.write_bytes(content[:cut])
                elif way == "cut and whole":
                    path.write_bytes(content[:cut])
                    time.sleep(chance.random() * 0.1)
                    path.write_bytes(content)
                elif way == "part and rename":
                    part = path.with_name(path.name + ".part")
                    part.write_bytes(content)
                    part.rename(path)
                elif way == "reserved":
                    # Space is reserved first, as downloads in parts do it, and the end is there before the beginning.
                    with path.open("wb") as file:
                        file.truncate(len(content))
                        file.seek(cut)
                        file.write(content[cut:])
                        file.flush()
                        time.sleep(chance.random() * 0.1)
                        if chance.random() < 0.5:
                            file.seek(0)
                            file.write(content[:cut])
                            way = "whole"
                else:
                    with path.open("wb") as file:
                        for at in range(0, len(content), 5000):
                            file.write(content[at : at + 5000])
                            file.flush()
                            time.sleep(0.01)
                if way in ("cut and whole", "part and rename", "whole", "pieces"):
                    finished.add(number)
            # In use: written over in place, cut, deleted, put back.
            current = server.store / "m.mar"
            with current.open("r+b") as file:
                file.write(b"\0" * 500)
            time.sleep(0.3)
            current.write_bytes(b"PK\x03\x04 cut")
            time.sleep(0.3)
            current.unlink()
            for _ in poll(60, "all that was finished is loaded"):
                states = {each["key"]: each["state"] for each in watch(server)["archiveList"]}
                if all(states.get(f"n{number}.mar") == "loaded" for number in finished):
                    break
            listed = server.client.get(f"{server.management}/models", params={"limit": "100"}).json()["models"]
            served = {each["modelName"] for each in listed}
            for number in finished:
                assert server.predict(f"n{number}").text == f"n{number}"
            described = watch(server)
        finally:
            stop.set()
            asking.join()

    assert served == {"m"} | {f"n{number}" for number in finished}
    assert uploads / 5 < len(finished) < uploads
    assert set(answers) == {(200, "in use")}
    assert described["outcomes"]["loaded"] == len(finished) + 1


def test_a_replaced_archive_of_the_same_version_is_swapped(tmp_path: Path) -> None:
    """The old one answers until the new one is ready; a new one that cannot load leaves it."""
    with watching(tmp_path) as server:
        archive(server.store / "m.mar", "one")
        wait_for(server, "m.mar", "loaded")
        archive(tmp_path / "new.mar", "two").rename(server.store / "m.mar")
        for _ in poll(LIMIT_S, "the new content answers"):
            text = server.predict("m").text
            assert text in ("one", "two")
            if text == "two":
                break
        broken = make_archive(tmp_path / "broken.mar", "raise RuntimeError('no')\n", name="m")
        broken.rename(server.store / "m.mar")
        reason = wait_for(server, "m.mar", "refused")
        assert server.predict("m").text == "two"
        assert versions(server) == ["1.0"]

    assert "version 1.0 goes on answering: its workers could not load it: RuntimeError: no" in reason


@pytest.mark.system
def test_versions_lie_in_folders_as_other_servers_have_them(tmp_path: Path) -> None:
    """`model/version/archive` and `model/version/` in place; the path names them, whatever the manifest says."""
    with watching(tmp_path, "load-and-default") as server:
        for number in (1, 2):
            folder = server.store / "digits" / str(number)
            folder.mkdir(parents=True)
            archive(folder / "model.mar", f"d{number}", name="other", version="0.1")
            wait_for(server, f"digits/{number}/model.mar", "loaded")
        assert server.predict("digits").text == "d2"
        plain = tmp_path / "plain" / "MAR-INF"
        plain.mkdir(parents=True)
        (plain.parent / "handler.py").write_text(ANSWER.format(value="in place"))
        model = {"modelName": "other", "handler": "handler.py"}
        (plain / "MANIFEST.json").write_text(json.dumps({"runtime": "python", "model": model}))
        plain.parent.rename(server.store / "digits" / "3")
        wait_for(server, "digits/3/", "loaded")

        assert server.predict("digits").text == "in place"
        for _ in poll(LIMIT_S, "the oldest is unloaded"):
            if versions(server, "digits") == ["2", "3"]:
                break


@pytest.mark.system
def test_a_removed_archive_unloads_its_version_where_asked_for(tmp_path: Path) -> None:
    """And only what this watch loaded."""
    watches = json.dumps([{"name": "s", "place": "model_store", "policy": "load", "removed": "unload"}])
    with watching(tmp_path, "off", watches=watches) as server:
        archive(server.store / "m.mar", "one")
        for _ in poll(LIMIT_S, "loaded"):
            if state(server, "m.mar", "s")[0] == "loaded":
                break
        (server.store / "m.mar").unlink()
        for _ in poll(LIMIT_S, "unloaded"):
            if not versions(server):
                break

        assert server.predict("m").status_code == 404


@pytest.mark.system
def test_what_the_start_loads_and_what_calls_register_is_not_loaded_twice(tmp_path: Path) -> None:
    """Models of load_models, and archives of calls, are known."""
    store = tmp_path / "store"
    store.mkdir()
    archive(store / "m.mar", "one")
    with watching(tmp_path, load_models="m.mar") as server:
        reason = wait_for(server, "m.mar", "loaded")
        assert reason == "it was registered before this watch saw it"
        archive(tmp_path / "n.mar", "n", name="n").rename(server.store / "n.mar")
        assert server.register("n.mar").status_code in (200, 409)
        wait_for(server, "n.mar", "loaded")
        assert versions(server, "n") == ["1.0"]


def test_a_place_that_cannot_be_watched_keeps_the_server_from_starting(tmp_path: Path) -> None:
    """With the pattern that is missing."""
    server = Server(
        tmp_path,
        settings={"watches": '[{"place": "s3://bucket/models/", "policy": "load"}]', "allowed_urls": "file://x"},
    )
    with pytest.raises(AssertionError, match="add a pattern as s3://bucket/models/"):
        server.start()
    server.client.close()


def test_events_of_our_own_form_make_a_watch_look(tmp_path: Path) -> None:
    """With the source's secret, which stands in no log; a wrong one is refused in the same words as none."""
    os.environ.pop("EVENT_SECRET", None)
    secret = "a-secret-of-this-test-0123456789"
    server = Server(
        tmp_path,
        settings={
            "watch_model_store": "load",
            "watch_interval": "3600",
            "watch_settle_time": "0",
            "disable_token_authorization": "false",
            "event_secrets": '{"ci": {"env": "EVENT_SECRET"}}',
        },
        environment={"EVENT_SECRET": secret},
    )
    with server:
        keys = json.loads((tmp_path / "key_file.json").read_text())
        manager = {"Authorization": f"Bearer {keys['management']['key']}"}
        url = f"{server.management}/events/ci"
        body = {"watch": "model_store", "key": "m.mar"}
        refused = [
            server.client.post(url, json=body),
            server.client.post(url, json=body, headers={"Authorization": "Bearer wrong"}),
            server.client.post(url, json=body, params={"secret": "wrong"}),
            server.client.post(url.replace("/ci", "/other"), json=body, params={"secret": secret}),
        ]
        taken = [
            server.client.post(url, json=body, headers={"Authorization": f"Bearer {secret}"}),
            server.client.post(url, json=body, headers={"X-Marserve-Event-Secret": secret}),
            server.client.post(url, json=body, params={"secret": secret}),
            server.client.post(url, json=body, auth=("any", secret)),
            server.client.post(url.replace("/ci", "/other"), json=body, headers=manager),
        ]
        bad = server.client.post(url, content=b"{", params={"secret": secret})
        large = server.client.post(url, content=b" " * 2_000_000, params={"secret": secret})
        metrics = server.client.get(f"{server.metrics}/metrics").text

    assert {answer.status_code for answer in refused} == {400}
    assert len({answer.text for answer in refused}) == 1
    assert [answer.status_code for answer in taken] == [202] * 5
    assert taken[0].json()["events"] == [
        {"object": "model_store/m.mar", "event": "there", "action": "look", "watch": "model_store"}
    ]
    assert bad.status_code == 400
    assert "The body is not JSON (line 1, column 2)" in bad.json()["message"]
    assert large.status_code == 413
    assert 'marserve_events_total{outcome="look"} 5' in metrics
    assert 'marserve_events_total{outcome="unauthorized"} 4' in metrics
    said = "".join(path.read_text(errors="replace") for path in tmp_path.rglob("*.log"))
    assert "/events/ci?secret=…" in said
    assert secret not in said


# ------------------------------------------------------------------------------------------------- object stores


@pytest.mark.long
def test_uploads_and_a_network_that_fails_load_no_half_model(s3: S3Server, bucket: Bucket, tmp_path: Path) -> None:
    """Answers that are cut, late or hidden: an object is loaded whole, in the end, and what serves is untouched."""
    bucket.put("models/m-1.0.mar", content(tmp_path, "v1", "1.0"))
    with (
        fault_proxy(s3.url) as proxy,
        watching_bucket(S3Server(proxy.url), bucket, tmp_path, late_archive_timeout="5") as server,
    ):
        for _ in poll(LIMIT_S, "the first version answers"):
            if server.predict("m").text == "v1":
                break
        for number, fault in enumerate(
            (Fault(cut_at=300), Fault(status=404), Fault(status=503), Fault(cut_at=10, reset=True), Fault(delay_s=0.5)),
            2,
        ):
            proxy.on(fault, path=f"m-{number}.0.mar", times=2)
            bucket.put(f"models/m-{number}.0.mar", content(tmp_path, f"v{number}", f"{number}.0"))
            for _ in poll(LIMIT_S, "the new version answers"):
                text = server.predict("m").text
                assert text in (f"v{number - 1}", f"v{number}")
                if text == f"v{number}":
                    break
        assert proxy.faults >= 4
        assert watch(server, "s3")["outcomes"]["refused"] == 0


@pytest.fixture
def bucket(s3: S3Server) -> Bucket:
    """An empty bucket."""
    pytest.importorskip("obstore")
    return s3.bucket()


def watching_bucket(s3: S3Server, bucket: Bucket, folder: Path, **settings: str) -> Server:
    """A server that watches the archives below `models/` of a bucket."""
    place = {"name": "s3", "place": f"s3://{bucket.name}/models/", "policy": "load-and-default", "interval": 1}
    chosen = {
        "watches": json.dumps([{**place, **json.loads(settings.pop("watch", "{}"))}]),
        "allowed_urls": f"s3://{bucket.name}/.*",
        "default_workers_per_model": "1",
    }
    return Server(folder, settings={**chosen, **settings}, environment=s3.environment)


def content(folder: Path, value: str, version: str) -> bytes:
    """The bytes of an archive."""
    return archive(folder / "made.mar", value, version=version).read_bytes()


@pytest.mark.system
def test_archives_of_a_bucket_are_loaded_as_they_come(s3: S3Server, bucket: Bucket, tmp_path: Path) -> None:
    """Those that were there, new ones, replaced ones; what is broken is refused once; nothing lands in the store."""
    bucket.put("models/m/1/m.mar", content(tmp_path, "one", "1"))
    bucket.put("other/x.mar", content(tmp_path, "other", "9"))
    with watching_bucket(s3, bucket, tmp_path) as server:
        for _ in poll(LIMIT_S, "what was there is loaded"):
            if state(server, "m/1/m.mar", "s3")[0] == "loaded":
                break
        assert server.predict("m").text == "one"
        bucket.put("models/m/2/m.mar", content(tmp_path, "two", "2"))
        for _ in poll(LIMIT_S, "the new version answers"):
            if server.predict("m").text == "two":
                break
        bucket.put("models/m/2/m.mar", content(tmp_path, "two again", "2"))
        for _ in poll(LIMIT_S, "the replaced archive answers"):
            if server.predict("m").text == "two again":
                break
        bucket.put("models/m/3/m.mar", content(tmp_path, "three", "3")[:-100])
        for _ in poll(LIMIT_S, "what is broken is refused"):
            if state(server, "m/3/m.mar", "s3")[0] == "refused":
                break
        bucket.delete("models/m/1/m.mar")
        for _ in poll(LIMIT_S, "the removal is seen"):
            if state(server, "m/1/m.mar", "s3")[0] == "gone":
                break
        described = watch(server, "s3")
        assert server.predict("m").text == "two again"
        assert versions(server) == ["1", "2"]
        assert server.describe("m", "2")["modelUrl"] == f"s3://{bucket.name}/models/m/2/m.mar"
        assert list(server.store.iterdir()) == []
        errors = server.output().count("m/3/m.mar is refused until it changes")
        document_of(WatchDescription, described)
        document_of(WatchList, server.client.get(f"{server.management}/watches").json())

    assert described["outcomes"] == {
        "loaded": 2, "swapped": 1, "refused": 1, "ignored": 0, "unloaded": 0, "retried": 0,
    }  # fmt: skip
    assert errors == 1


@pytest.mark.system
def test_an_event_of_a_bucket_is_carried_out_long_before_the_next_look(
    s3: S3Server, bucket: Bucket, tmp_path: Path
) -> None:
    """In the forms of S3, MinIO, SNS and EventBridge; replayed, late and foreign ones do no harm."""
    with watching_bucket(s3, bucket, tmp_path, watch='{"interval": 3600, "keep": 0}') as server:
        url = f"{server.management}/events/minio"
        for _ in poll(LIMIT_S, "the first look"):
            if watch(server, "s3")["looks"]["done"]:
                break

        def record(key: str, etag: str, sequencer: str, name: str = "ObjectCreated:Put") -> dict[str, Any]:
            thing = {"key": key, "eTag": etag.strip('"'), "sequencer": sequencer}
            return {"Records": [{"eventName": name, "s3": {"bucket": {"name": bucket.name}, "object": thing}}]}

        etag = bucket.put("models/m%201/m-1.0.mar", content(tmp_path, "one", "1.0"))
        first = record("models/m+1/m-1.0.mar", etag, "01")
        taken = server.client.post(url, json={"EventName": "s3:ObjectCreated:Put", "Key": "x", **first})
        for _ in poll(LIMIT_S, "the first version answers"):
            if server.predict("m").text == "one":
                break
        etag = bucket.put("models/m-2.0.mar", content(tmp_path, "two", "2.0"))
        message = json.dumps(record("models/m-2.0.mar", etag, "02"))
        server.client.post(url, json={"Type": "Notification", "Message": message})
        for _ in poll(LIMIT_S, "the second version answers"):
            if server.predict("m").text == "two":
                break
        # An event that comes before its object.
        early = {
            "source": "aws.s3",
            "detail-type": "Object Created",
            "detail": {"bucket": {"name": bucket.name}, "object": {"key": "models/m-3.0.mar", "sequencer": "03"}},
        }
        server.client.post(url, json=early)
        for _ in poll(LIMIT_S, "it is looked for"):
            if watch(server, "s3")["hints"]["waiting"]:
                break
        bucket.put("models/m-3.0.mar", content(tmp_path, "three", "3.0"))
        for _ in poll(LIMIT_S, "the third version answers"):
            if server.predict("m").text == "three":
                break
        before = watch(server, "s3")
        replays = [server.client.post(url, json=first) for _ in range(20)]
        stale = server.client.post(url, json=record("models/m+1/m-1.0.mar", etag, "00"))
        foreign = server.client.post(url, json=record("elsewhere/m.mar", etag, "09"))
        forged = server.client.post(url, json=record("models/m-3.0.mar", etag, "09", "ObjectRemoved:Delete"))
        unknown = server.client.post(url, json=record("models/m-3.0.mar", etag, "10", "ObjectTagging:Put"))
        for _ in poll(LIMIT_S, "the hints are looked at"):
            if watch(server, "s3")["hints"]["found"] > before["hints"]["found"]:
                break
        after = watch(server, "s3")
        assert server.predict("m").text == "three"

    assert taken.status_code == 202
    for answer in (taken, stale, foreign, unknown):
        document_of(EventsTaken, answer.json())
    assert taken.json()["events"][0]["object"] == f"s3://{bucket.name}/models/m 1/m-1.0.mar"
    assert {answer.status_code for answer in replays} == {202}
    assert (stale.status_code, stale.json()["events"][0]["reason"]) == (200, "a newer event of it came before")
    assert (foreign.status_code, foreign.json()["events"][0]["reason"]) == (200, "no watch covers it")
    assert forged.status_code == 202
    assert (unknown.status_code, unknown.json()["ignoredKinds"]) == (200, ["ObjectTagging:Put"])
    assert after["outcomes"] == before["outcomes"]
    assert after["looks"]["done"] - before["looks"]["done"] < 30


@pytest.mark.system
def test_a_store_that_is_away_leaves_everything_as_it_is(s3: S3Server, bucket: Bucket, tmp_path: Path) -> None:
    """The server starts, says that the place is unreachable, and loads what is there once it answers."""
    bucket.put("models/m.mar", content(tmp_path, "one", "1.0"))
    with fault_proxy(s3.url) as proxy:
        proxy.on(Fault(status=503), times=float("inf"))
        with watching_bucket(S3Server(proxy.url), bucket, tmp_path) as server:
            for _ in poll(LIMIT_S, "failures are counted"):
                described = watch(server, "s3")
                if described["failuresInARow"] >= 2:
                    break
            assert described["reachable"] is False
            assert described["lastSuccess"] is None
            assert described["lastError"]["reason"]
            proxy.clear()
            for _ in poll(LIMIT_S, "it is loaded"):
                if state(server, "m.mar", "s3")[0] == "loaded":
                    break
            assert watch(server, "s3")["reachable"] is True


@pytest.mark.system
def test_a_desired_state_says_what_becomes_of_new_versions(tmp_path: Path) -> None:
    """Its prefixes are watched, what came by them is no drift, and they go with the document."""
    store = tmp_path / "store"
    store.mkdir()
    archive(store / "m.mar", "one")
    document = tmp_path / "models.yaml"

    def write(new_versions: str) -> None:
        document.with_suffix(".new").write_text(
            f'models:\n  m:\n    versions: {{"1.0": {{url: m.mar, workers: 1}}}}\n    default: "1.0"\n{new_versions}'
        )
        document.with_suffix(".new").rename(document)

    write("    newVersions: {prefix: m-, policy: load-and-default}\n")
    settings = {"desired_state": "models.yaml", "desired_state_interval": "1", "watch_settle_time": "0.2"}
    with Server(tmp_path, settings=settings) as server:
        for _ in poll(LIMIT_S, "the first version answers"):
            if server.predict("m").text == "one":
                break
        archive(tmp_path / "m-2.mar", "two", version="2.0").rename(store / "m-2.mar")
        archive(tmp_path / "other.mar", "other", name="other").rename(store / "other.mar")
        for _ in poll(LIMIT_S, "the new version answers"):
            if server.predict("m").text == "two":
                break
        write("    newVersions: {prefix: m-, policy: load}\n")
        for _ in poll(LIMIT_S, "the document's change is followed"):
            listed = server.client.get(f"{server.management}/watches").json()["watches"]
            if [each["policy"] for each in listed] == ["load"]:
                break
        assert versions(server) == ["1.0", "2.0"]
        assert server.predict("other").status_code == 404
        write("")
        for _ in poll(LIMIT_S, "nothing is watched any more, and what nothing declares is gone"):
            listed = server.client.get(f"{server.management}/watches").json()["watches"]
            if not listed and versions(server) == ["1.0"]:
                break
        assert server.predict("m").text == "one"


class Restarted(Server):
    """A server that writes snapshots, and reads the last one at its second start."""

    is_second = False

    def command(self) -> list[str]:
        """What is run."""
        command = [word for word in super().command() if word != "--ncs"]
        if self.is_second:
            at = command.index("--ts-config")
            del command[at : at + 2]
            (self.folder / "config.properties").unlink()
        return command


@pytest.mark.system
def test_a_restart_has_what_watches_loaded_under_the_same_names(s3: S3Server, bucket: Bucket, tmp_path: Path) -> None:
    """Versions that their paths named, in the store and in a bucket; the default that was set by hand stays."""
    watches = [
        {"place": "model_store", "policy": "load"},
        {"name": "s3", "place": f"s3://{bucket.name}/models/", "policy": "load", "interval": 1},
    ]
    server = Restarted(
        tmp_path,
        settings={
            "watches": json.dumps(watches),
            "allowed_urls": f"s3://{bucket.name}/.*",
            "default_workers_per_model": "1",
            "watch_settle_time": "0.2",
        },
        environment=s3.environment,
    )
    for number in (1, 2):
        folder = server.store / "digits" / str(number)
        folder.mkdir(parents=True)
        archive(folder / "any.mar", f"d{number}", name="other", version="0.1")
    bucket.put("models/remote/7/any.mar", archive(tmp_path / "made.mar", "r7", name="other").read_bytes())
    with server:
        wait_for(server, "digits/1/any.mar", "loaded")
        wait_for(server, "digits/2/any.mar", "loaded")
        for _ in poll(LIMIT_S, "the bucket's is loaded"):
            if state(server, "remote/7/any.mar", "s3")[0] == "loaded":
                break
        assert server.predict("digits").text == "d2"
        # What a restart is to have is this very content, whatever the bucket has by then.
        assert re.search(r"/remote/7/any\.mar#sha256=[0-9a-f]{64}$", server.describe("remote")["resolvedUrl"])
        assert server.client.put(f"{server.management}/models/digits/1/set-default").status_code == 200
        server.stop()
        server.is_second = True
        server.start()
        for name, key in (("model_store", "digits/2/any.mar"), ("s3", "remote/7/any.mar")):
            for _ in poll(LIMIT_S, f"{key} is known"):
                if state(server, key, name)[0] == "loaded":
                    break
        for _ in poll(LIMIT_S, "all answer"):
            told = [server.predict(model).text for model in ("digits", "digits/2", "remote")]
            if told == ["d1", "d2", "r7"]:
                break
        assert versions(server, "other") == []
        assert sorted(versions(server, "digits")) == ["1", "2"]
