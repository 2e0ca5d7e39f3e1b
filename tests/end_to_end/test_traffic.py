"""Versions that share requests and take each other's place, under load: no request is refused, lost or misled."""

from __future__ import annotations

import math
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from marserve.api.grpc.schema import INFERENCE, Schema
from support.closed_loop import ask_all
from support.load_beside import LoadBeside
from support.open_loop import count_by_status, post
from support.range_origin import range_origin
from support.server import Server, make_archive, poll

# Answers with its generation, a number that the archive holds.
TELLING = """
def handle(data, context):
    return [b"GENERATION"] * len(data) if data else None
"""


def telling(folder: Path, generation: int | str, version: str, **more: Any) -> str:
    """An archive of the model `m` that answers with its generation; its name in the store."""
    path = folder / f"m-{generation}.mar"
    return make_archive(path, TELLING.replace("GENERATION", str(generation)), name="m", version=version, **more).name


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    """A server whose queues are long enough for any pause of a busy machine."""
    with Server(tmp_path, settings={"job_queue_size": "100000"}) as server:
        yield server


def port_of(server: Server) -> int:
    """The inference port."""
    return int(server.inference.rsplit(":", 1)[1])


def is_share(count: int, share: float, of: int) -> bool:
    """Whether a count is within three standard deviations of its share."""
    return abs(count - share * of) < 3 * math.sqrt(of * share * (1 - share)) + 1


def put_traffic(server: Server, **document: Any) -> Any:
    """Put weights; what the server says is in force."""
    answer = server.client.put(f"{server.management}/models/m/traffic", json=document)
    assert answer.status_code == 200, answer.text
    return answer.json()


# ------------------------------------------------------------------------------------------- versions that change


def change_versions(server: Server, changes: int, rate: float, seconds: float, order: str = "load_first") -> None:
    """Swap so many times, at a steady pace, under load; every other swap keeps the version's name."""
    server.register(telling(server.store, 0, "0.0")).raise_for_status()
    archives = [telling(server.store, number, f"{number // 2}.0") for number in range(1, changes + 1)]
    returned: list[float] = []

    with LoadBeside(port_of(server), "m", rate, seconds) as load:
        for number, archive in enumerate(archives):
            # The pace is the load's: each change has its part of it.
            time.sleep(max(0.0, load.started_at + number * seconds / changes - time.monotonic()))
            answer = server.client.post(f"{server.management}/models/m/swap", params={"url": archive})
            assert answer.status_code == 200, answer.text
            returned.append(time.monotonic() - load.started_at)

    assert count_by_status(load.outcomes) == {200: len(load.outcomes)}
    generations = [int(outcome.body) for outcome in load.outcomes]
    swapped = 0
    for outcome, generation in sorted(zip(load.outcomes, generations, strict=True), key=lambda pair: pair[0].sent_s):
        while swapped < len(returned) and returned[swapped] < outcome.sent_s:
            swapped += 1
        assert generation >= swapped, f"sent at {outcome.sent_s} s, after swap {swapped}: answered by {generation}"
    assert len(set(generations)) > changes / 2
    described = server.client.get(f"{server.management}/models/m/all").json()
    assert [each["modelVersion"] for each in described] == [f"{changes // 2}.0"]
    assert len(list((server.temporary).rglob("handler.py"))) == 1
    assert len(server.worker_pids("m")) == 1


@pytest.mark.system
def test_six_versions_change_under_load_and_nobody_notices(server: Server) -> None:
    """0 failed, and no request that begins after a swap has returned gets a version before it."""
    change_versions(server, changes=6, rate=200, seconds=3)


@pytest.mark.long
def test_two_hundred_versions_change_in_two_minutes_at_a_thousand_requests_a_second(server: Server) -> None:
    """The same, for long."""
    change_versions(server, changes=200, rate=1000, seconds=120)


