"""Real servers with more models than memory: loads on demand, models that make room, and honest refusals."""

from __future__ import annotations

import concurrent.futures
import random
import re
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
import pytest

from support.ballast import MIB, make_ballast
from support.server import Server, make_archive, poll

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks at processes by way of /proc")

# What a ballast model declares: more than its interpreter and its ballast take.
PLACE_MIB = 64


def counter(server: Server, name: str) -> int:
    """The sum of a counter over all versions."""
    page = httpx.get(f"{server.metrics}/metrics", params={"name[]": name}).text
    return sum(int(float(line.rsplit(" ", 1)[1])) for line in page.splitlines() if not line.startswith("#"))


def shifting_zipf(seed: int, models: int, requests: int, every: int) -> list[int]:
    """Zipf's law with exponent 1.0, drawn anew every so many requests, as in `benchmarks/eviction.py`."""
    chance = random.Random(seed)
    weights = [1.0 / (rank + 1) for rank in range(models)]
    trace: list[int] = []
    while len(trace) < requests:
        ranked = list(range(models))
        chance.shuffle(ranked)
        trace += chance.choices(ranked, weights, k=min(every, requests - len(trace)))
    return trace


def belady_loads(trace: list[int], places: int) -> int:
    """Loads of who knows the future: what is needed again last leaves."""
    resident: set[int] = set()
    loads = 0
    for position, model in enumerate(trace):
        if model in resident:
            continue
        loads += 1
        if len(resident) >= places:
            rest = trace[position:]
            resident.remove(max(resident, key=lambda each: rest.index(each) if each in rest else len(rest)))
        resident.add(model)
    return loads


def lru_loads(trace: list[int], places: int) -> int:
    """Loads of who lets the one go that was used longest ago."""
    resident: list[int] = []
    loads = 0
    for model in trace:
        if model in resident:
            resident.remove(model)
        else:
            loads += 1
            del resident[: max(0, len(resident) + 1 - places)]
        resident.append(model)
    return loads


@contextmanager
def highest_pss(server: Server) -> Iterator[list[int]]:
    """The most that all processes below the server held together at any look, in the list's one element."""
    highest, is_over = [0], threading.Event()

    def look() -> None:
        while not is_over.wait(0.05):
            total = 0
            for process in server.family()[1:]:
                try:
                    total += process.memory_full_info().pss
                except (psutil.NoSuchProcess, psutil.AccessDenied, FileNotFoundError):
                    continue
            highest[0] = max(highest[0], total)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield highest
    finally:
        is_over.set()
        thread.join()


def start_with(
    folder: Path, models: int, places: int, *, held_mib: int = 16, least_residence: float = 0.0, **config: object
) -> Server:
    """A server with that many models, loaded on demand, in memory for so many."""
    store = folder / "store"
    store.mkdir()
    make_ballast(store / "m.mar", held_mib=held_mib, memory=f"{PLACE_MIB}MiB", load="on_demand", **config)
    return Server(
        folder,
        entry="marserve",
        store=store,
        settings={"model_memory": f"{places * PLACE_MIB}MiB", "least_residence": str(least_residence)},
    )


def register_all(server: Server, models: int) -> None:
    """The one archive under names of their own; nothing is loaded."""
    for number in range(models):
        answer = server.client.post(f"{server.management}/models", params={"url": "m.mar", "model_name": f"m{number}"})
        assert answer.status_code == 200, answer.text


def play(folder: Path, *, models: int, places: int, requests: int, every: int) -> tuple[list[int], int]:
    """Play a trace, and hold what is promised of any; the trace, and the loads it took."""
    trace = shifting_zipf(11, models, requests, every)
    with start_with(folder, models, places) as server:
        register_all(server, models)
        with highest_pss(server) as highest:
            for number in trace:
                answer = server.predict(f"m{number}")
                assert answer.status_code == 200, answer.text
        loads = counter(server, "marserve_loads_on_demand_total")
        deaths = counter(server, "marserve_worker_deaths_total")
        page = httpx.get(f"{server.metrics}/metrics").text

    assert deaths == 0
    assert loads >= belady_loads(trace, places)  # fewer loads are more models in memory than have room
    assert highest[0] <= places * PLACE_MIB * MIB
    assert float(page.split("\nmarserve_memory_budget_bytes ")[1].split()[0]) == places * PLACE_MIB * MIB
    assert re.search(r"marserve_evictions_total\{.*\} [1-9]", page)
    return trace, loads


