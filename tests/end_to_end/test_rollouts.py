"""Roll-outs and shadows through a real server under load: two versions of a linear model, and worse ones."""

from __future__ import annotations

import json
import re
import signal
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.command_line import marserve
from support.load import Load
from support.server import Server, make_archive, poll

LINEAR = """
import json, os, time

WEIGHTS, BIAS = (0.5, -1.25), 2.0

def handle(data, context):
    if data is None:
        return None
    return [answer(json.loads(bytes(row["body"]))) for row in data]

def answer(inputs):
    return {"y": sum(w * x for w, x in zip(WEIGHTS, inputs)) + BIAS}
"""
EQUAL = LINEAR
# One input in fifty: 2 %.
WRONG = LINEAR.replace("return {", "if inputs[0] == 7:\n        return {'y': 0.0}\n    return {")
NEARLY = LINEAR.replace("+ BIAS}", "+ BIAS * (1 + 1e-7)}")
SLOW = LINEAR.replace("return {", "time.sleep(0.05)\n    return {")
CRASHING = LINEAR.replace("return {", "if inputs[0] % 10 == 7:\n        os._exit(3)\n    return {")
RAISING = LINEAR.replace("return {", "if inputs[0] % 10 == 7:\n        raise ValueError('no')\n    return {")
HANGING = LINEAR.replace("return {", "time.sleep(2)\n    return {")
UNLOADABLE = "raise RuntimeError('cannot be loaded')\n"
OWN = (
    NEARLY
    + """
def compare(primary, shadow):
    ours, theirs = primary.value()["y"], shadow.value()["y"]
    return "" if round(ours, 3) == round(theirs, 3) else f"{ours} became {theirs}"
"""
)
VARIANTS = {
    "2.0": EQUAL,
    "2.1": WRONG,
    "2.2": SLOW,
    "2.3": CRASHING,
    "2.4": RAISING,
    "2.5": UNLOADABLE,
    "2.6": NEARLY,
    "2.7": OWN,
    "2.8": HANGING,
}
CONFIG = "minWorkers: 1\nmaxWorkers: 1\nbatchSize: 4\nmaxBatchDelay: 5\n"
QUICK = {"steps": [30, 100], "hold": 1.0, "min_requests": 60, "max_p99_increase": None}


def archives(store: Path) -> None:
    """All versions of the model."""
    store.mkdir(parents=True, exist_ok=True)
    make_archive(store / "linear-1.0.mar", LINEAR, name="linear", config=CONFIG)
    for version, source in VARIANTS.items():
        make_archive(store / f"linear-{version}.mar", source, name="linear", version=version, config=CONFIG)