# What the handler is, and what the refusal says: in its sentence, as the reason, as the cause.
BAD_ONES = {
    "raises while loading": (
        "raise ValueError('no weights here')",
        "could not load it",
        "no weights here",
        "load_failed",
    ),
    "dies while loading": ("import os; os._exit(3)", "could not load it", "", ""),
    "fails its samples": (
        "def handle(data, context):\n    if data:\n        raise ValueError('no')\n",
        "sample 0 was not answered: Prediction failed",
        "",
        "handler",
    ),
    "answers too few": (
        "def handle(data, context):\n    return [] if data else None\n",
        "sample 0 was not answered",
        "",
        "handler",
    ),
    "answers otherwise": (
        "def handle(data, context):\n    return [{'n': 1}] * len(data) if data else None\n",
        "another shape than before: $ is an object, and was a number",
        "",
        "other_shape",
    ),
    "confuses batches": (
        "def handle(data, context):\n    return [len(data)] * len(data) if data else None\n",
        "batches of its samples are not answered as single requests are",
        "",
        "batch_check",
    ),
}
CONFIG = "minWorkers: 1\nmaxWorkers: 1\nbatchSize: 4\nsamples:\n  - text: one\n  - text: two\n"


@pytest.mark.system
@pytest.mark.parametrize("order", ["load_first", "unload_first"])
def test_a_bad_version_never_takes_the_place_of_a_good_one(server: Server, order: str) -> None:
    """Each in its way; the good one answers after it as before, the error names the cause, nothing is left on disk."""
    server.register(telling(server.store, 7, "1.0", config=CONFIG)).raise_for_status()
    family = len(server.family())

    for name, (handler, sentence, reason, cause) in BAD_ONES.items():
        make_archive(server.store / "bad.mar", handler, name="m", version="2.0", config=CONFIG + "warmUp: false\n")
        answer = server.client.post(
            f"{server.management}/models/m/swap", params={"url": "bad.mar", "order": order}, timeout=60
        )
        assert answer.status_code in (500, 507), (name, answer.text)
        assert "Version 2.0 of model m was not taken, version 1.0 goes on answering" in answer.json()["message"]
        assert sentence in answer.json()["message"], (name, answer.text)
        assert reason in answer.headers.get("x-marserve-reason", ""), (name, answer.headers)
        assert cause in answer.headers["x-marserve-cause"], (name, answer.headers)
        assert (server.predict("m", b"x").status_code, server.predict("m", b"x").content) == (200, b"7"), name
        assert [path.read_text() for path in server.temporary.rglob("handler.py")] == [
            TELLING.replace("GENERATION", "7")
        ]
        assert len(server.family()) == family, (name, server.family())


@pytest.mark.system
def test_a_failed_swap_costs_no_request(server: Server) -> None:
    """A version that cannot load beside the one that serves."""
    server.register(telling(server.store, 7, "1.0")).raise_for_status()
    make_archive(server.store / "bad.mar", "raise ValueError('no')", name="m", version="2.0")

    with LoadBeside(port_of(server), "m", 200, 3) as load:
        for _ in range(3):
            assert server.client.post(f"{server.management}/models/m/swap?url=bad.mar").status_code == 500

    assert count_by_status(load.outcomes) == {200: len(load.outcomes)}
    assert {outcome.body for outcome in load.outcomes} == {b"7"}


@pytest.mark.system
def test_unloading_first_holds_or_refuses_and_then_goes_on(server: Server) -> None:
    """With no room for two the gap is honest: 200 or 503 with the reason, and the new version afterwards."""
    server.register(telling(server.store, 1, "1.0")).raise_for_status()
    second = telling(server.store, 2, "2.0")

    with LoadBeside(port_of(server), "m", 100, 3) as load:
        for _ in poll(10, "the load has begun"):
            if time.monotonic() > load.started_at + 0.3:
                break
        answer = server.client.post(
            f"{server.management}/models/m/swap", params={"url": second, "order": "unload_first"}
        )

    assert answer.status_code == 200, answer.text
    assert set(count_by_status(load.outcomes)) <= {200, 503}
    bodies = [outcome.body for outcome in load.outcomes if outcome.status == 200]
    assert bodies[0] == b"1"
    assert set(bodies) <= {b"1", b"2"}
    assert server.predict("m", b"x").content == b"2"


# ------------------------------------------------------------------------------------------- weights