def hold_few_loads(trace: list[int], places: int, loads: int) -> None:
    """What is promised of who leaves, on traces that are long beside the seconds that one load takes more or less."""
    first, best = len(set(trace)), belady_loads(trace, places)
    assert (loads - first) / (best - first) <= 1.7, (loads, best)
    assert loads <= lru_loads(trace, places)


@pytest.mark.system
def test_models_take_turns_in_too_little_memory(tmp_path: Path) -> None:
    """8 models in room for 3, Zipf traffic that shifts: all are answered, none is killed, no more room is taken.

    Who leaves depends on how long each took to load, and 80 requests are too few to even that out: how few loads it
    takes is held by the longer ones below, and exactly by `tests/memory/test_eviction.py`.
    """
    play(tmp_path, models=8, places=3, requests=80, every=40)


@pytest.mark.long
def test_twelve_models_take_turns_in_room_for_four(tmp_path: Path) -> None:
    """The same, with more of both."""
    trace, loads = play(tmp_path, models=12, places=4, requests=240, every=120)
    hold_few_loads(trace, 4, loads)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_thirty_models_take_turns_in_room_for_ten(tmp_path: Path) -> None:
    """The stated proportions: Zipf 1.0, drawn anew every 500 of 2,000 requests."""
    trace, loads = play(tmp_path, models=30, places=10, requests=2000, every=500)
    hold_few_loads(trace, 10, loads)


@pytest.mark.long
def test_many_clients_of_many_models_get_answers_or_an_honest_503(tmp_path: Path) -> None:
    """All places are in use now and then: who waits is held, and who waited too long is told to come back."""
    models, places = 9, 3
    trace = shifting_zipf(3, models, 240, 80)
    with start_with(tmp_path, models, places, least_residence=0.1, startupTimeout=20) as server:
        register_all(server, models)
        with highest_pss(server) as highest, concurrent.futures.ThreadPoolExecutor(8) as clients:
            answers = list(clients.map(lambda number: server.predict(f"m{number}", "sleep 0.01"), trace))
        deaths = counter(server, "marserve_worker_deaths_total")

    refused = [answer for answer in answers if answer.status_code != 200]
    assert deaths == 0
    assert highest[0] <= places * PLACE_MIB * MIB
    assert all(
        (answer.status_code, answer.headers["x-marserve-cause"]) == (503, "no_memory") and answer.headers["retry-after"]
        for answer in refused
    )
    assert len(refused) <= len(answers) // 20


def test_a_load_that_cannot_fit_is_refused_before_it_starts(tmp_path: Path) -> None:
    """With the numbers, what holds the memory, and what to do; nothing of it is left, and nobody else notices."""
    store = tmp_path / "store"
    store.mkdir()
    make_ballast(store / "always.mar", held_mib=8, memory="60MiB")
    make_ballast(store / "large.mar", held_mib=8, memory="70MiB")
    make_ballast(store / "asleep.mar", held_mib=8, memory="70MiB", load="on_demand")

    with Server(tmp_path, entry="marserve", store=store, settings={"model_memory": "128MiB"}) as server:
        assert server.register("always.mar").status_code == 200
        pid = server.predict("always").text
        refused = server.register("large.mar")
        left = server.client.get(f"{server.management}/models/large")
        assert server.register("asleep.mar").status_code == 200
        asked = server.predict("asleep")
        more = server.client.put(
            f"{server.management}/models/always", params={"min_worker": 9, "max_worker": 9, "synchronous": "true"}
        )
        after = server.describe("always")
        same = server.predict("always").text
        page = httpx.get(f"{server.metrics}/metrics").text

    assert refused.status_code == 507
    assert refused.headers["x-marserve-cause"] == "no_memory"
    assert (
        "Model large version 1.0 does not fit into memory: it needs 70 MiB (declared), and 68 MiB of the 128 MiB for "
        "models can be had. Loaded, and not to be unloaded: always 1.0 with 60 MiB."
    ) in refused.json()["message"]
    assert left.status_code == 404
    assert (asked.status_code, asked.headers["x-marserve-cause"]) == (507, "no_memory")
    assert "always" not in asked.json()["message"]
    assert more.status_code == 507
    assert (after["minWorkers"], len(after["workers"])) == (1, 1)
    assert same == pid
    assert "marserve_loads_refused_total 3" in page