@pytest.fixture(scope="module")
def shared_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One server for all tests."""
    folder = tmp_path_factory.mktemp("rollouts")
    archives(folder / "store")
    with Server(folder, settings={"log_location": str(folder / "logs")}) as server:
        server.register("linear-1.0.mar").raise_for_status()
        yield server


@pytest.fixture
def server(shared_server: Server) -> Iterator[Server]:
    """The server with version 1.0 alone, which is the default and without a roll-out: also after a test that failed."""
    yield shared_server
    url = f"{shared_server.management}/models/linear"
    for undone in ("rollout", "shadow", "traffic"):
        shared_server.client.delete(f"{url}/{undone}")
    shared_server.client.put(f"{url}/1.0/set-default").raise_for_status()
    for described in shared_server.client.get(f"{url}/all").raise_for_status().json():
        if described["modelVersion"] != "1.0":
            shared_server.client.delete(f"{url}/{described['modelVersion']}", params={"force": "true"})
            wait_until_gone(shared_server, described["modelVersion"])


def begin(server: Server, version: str, **more: Any) -> Any:
    """Begin a roll-out of a version that it registers itself."""
    document = {"version": version, "url": f"linear-{version}.mar", **QUICK, **more}
    answer = server.client.post(f"{server.management}/models/linear/rollout", json=document)
    assert answer.status_code == 202, answer.text
    return answer.json()


def rollout(server: Server) -> dict[str, Any]:
    """What is said of it, once a start has taken roll-outs up again."""
    for _ in poll(30, "the roll-outs are read"):
        answer = server.client.get(f"{server.management}/models/linear/rollout")
        if answer.status_code != 503:
            break
    assert answer.status_code == 200, answer.text
    document: dict[str, Any] = answer.json()
    return document


def wait_for(server: Server, *states: str, limit_s: float = 60) -> dict[str, Any]:
    """The roll-out once it is in one of these states."""
    for _ in poll(limit_s, f"the roll-out is {states}"):
        told = rollout(server)
        if told["state"] in states:
            return told
        assert told["state"] in ("preparing", "running", "paused"), told
    raise AssertionError


def ended(server: Server) -> Counter[tuple[str, str]]:
    """How many roll-outs ended, by outcome and reason, as the page of metrics says."""
    page = server.client.get(f"{server.metrics}/metrics").text
    lines = re.findall(r'marserve_rollouts_ended_total{outcome="(\w+)",reason="(\w+)"} (\d+)', page)
    return Counter({(outcome, reason): int(count) for outcome, reason, count in lines})


def wait_until_gone(server: Server, version: str) -> None:
    """A version that was taken back, and that the roll-out had registered, is unregistered."""
    for _ in poll(30, f"version {version} is gone"):
        if server.client.get(f"{server.management}/models/linear/{version}").status_code == 404:
            return


def back_to_first(server: Server, version: str) -> None:
    """Have things as they were before a promotion."""
    server.client.put(f"{server.management}/models/linear/1.0/set-default").raise_for_status()
    server.client.delete(f"{server.management}/models/linear/{version}").raise_for_status()


@pytest.mark.system
def test_an_equal_version_is_promoted_and_nobody_notices(server: Server) -> None:
    """With its answers compared; every request is answered, and afterwards all by the new version."""
    before = ended(server)
    with Load(server.inference, "linear") as load:
        begin(server, "2.0", compare="exact", share=0.5)
        told = wait_for(server, "promoted")
        after = time.monotonic() + 1
        for _ in poll(10, "requests after the promotion"):
            if sum(load.versions(after).values()) > 50:
                break

    assert set(load.statuses()) == {200}
    assert load.versions(after).keys() <= {"2.0", ""}
    # A step that had too few requests in its second is held for longer.
    assert [event["event"] for event in told["events"] if event["event"] != "holds"] == [
        *("asked for", "registered", "ready", "30% of the requests", "step passed", "100% of the requests", "promoted"),
    ]
    assert ended(server) - before == {("promoted", "judge"): 1}
    assert told["answers"]["differing"] == 0
    assert server.describe("linear")["modelVersion"] == "2.0"
    traffic = server.client.get(f"{server.management}/models/linear/traffic").json()
    assert traffic == {"weights": {"2.0": 100}, "isDefault": True}
    assert server.client.get(f"{server.management}/models/linear/shadow").status_code == 404
    back_to_first(server, "2.0")


def test_a_version_wrong_on_two_percent_is_flagged_with_evidence_and_no_client_sees_it(server: Server) -> None:
    """At the step of 0 it gets copies alone; the sampled differences say where it is wrong."""
    before = ended(server)
    with Load(server.inference, "linear") as load:
        begin(server, "2.1", steps=[0, 50, 100], compare={"relative": 1e-3}, share=1.0, hold=30)
        told = wait_for(server, "rolled back")

    assert set(load.statuses()) == {200}
    assert load.versions().keys() <= {"1.0", ""}
    finding = told["verdict"]["findings"][0]
    assert (finding["measure"], finding["standing"]) == ("answers", "worse")
    assert told["answers"]["compared"] < 2000
    assert "compared answers" in told["reason"]
    assert ended(server) - before == {("rolled_back", "answers"): 1}
    wait_until_gone(server, "2.1")


def test_a_crashing_canary_is_rolled_back_and_no_client_sees_an_error(server: Server) -> None:
    """Whatever kills its workers the version that serves answers; the deaths count against the canary."""
    with Load(server.inference, "linear") as load:
        begin(server, "2.3", hold=30)
        told = wait_for(server, "rolled back")

    assert told["reason"].startswith(("errors of the candidate", "version 2.3 has no worker"))
    assert set(load.statuses()) == {200}
    assert load.versions()["2.3"] > 0
    wait_until_gone(server, "2.3")


@pytest.mark.long
def test_a_slow_version_is_found_by_its_p99(server: Server) -> None:
    """Though every answer is right; the evidence names the line that was crossed."""
    with Load(server.inference, "linear") as load:
        begin(server, "2.2", steps=[10, 100], hold=40, max_p99_increase=0.5)
        told = wait_for(server, "rolled back")

    assert set(load.statuses()) == {200}
    assert "to the candidate took more than" in told["reason"]
    wait_until_gone(server, "2.2")


@pytest.mark.system
def test_from_the_verdict_on_no_request_is_sent_to_the_version_taken_back(server: Server) -> None:
    """Three times the promised 100 ms; the time of the verdict is that of the record."""
    clock = time.time() - time.monotonic()
    with Load(server.inference, "linear") as load:
        begin(server, "2.4", hold=30)
        told = wait_for(server, "rolled back")
        verdict = next(event["at"] for event in told["events"] if event["event"] == "rolled back") - clock
        for _ in poll(10, "requests after the verdict"):
            if sum(load.versions(verdict + 0.3).values()) > 100:
                break

    assert load.versions(verdict + 0.3).keys() <= {"1.0", ""}
    assert load.versions(0)["2.4"] > 0
    wait_until_gone(server, "2.4")


def test_a_version_that_cannot_be_loaded_gets_no_request_and_leaves_nothing(server: Server) -> None:
    """The reason says why; the version before serves."""
    begin(server, "2.5")

    told = wait_for(server, "rolled back")

    assert "LoadFailed" in told["reason"]
    assert server.client.get(f"{server.management}/models/linear/2.5").status_code == 404
    assert server.predict("linear", b"[1, 2]").json() == {"y": 0.0}


def test_pause_resume_abort_and_what_is_refused_meanwhile(server: Server) -> None:
    """Each order does what it says; a second roll-out is refused; traffic set by hand wins."""
    url = f"{server.management}/models/linear/rollout"
    begin(server, "2.0", hold=600)
    wait_for(server, "running")

    second = server.client.post(url, json={"version": "2.0"})
    paused = server.client.put(f"{url}/pause")
    again = server.client.put(f"{url}/pause")
    resumed = server.client.put(f"{url}/resume")
    aborted = server.client.delete(url)

    assert second.status_code == 409
    assert "has a roll-out already" in second.json()["message"]
    assert (paused.status_code, paused.json()["state"]) == (200, "paused")
    assert again.status_code == 409
    assert resumed.json()["state"] == "running"
    assert (aborted.status_code, aborted.json()["state"]) == (200, "aborted")
    assert server.client.delete(url).status_code == 409
    wait_until_gone(server, "2.0")

    server.register("linear-2.0.mar").raise_for_status()
    server.client.post(url, json={"version": "2.0", **QUICK, "hold": 600}).raise_for_status()
    wait_for(server, "running")
    weights = {"weights": {"1.0": 60, "2.0": 40}}
    server.client.put(f"{server.management}/models/linear/traffic", json=weights).raise_for_status()
    told = wait_for(server, "aborted")

    assert told["reason"] == "the traffic was changed by hand meanwhile"
    assert server.client.get(f"{server.management}/models/linear/traffic").json()["weights"] == weights["weights"]
    server.client.delete(f"{server.management}/models/linear/traffic").raise_for_status()

    server.client.post(url, json={"version": "2.0", **QUICK, "hold": 600}).raise_for_status()
    wait_for(server, "running")
    forced = {"force": "true"}
    server.client.delete(f"{server.management}/models/linear/2.0", params=forced).raise_for_status()
    told = wait_for(server, "aborted")

    assert told["reason"] == "version 2.0 was unregistered or replaced meanwhile"
    assert server.predict("linear", b"[1, 2]").status_code == 200


@pytest.mark.system
def test_requests_that_wait_for_a_version_taken_back_are_answered_by_the_other(server: Server) -> None:
    """They are handed over, and their answers name the version that gave them."""
    url = f"{server.management}/models/linear"
    with Load(server.inference, "linear", clients=16) as load:
        begin(server, "2.8", steps=[80, 100], hold=600)
        for _ in poll(30, "requests wait for it"):
            if (
                server.client.get(f"{url}/2.8").status_code == 200
                and server.describe("linear", "2.8")["jobQueueStatus"]["pendingRequests"]
            ):
                break
        aborted = server.client.delete(f"{url}/rollout").json()
        at = time.monotonic()
        for _ in poll(20, "all are answered"):
            if sum(load.versions(at).values()) > 50:
                break

    assert aborted["events"][-1]["handedOver"] >= 1
    assert set(load.statuses()) == {200}
    # What was handed over began before the end, and ended soon after it.
    assert any(reply.began < at < reply.ended < at + 1.5 and reply.version != "2.8" for reply in load.replies)
    wait_until_gone(server, "2.8")


@pytest.mark.system
def test_a_version_without_workers_is_taken_back(server: Server) -> None:
    """Even without a single request to notice it by."""
    begin(server, "2.0", hold=600)
    wait_for(server, "running")
    server.client.put(f"{server.management}/models/linear/2.0", params={"min_worker": 0}).raise_for_status()

    told = wait_for(server, "rolled back")

    assert told["reason"].startswith("version 2.0 has no worker any more")
    wait_until_gone(server, "2.0")


@pytest.mark.system
def test_somebody_may_promote_it_at_once_and_all_roll_outs_are_listed(server: Server) -> None:
    """Within a second everything goes there."""
    url = f"{server.management}/models/linear/rollout"
    with Load(server.inference, "linear") as load:
        begin(server, "2.0", hold=600)
        wait_for(server, "running")
        unknown = server.client.put(f"{url}/dance")
        promoted = server.client.put(f"{url}/promote").json()
        at = time.monotonic()
        for _ in poll(20, "requests after it"):
            if sum(load.versions(at + 1.0).values()) > 20:
                break
    listed = server.client.get(f"{server.management}/rollouts").json()["rollouts"]

    assert unknown.status_code == 404
    assert (promoted["state"], promoted["share"]) == ("promoted", 100)
    assert load.versions(at + 1.0).keys() <= {"2.0", ""}
    assert set(load.statuses()) == {200}
    assert [(each["modelName"], each["state"]) for each in listed] == [("linear", "promoted")]
    back_to_first(server, "2.0")


@pytest.mark.system
def test_too_little_traffic_holds_and_says_so_until_its_bound(server: Server) -> None:
    """Then the version that served serves again."""
    before = ended(server)
    begin(server, "2.0", hold=0.2, max_hold=1.0)

    told = wait_for(server, "rolled back")

    assert "holds" in [event["event"] for event in told["events"]]
    assert told["reason"].startswith("too few: 0 of 60 requests to the candidate")
    assert ended(server) - before == {("rolled_back", "too_few"): 1}
    wait_until_gone(server, "2.0")


def test_what_cannot_be_meant_is_refused_with_a_sentence(server: Server) -> None:
    """Member, value, and what it may be."""
    url = f"{server.management}/models/linear/rollout"
    for document, status, words in (
        ({"version": "1.0"}, 400, "serves already"),
        ({"version": "9.9"}, 404, "9.9"),
        ({"version": "2.0", "steps": [50, 20, 100]}, 400, "must rise"),
        ({"version": "2.0", "steps": [0, 100]}, 400, "needs compare"),
        ({"version": "2.0", "hold": -1}, 400, "hold of a roll-out is '-1'"),
        ({"version": "2.0", "holt": 3}, 400, "'holt'"),
        ({"version": "2.0", "compare": "roughly"}, 400, "compare is 'roughly'"),
    ):
        answer = server.client.post(url, json=document)
        assert answer.status_code == status, answer.text
        assert words in answer.json()["message"]
    nobody = f"{server.management}/models/nobody/rollout"
    for answer in (
        server.client.post(nobody, json={"version": "2.0"}),
        server.client.get(nobody),
        server.client.put(f"{nobody}/pause"),
    ):
        assert (answer.status_code, answer.json()["message"]) == (404, "Model not found: nobody")
    server.register("linear-1.0.mar", model_name="alone").raise_for_status()
    none_yet = server.client.get(f"{server.management}/models/alone/rollout")
    server.client.delete(f"{server.management}/models/alone").raise_for_status()
    assert "POST /models/alone/rollout begins one" in none_yet.json()["message"]


def test_marserve_rollout_plans_begins_follows_and_shows(server: Server) -> None:
    """The dry run changes nothing; `--follow` ends with the roll-out, its status tells how."""
    at = ("--management", server.management)
    options = ("--url", "linear-2.0.mar", "--steps", "30,100", "--hold", "1s", "--max-p99-increase", "off")

    planned = marserve("rollout", "linear", "2.0", *options, "--dry-run", "--json", *at)
    with Load(server.inference, "linear"):
        ran = marserve("rollout", "linear", "2.0", *options, "--min-requests", 60, "--follow", *at)
    shown = marserve("rollout", "linear", "--json", *at)
    refused = marserve("rollout", "linear", "--pause", *at)

    assert planned.status == 0, planned.err
    assert [step["share"] for step in planned.document["steps"]] == [30, 100]
    assert ran.status == 0, ran.err
    assert "promoted" in ran.out
    assert (ran.err.count("asked for"), ran.out.count("asked for")) == (1, 0)  # events are shown once, as they come
    assert shown.document["state"] == "promoted"
    assert refused.status == 1
    back_to_first(server, "2.0")


@pytest.mark.system
def test_a_roll_out_goes_on_after_the_server_was_killed(tmp_path: Path) -> None:
    """At its step, with a window of its own; paused ones stay paused."""
    archives(tmp_path / "store")
    settings = {"log_location": str(tmp_path / "logs"), "load_models": "linear=linear-1.0.mar"}
    server = Server(tmp_path, settings=settings)
    with server:
        for _ in poll(30, "the model is loaded"):
            if server.predict("linear", b"[1, 2]").status_code == 200:
                break
        begin(server, "2.0", steps=[20, 60, 100], hold=1.0)
        with Load(server.inference, "linear"):
            for _ in poll(30, "the second step"):
                if rollout(server)["step"] == 1:
                    break
            server.client.put(f"{server.management}/models/linear/rollout/pause").raise_for_status()
        for _ in poll(10, "the record says so"):
            files = list((tmp_path / "logs" / "state" / "rollouts").glob("*.json"))
            if files and json.loads(files[0].read_text())["rollouts"][-1]["state"] == "paused":
                break
        assert server.process is not None
        server.process.send_signal(signal.SIGKILL)
        server.process.wait()
        server.process = None

        server.start()
        told = wait_for(server, "paused")
        traffic = server.client.get(f"{server.management}/models/linear/traffic").json()
        server.client.put(f"{server.management}/models/linear/rollout/resume").raise_for_status()
        with Load(server.inference, "linear") as load:
            ended = wait_for(server, "promoted")

        assert (told["step"], told["share"]) == (1, 60)
        assert traffic["weights"] == {"1.0": 40, "2.0": 60}
        assert "the server was started again" in [event["event"] for event in ended["events"]]
        assert set(load.statuses()) == {200}


# ------------------------------------------------------------------------------------------------------- shadows


def mirror(server: Server, version: str, compare: Any, share: float = 1.0) -> str:
    """Begin to mirror to a version; the address of the shadow."""
    server.register(f"linear-{version}.mar").raise_for_status()
    url = f"{server.management}/models/linear/shadow"
    document = {"version": version, "share": share, "compare": compare}
    server.client.put(url, json=document).raise_for_status()
    return url


@pytest.mark.system
@pytest.mark.parametrize(
    ("version", "compare", "differs"),
    [
        ("2.0", "exact", False),
        ("2.6", "exact", True),
        ("2.6", {"relative": 1e-4, "absolute": 1e-4}, False),
        ("2.7", "handler", False),
        ("2.1", {"relative": 1e-4}, True),
        ("2.1", "scores", False),
    ],
)
def test_a_shadow_compares_exactly_by_numbers_by_scores_or_by_its_handler(
    server: Server, version: str, compare: Any, differs: bool
) -> None:
    """Counts, sampled differences and metrics; no client gets an answer of its."""
    url = mirror(server, version, compare)
    with Load(server.inference, "linear", clients=2) as load:
        for _ in poll(30, "200 answers are compared"):
            told = server.client.get(url).json()
            if told["compared"] >= 200:
                break
    removed = server.client.delete(url)
    page = server.client.get(f"{server.metrics}/metrics").text

    assert set(load.statuses()) == {200}
    assert load.versions().keys() <= {"1.0", ""}
    assert bool(told["differing"]) is differs
    assert bool(told["differences"]) is differs
    if differs:
        sample = told["differences"][0]
        assert sample["primaryAnswer"] != sample["shadowAnswer"]
        assert json.loads(sample["request"][0]["body"])
    else:  # 200 of 200
        assert told["shownAgreement"] >= 0.985
    assert ("meanError" in told) is (compare == "scores")
    assert not told["errors"]
    assert removed.status_code == 200
    line = rf'marserve_shadow_compared_total{{model="linear",version="{re.escape(version)}"}} (\d+)'
    found = re.search(line, page)
    assert found is not None
    assert int(found[1]) >= 200
    server.client.delete(f"{server.management}/models/linear/{version}").raise_for_status()


@pytest.mark.parametrize("version", ["2.2", "2.3"])
def test_a_slow_or_dying_shadow_fails_no_request(server: Server, version: str) -> None:
    """What it cannot take is dropped and counted."""
    url = mirror(server, version, "exact")
    with Load(server.inference, "linear") as load:
        for _ in poll(30, "copies are dropped, or not answered"):
            told = server.client.get(url).json()
            if sum(told["dropped"].values()) > 100 and (version == "2.2" or told["errors"]):
                break
    server.client.delete(url).raise_for_status()

    assert set(load.statuses()) == {200}
    assert not load.failures
    assert told["copiesUnderWay"] <= 8
    server.client.delete(f"{server.management}/models/linear/{version}").raise_for_status()


def test_marserve_shadow_mirrors_shows_and_ends(server: Server) -> None:
    """A dry run changes nothing; differences are shown as a table."""
    at = ("--management", server.management)
    server.register("linear-2.1.mar").raise_for_status()
    tolerance = '{"relative": 0.001}'

    planned = marserve("shadow", "linear", "2.1", "--compare", tolerance, "--dry-run", *at)
    nothing = marserve("shadow", "linear", *at)
    began = marserve("shadow", "linear", "2.1", "--share", 1, "--compare", tolerance, "--json", *at)
    with Load(server.inference, "linear", clients=2):
        for _ in poll(30, "a difference"):
            if marserve("shadow", "linear", "--json", *at).document["differing"]:
                break
    shown = marserve("shadow", "linear", *at)
    ended = marserve("shadow", "linear", "--off", *at)
    wrong = marserve("shadow", "linear", "9.9", *at)

    assert "would be mirrored to version 2.1" in planned.out
    assert (nothing.status, wrong.status) == (1, 1)
    assert began.document["compare"] == {"relative": 0.001, "absolute": 1e-05}
    assert "differing" in shown.out
    assert "agreement is shown with 95 % certainty" in shown.out
    assert "y  " in shown.out
    assert ended.status == 0
    assert server.client.get(f"{server.management}/models/linear/shadow").status_code == 404
    server.client.delete(f"{server.management}/models/linear/2.1").raise_for_status()


@pytest.mark.system
def test_a_server_that_stops_does_not_wait_for_copies_and_takes_a_roll_out_up_again(tmp_path: Path) -> None:
    """The shadow hangs; SIGTERM ends the server well all the same, and the roll-out is no worse off for it."""
    archives(tmp_path / "store")
    settings = {"log_location": str(tmp_path / "logs"), "load_models": "linear=linear-1.0.mar"}
    server = Server(tmp_path, settings=settings)
    with server:
        for _ in poll(30, "the model is loaded"):
            if server.predict("linear", b"[1, 2]").status_code == 200:
                break
        begin(server, "2.8", steps=[0, 50, 100], hold=600, compare="exact", share=1.0)
        wait_for(server, "running")
        for _ in range(5):
            assert server.predict("linear", b"[1, 2]").status_code == 200
        began = time.monotonic()
        server.stop()
        stopped_s = time.monotonic() - began

        server.start()
        told = wait_for(server, "running")
        shadow = server.client.get(f"{server.management}/models/linear/shadow")
        aborted = server.client.delete(f"{server.management}/models/linear/rollout")

    assert stopped_s < 10
    assert told["share"] == 0
    assert shadow.status_code == 200
    assert aborted.json()["state"] == "aborted"


@pytest.mark.long
@pytest.mark.timeout(900)
def test_fifty_thousand_requests_over_every_variant(server: Server) -> None:
    """No client sees an error; each fault is found with its evidence, and taken back within a second."""
    clock = time.time() - time.monotonic()
    taken_back: dict[str, float] = {}
    mirrored = {"steps": [0, 50, 100], "compare": {"relative": 1e-3}, "share": 1.0, "hold": 60}
    faults: dict[str, dict[str, Any]] = {
        "2.1": mirrored,
        "2.2": {"steps": [10, 100], "hold": 60, "max_p99_increase": 0.5},
        "2.3": {"hold": 60},
    }
    with Load(server.inference, "linear", clients=8) as load:
        while sum(load.statuses().values()) < 50_000:
            for version, asked in faults.items():
                begin(server, version, **asked)
                told = wait_for(server, "rolled back", limit_s=120)
                taken_back[version] = told["events"][-1]["at"] - clock
                assert told["verdict"]["findings"], told
                if version == "2.1":
                    assert told["answers"]["compared"] < 2000
                wait_until_gone(server, version)
                late = taken_back[version] + 1.0
                for _ in poll(20, "requests after it"):
                    if sum(load.versions(late).values()) > 20:
                        break
                assert load.versions(late).keys() <= {"1.0", ""}
            begin(server, "2.0", compare="exact", share=0.5)
            wait_for(server, "promoted", limit_s=120)
            back_to_first(server, "2.0")

    assert set(load.statuses()) == {200}
    assert load.versions()["2.3"] > 0