@pytest.mark.system
def test_shares_and_keys_hold_over_two_thousand_requests(server: Server) -> None:
    """90 to 10 within three standard deviations, with and without keys; the same key always has the same version."""
    shares_and_keys_hold(server, 2_000)


@pytest.mark.long
def test_shares_and_keys_hold_over_ten_thousand_requests(server: Server) -> None:
    """The same, and five times as many."""
    shares_and_keys_hold(server, 10_000)


def shares_and_keys_hold(server: Server, requests: int) -> None:
    """Ask so many times without keys and as many times with a quarter as many keys; hold shares, keys and metrics."""
    for number in (1, 2):
        server.register(telling(server.store, number, f"{number}.0"), initial_workers=2).raise_for_status()
    put_traffic(server, weights={"1.0": 90, "2.0": 10}, sticky={"header": "X-User"})

    plain = ask_all(port_of(server), [post("m")] * requests)
    users = [number % (requests // 4) for number in range(requests)]
    sticky = ask_all(port_of(server), [post("m", X_User=f"user-{user}") for user in users])

    assert {status for status, _ in (*plain, *sticky)} == {200}
    assert is_share(Counter(body for _, body in plain)[b"2"], 0.1, requests)
    by_user: dict[int, set[bytes]] = {}
    for user, (_, body) in zip(users, sticky, strict=True):
        by_user.setdefault(user, set()).add(body)
    assert all(len(bodies) == 1 for bodies in by_user.values())
    assert is_share(sum(bodies == {b"2"} for bodies in by_user.values()), 0.1, requests // 4)

    page = server.client.get(f"{server.metrics}/metrics").text
    assert 'marserve_traffic_share{model="m",version="2.0"} 0.1' in page
    for version, reason in (("1.0", "weight"), ("2.0", "weight"), ("1.0", "sticky"), ("2.0", "sticky")):
        assert f'marserve_traffic_requests_total{{model="m",version="{version}",reason="{reason}"}}' in page


@pytest.mark.system
def test_a_version_is_taken_back_at_once(server: Server) -> None:
    """No request that begins after the call has returned is sent to it; what it had is answered."""
    for number in (1, 2):
        server.register(telling(server.store, number, f"{number}.0")).raise_for_status()
    put_traffic(server, weights={"1.0": 50, "2.0": 50})

    with LoadBeside(port_of(server), "m", 300, 2) as load:
        time.sleep(max(0.0, load.started_at + 1 - time.monotonic()))
        put_traffic(server, weights={"1.0": 100, "2.0": 0})
        returned = time.monotonic() - load.started_at

    assert count_by_status(load.outcomes) == {200: len(load.outcomes)}
    later = {outcome.body for outcome in load.outcomes if outcome.sent_s > returned}
    assert later == {b"1"}
    assert {outcome.body for outcome in load.outcomes} == {b"1", b"2"}


@pytest.mark.system
def test_every_request_is_answered_while_weights_change_and_workers_die(server: Server) -> None:
    """Weights, labels and the default change without a pause, and one version's workers are killed again and again."""
    for number in (1, 2):
        server.register(telling(server.store, number, f"{number}.0")).raise_for_status()
    dice = random.Random(5)
    changes, kills = 0, 0

    with LoadBeside(port_of(server), "m", 200, 4, lambda number: {"X-User": number % 50}) as load:
        while not load.is_over:
            weights = {"1.0": dice.randint(1, 9), "2.0": dice.randint(0, 9)}
            put_traffic(server, weights=weights, **dice.choice([{}, {"sticky": {"header": "X-User"}}]))
            version = dice.choice(["1.0", "2.0"])
            label = f"{server.management}/models/m/labels/canary"
            server.client.put(label, json={"version": version}).raise_for_status()
            server.client.put(f"{server.management}/models/m/{version}/set-default").raise_for_status()
            if changes % 20 == 10 and kills < 4:
                for worker in server.describe("m", "2.0")["workers"]:
                    if worker["status"] == "READY":
                        os.kill(worker["pid"], signal.SIGKILL)
                        kills += 1
            changes += 1

    assert count_by_status(load.outcomes) == {200: len(load.outcomes)}
    assert {outcome.body for outcome in load.outcomes} == {b"1", b"2"}
    assert changes > 20
    assert kills


def test_a_version_answers_by_name_by_label_and_by_header(server: Server) -> None:
    """And every answer, errors too, says which it was."""
    for number in (1, 2):
        server.register(telling(server.store, number, f"{number}.0")).raise_for_status()
    server.client.put(f"{server.management}/models/m/labels/canary", json={"version": "2.0"}).raise_for_status()

    def answer(path: str = "m", **headers: str) -> tuple[bytes, str]:
        told = server.predict(path, b"x", **headers)
        assert told.status_code == 200
        return told.content, told.headers["x-marserve-version"]

    assert answer() == (b"1", "1.0")
    assert answer("m/2.0") == answer("m/canary") == (b"2", "2.0")
    assert answer(**{"x-marserve-version": "2.0"}) == answer(**{"X-Marserve-Version": "canary"}) == (b"2", "2.0")
    assert answer("m/1.0", **{"x-marserve-version": "2.0"}) == (b"1", "1.0")
    refused = server.predict("m", b"x", **{"x-marserve-version": "9"})
    assert (refused.status_code, refused.json()["message"]) == (404, "Model version: 9 does not exist for model: m")
    empty = server.predict("m", b"x", **{"x-marserve-version": ""})
    assert (empty.status_code, "x-marserve-version is empty" in empty.json()["message"]) == (400, True)
    server.client.put(f"{server.management}/models/m/2.0?min_worker=0&synchronous=true").raise_for_status()
    gone = server.predict("m/2.0", b"x")
    assert (gone.status_code, gone.headers["x-marserve-version"]) == (503, "2.0")


def test_calls_over_grpc_are_shared_out_too(server: Server) -> None:
    """Keys and wishes are metadata there, and so is the version that answered."""
    for number in (1, 2):
        server.register(telling(server.store, number, f"{number}.0")).raise_for_status()
    put_traffic(server, weights={"1.0": 50, "2.0": 50}, sticky={"header": "X-User"})
    schema = Schema()
    message = schema.message(f"{INFERENCE}.PredictionsRequest")
    answer = schema.message(f"{INFERENCE}.PredictionResponse")

    with grpc.insecure_channel(server.grpc_inference) as channel:
        predict = channel.unary_unary(
            f"/{INFERENCE}.InferenceAPIsService/Predictions",
            request_serializer=lambda each: each.SerializeToString(),
            response_deserializer=answer.FromString,
        )

        def ask(version: str = "", **metadata: str) -> bytes:
            wishes = tuple((name.replace("_", "-"), value) for name, value in metadata.items())
            request = message(model_name="m", model_version=version, input={"data": b"x"})
            told, call = predict.with_call(request, metadata=wishes)
            trailers = dict(call.trailing_metadata())
            assert trailers["x-marserve-version"] == f"{told.prediction.decode()}.0"
            prediction: bytes = told.prediction
            return prediction

        for user in range(30):
            over_http = server.predict("m", b"x", **{"X-User": f"user-{user}"}).content
            assert ask(x_user=f"user-{user}") == over_http
        assert {ask() for _ in range(10)} == {b"1", b"2"}
        assert ask(x_marserve_version="2.0") == ask("2.0", x_marserve_version="1.0") == b"2"
        with pytest.raises(grpc.RpcError) as caught:
            ask(x_marserve_version="9")
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND


class Restarted(Server):
    """A server with snapshots; from the second start on nobody names a file of settings."""

    names_file = True

    def command(self) -> list[str]:
        """What is run."""
        command = [word for word in super().command() if word != "--ncs"]
        if not self.names_file:
            at = command.index("--ts-config")
            del command[at : at + 2]
            (self.folder / "config.properties").unlink()
        return command


@pytest.mark.system
def test_a_restarted_server_has_weights_keys_and_labels_back(tmp_path: Path) -> None:
    """As they were; the same users get the same versions."""
    with Restarted(tmp_path) as server:
        for number in (1, 2):
            server.register(telling(server.store, number, f"{number}.0")).raise_for_status()
        traffic = put_traffic(server, weights={"1.0": 60, "2.0": 40}, sticky={"cookie": "sid"})
        server.client.put(f"{server.management}/models/m/labels/stable", json={"version": "1.0"}).raise_for_status()
        labels = server.client.get(f"{server.management}/models/m/labels").json()

        def users() -> list[bytes]:
            return [server.predict("m", b"x", Cookie=f"a=b; sid={user}").content for user in range(20)]

        before = users()
        server.stop()
        server.names_file = False
        server.start()

        for _ in poll(30, "both versions are ready"):
            told = server.client.get(f"{server.management}/models/m/traffic").json()
            if "pending" not in told:
                break
        assert told == traffic
        assert server.client.get(f"{server.management}/models/m/labels").json() == labels
        assert users() == before


@pytest.mark.system
def test_an_address_that_is_written_over_is_swapped_in_and_comes_back(tmp_path: Path) -> None:
    """Twice under its version's name and twice under another, nobody notices; a restart has the build that served."""
    with range_origin() as origin:
        (tmp_path / "server").mkdir()
        settings = {"allowed_urls": origin.pattern, "download_cache": str(tmp_path / "cache")}
        server = Restarted(tmp_path / "server", settings={"job_queue_size": "100000", **settings})

        def put(generation: int, version: str) -> str:
            path = tmp_path / telling(tmp_path, generation, version)
            return origin.put("/m.mar", path.read_bytes())

        with server:
            url = put(0, "1.0")
            server.register(url).raise_for_status()
            stored = (server.store / "m.mar").read_bytes()
            with LoadBeside(port_of(server), "m", 100, 6) as load:
                for generation, version in ((1, "1.0"), (2, "1.0"), (3, "2.0"), (4, "1.0")):
                    put(generation, version)
                    swapped = server.client.post(f"{server.management}/models/m/swap", params={"url": url})
                    assert swapped.status_code == 200, swapped.text
                    assert swapped.json()["modelVersion"] == version
                    assert server.predict("m", b"x").content == str(generation).encode()
            assert count_by_status(load.outcomes) == {200: len(load.outcomes)}
            assert {int(outcome.body) for outcome in load.outcomes} >= {0, 4}
            assert (server.store / "m.mar").read_bytes() == stored
            # No version uses the store's file any more, so the address may be fetched into it once more.
            server.register(url, model_name="other").raise_for_status()
            assert server.predict("other", b"x").content == b"4"

            put(5, "1.0")
            server.stop()
            server.names_file = False
            server.start()

            for _ in poll(30, "the build of the last swap answers"):
                answer = server.predict("m", b"x")
                if answer.status_code == 200:
                    break
            assert answer.content == b"4"


# ------------------------------------------------------------------------------------------- versions that go


@pytest.mark.long
def test_a_version_goes_under_load_and_every_request_has_its_answer(server: Server) -> None:
    """What it had accepted it answers, what comes later is not found; and nothing of it is left, time after time."""
    server.register(telling(server.store, 1, "1.0")).raise_for_status()
    second = telling(server.store, 2, "2.0")
    family = len(server.family())

    for _ in range(4):
        server.register(second).raise_for_status()
        with LoadBeside(port_of(server), "m/2.0", 200, 1.5) as load:
            time.sleep(max(0.0, load.started_at + 0.7 - time.monotonic()))
            began = time.monotonic() - load.started_at
            server.client.delete(f"{server.management}/models/m/2.0").raise_for_status()
            ended = time.monotonic() - load.started_at

        assert set(count_by_status(load.outcomes)) == {200, 404}
        # An answer that was there before the call began is the version's; a request after its end finds none.
        assert all(outcome.status == 200 for outcome in load.outcomes if outcome.ended_s < began)
        assert all(outcome.status == 404 for outcome in load.outcomes if outcome.sent_s > ended)
        assert {outcome.body for outcome in load.outcomes if outcome.status == 200} == {b"2"}
        assert len(list(server.temporary.rglob("handler.py"))) == 1
        assert len(server.family()) == family
    assert server.predict("m", b"x").content == b"1"