@pytest.mark.system
def test_a_pinned_model_and_one_in_use_make_no_room(tmp_path: Path) -> None:
    """Who comes then is held until a request has ended, or its deadline has passed."""
    with start_with(tmp_path, 4, 2, startupTimeout=20) as server:
        for number in range(4):
            pinned = {"pinned": "true"} if number == 0 else {}
            parameters = {"url": "m.mar", "model_name": f"m{number}", **pinned}
            server.client.post(f"{server.management}/models", params=parameters).raise_for_status()
        pinned_pid = server.predict("m0").text
        with concurrent.futures.ThreadPoolExecutor(2) as clients:
            busy = clients.submit(server.predict, "m1", "sleep 3")
            for _ in poll(5, "the request runs"):
                if server.describe("m1")["runningRequests"]:
                    break
            late = server.predict("m2", **{"x-marserve-timeout-ms": "300"})
            waiting = server.describe("m2")["memory"]["state"]
            began = time.monotonic()
            held = clients.submit(server.predict, "m3")
            busy_answer, held_answer = busy.result(), held.result()
            waited = time.monotonic() - began
        described = [server.describe(f"m{number}")["memory"] for number in range(4)]
        still = server.predict("m0").text

    assert late.status_code == 504
    assert waiting in ("waiting", "asleep")  # nobody waits any more, and a moment later it does not, either
    assert (busy_answer.status_code, held_answer.status_code) == (200, 200)
    assert waited > 1
    assert still == pinned_pid
    assert [each["mayMakeRoom"] for each in described] == [False, True, True, True]


@pytest.mark.system
def test_who_finds_no_room_in_time_is_told_to_come_back(tmp_path: Path) -> None:
    """503 with Retry-After and the cause, to all who wait; and the next one is served when there is room."""
    with start_with(tmp_path, 2, 1, startupTimeout=1) as server:
        register_all(server, 2)
        assert server.predict("m0").status_code == 200
        with concurrent.futures.ThreadPoolExecutor(4) as clients:
            busy = clients.submit(server.predict, "m0", "sleep 4")
            for _ in poll(5, "the request runs"):
                if server.describe("m0")["runningRequests"]:
                    break
            refused = list(clients.map(lambda _: server.predict("m1"), range(3)))
            busy_answer = busy.result()
        served = server.predict("m1")

    assert [answer.status_code for answer in refused] == [503] * 3
    assert {answer.headers["x-marserve-cause"] for answer in refused} == {"no_memory"}
    assert all(int(answer.headers["retry-after"]) >= 1 for answer in refused)
    assert (busy_answer.status_code, served.status_code) == (200, 200)


@pytest.mark.long
def test_models_that_would_take_turns_all_the_time_stay_for_a_while(tmp_path: Path) -> None:
    """Two models in room for one, asked in turn: with a least residence each is loaded at most once in that time."""
    residence = 1.0
    with start_with(tmp_path, 2, 1, least_residence=residence, startupTimeout=20) as server:
        register_all(server, 2)
        began = time.monotonic()
        answers = [server.predict(f"m{number % 2}") for number in range(5)]
        took = time.monotonic() - began
        loads = counter(server, "marserve_loads_on_demand_total")

    assert {answer.status_code for answer in answers} == {200}
    assert loads == 5
    assert took >= 4 * residence


def test_a_load_that_takes_more_than_there_is_is_ended_and_said_so(tmp_path: Path) -> None:
    """It said less than it takes; the model that is there goes on."""
    store = tmp_path / "store"
    store.mkdir()
    make_ballast(store / "good.mar", held_mib=8, memory="60MiB")
    make_ballast(store / "liar.mar", held_mib=400, load_s=0.0, memory="40MiB", start="auto")

    with Server(tmp_path, entry="marserve", store=store, settings={"model_memory": "150MiB"}) as server:
        assert server.register("good.mar").status_code == 200
        pid = server.predict("good").text
        refused = server.register("liar.mar")
        left = server.client.get(f"{server.management}/models/liar").status_code
        same = server.predict("good").text

    assert refused.status_code in (200, 507)
    if refused.status_code == 507:  # it was seen while it grew; else it was there before anybody looked
        assert left == 404
    assert same == pid


@pytest.mark.system
def test_what_was_learned_outlives_a_restart(tmp_path: Path) -> None:
    """At first it is estimated from the archive's files; then it is known, and so it is by the next server."""
    store = tmp_path / "store"
    store.mkdir()
    make_ballast(store / "m.mar", held_mib=100)
    kept = {"log_location": str(tmp_path / "logs")}

    with Server(tmp_path, entry="marserve", store=store, settings={"model_memory": "500MiB", **kept}) as server:
        server.register("m.mar").raise_for_status()
        for _ in poll(10, "its size is known"):
            first = server.describe("m")["memory"]
            if first["source"] == "learned":
                break
    with Server(tmp_path, entry="marserve", store=store, settings={"model_memory": "90MiB", **kept}) as server:
        refused = server.register("m.mar")

    assert first["residentBytes"] > 100 * MIB
    assert first["neededBytes"] > 100 * MIB
    assert refused.status_code == 507
    assert "(learned)" in refused.json()["message"]


@pytest.mark.system
def test_a_worker_is_replaced_in_its_place_where_there_is_no_room_for_two(tmp_path: Path) -> None:
    """Requests wait for the replacement, and none fails."""
    store = tmp_path / "store"
    store.mkdir()
    make_ballast(store / "m.mar", held_mib=8, memory="60MiB", maxRequestsPerWorker=5)

    with Server(tmp_path, entry="marserve", store=store, settings={"model_memory": "70MiB"}) as server:
        server.register("m.mar").raise_for_status()
        answers = []
        for _ in poll(20, "another worker answers"):
            answers.append(server.predict("m"))
            if len({answer.text for answer in answers}) > 2:
                break
        output = server.output()

    assert {answer.status_code for answer in answers} == {200}
    assert "there is no memory for its replacement beside it" in output


@pytest.mark.system
def test_the_setting_has_all_models_loaded_on_demand(tmp_path: Path) -> None:
    """A model's own word comes first."""
    store = tmp_path / "store"
    store.mkdir()
    make_ballast(store / "a.mar", minWorkers=2, maxWorkers=2)
    make_ballast(store / "b.mar", load="start")

    settings = {"model_load": "on_demand", "load_models": "all", "default_workers_per_model": "1"}
    with Server(tmp_path, entry="marserve", store=store, settings=settings) as server:
        for _ in poll(20, "the models are there"):
            listed = server.client.get(f"{server.management}/models").json()["models"]
            if len(listed) == 2 and server.describe("b")["state"] == "ready":
                break
        before = server.describe("a")
        ready = httpx.get(f"{server.inference}/readyz").status_code
        answer = server.predict("a")
        after = server.describe("a")

    assert (before["workers"], before["state"]) == ([], "idle")
    assert ready == 200
    assert answer.status_code == 200
    assert len(after["workers"]) == 2


@pytest.mark.system
def test_a_swap_where_two_do_not_fit_loads_in_the_memory_of_the_version_before(tmp_path: Path) -> None:
    """Dry runs say in which order it can be; one that cannot load has the version before come back."""
    store = tmp_path / "store"
    store.mkdir()
    make_ballast(store / "m.mar", held_mib=8, memory="60MiB")
    make_ballast(store / "new.mar", held_mib=8, memory="65MiB")
    make_archive(store / "bad.mar", "raise ValueError('no')", name="m", version="2.0", config="memory: 65MiB\n")
    make_ballast(store / "huge.mar", held_mib=8, memory="90MiB")

    with Server(tmp_path, entry="marserve", store=store, settings={"model_memory": "70MiB"}) as server:

        def swap(archive: str, order: str, *, dry_run: bool = False) -> httpx.Response:
            asked = {"url": archive, "order": order, "dry_run": str(dry_run).lower()}
            return server.client.post(f"{server.management}/models/m/swap", params=asked)

        server.register("m.mar").raise_for_status()
        tried = [swap("new.mar", order, dry_run=True) for order in ("load_first", "unload_first")]
        done = [swap("new.mar", order) for order in ("load_first", "unload_first")]
        tried.append(swap("huge.mar", "unload_first", dry_run=True))
        done += [swap("huge.mar", "unload_first"), swap("bad.mar", "unload_first")]
        answered = server.predict("m").status_code

    assert [answer.status_code for answer in tried] == [507, 200, 507], [answer.text for answer in tried]
    assert [answer.status_code for answer in done] == [507, 200, 507, 500], [answer.text for answer in done]
    assert tried[1].json()["memory"]["othersMakeRoom"] is False
    assert answered == 200
