"""`marserve tune --goal`: a copy is loaded and removed, what is found is shown, patched and applied."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from marserve.cli.measuring import tune_search, tune_space, tuned_copy
from marserve.cli.measuring.tuned_copy import TunedCopy
from marserve.desired_state.document import read
from marserve.tuning.search import Found, Row, Sample, Trials
from marserve.tuning.settings import Goal, Layout, Setting
from support.command_line import Ran, marserve
from support.fake_apis import Asked, FakeApis, description, fake_apis

COPY = f"digits-tuning-{os.getpid()}"
NOW = description(version="1.0", batchSize=4, maxBatchDelay=100, jobQueueSize=100, threadsPerWorker=1)
REFUSED = {"code": 409, "type": "ConflictStatusException", "message": "A document decides which models there are."}


@pytest.fixture
def apis() -> Iterator[FakeApis]:
    """A server with a model, which takes all that is asked of it."""
    with fake_apis() as running:
        running.answer("GET /models/digits", [NOW])
        running.answer("GET /models/digits/all", [NOW])
        running.answer("GET /desired-state", {"source": None})
        running.answer("POST /models", {"status": "registered"})
        for name in (COPY, "digits"):
            running.answer(f"PUT /models/{name}/1.0", {"status": "tuned"})
            running.answer(f"DELETE /models/{name}/1.0", {"status": "unregistered"})
            running.answer(f"POST /predictions/{name}/1.0", [1])
        yield running


@pytest.fixture
def body(tmp_path: Path) -> Path:
    """A request."""
    file = tmp_path / "a.json"
    file.write_text("[1]")
    return file


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Puts another search in the place of the true one: it probes and measures once, and finds these rates."""

    def put(measured: Sequence[tuple[Setting, float]], present: float = 100.0) -> None:
        def search(settings: Sequence[Setting], goal: Goal, trials: Trials, *, present: Setting, **more: Any) -> Found:
            layout = replace(present.layout, workers=2)
            assert trials.batch_s(layout, 8, 3)
            assert trials.measure(Setting(layout, 8, 0.002), 500.0, 20).rate > 0
            now = Row(present, 100.0, now_rate, [(None, Sample(now_rate, 0.02))])
            rows = [Row(setting, 2 * rate, rate, [(rate, Sample(rate, 0.03))]) for setting, rate in measured]
            return Found([*rows, now], {}, now)

        now_rate = present
        monkeypatch.setattr(tune_search, "search", search)

    return put


def _tune(apis: FakeApis, body: Path, *more: object) -> Ran:
    words = ("tune", "digits", "--goal", "p99=50ms", "--inputs", body, "--for", "60s", *more)
    return marserve(*words, "--management", apis.url, "--inference", apis.url)


BETTER = Setting(Layout(2, "1.0", 1), 16, 0.01)


def test_a_copy_without_traffic_is_loaded_and_removed(apis: FakeApis, body: Path, found: Callable[..., None]) -> None:
    """The version that serves is only described, and asked once whether it takes the request."""
    found([(BETTER, 300.0)])

    ran = _tune(apis, body)

    assert ran.status == 0, ran.err
    changes = [asked for asked in apis.asked if asked.method != "GET" and not asked.path.startswith("/predictions")]
    assert [f"{asked.method} {asked.path}" for asked in changes] == [
        "POST /models",
        f"PUT /models/{COPY}/1.0",
        f"PUT /models/{COPY}/1.0",
        f"DELETE /models/{COPY}/1.0",
    ]
    assert changes[0].parameters == {
        "copy_of": "digits",
        "model_version": "1.0",
        "model_name": COPY,
        "threads": "1",
        "initial_workers": "1",
        "synchronous": "true",
    }
    assert changes[1].parameters == {
        "batch_size": "8",
        "max_batch_delay": "0",
        "min_worker": "2",
        "max_worker": "2",
        "synchronous": "true",
    }
    assert changes[2].parameters == {"batch_size": "8", "max_batch_delay": "2"}
    asked = [each.path for each in apis.asked if each.path.startswith("/predictions/digits/")]
    assert asked == ["/predictions/digits/1.0"]
    assert [each.body for each in apis.asked if each.path == f"/predictions/{COPY}/1.0"][:1] == [b"[1]"]


def test_what_is_found_is_shown_with_a_patch_and_a_page(
    apis: FakeApis, body: Path, found: Callable[..., None], tmp_path: Path
) -> None:
    """Against the archive's own file where it is named."""
    (config := tmp_path / "model-config.yaml").write_text("batchSize: 4 # old\nhandler: {}\n")
    found([(BETTER, 300.0)])

    ran = _tune(apis, body, "--page", tmp_path / "page.html", "--model-config", config)

    assert "2 workers of 1 thread, batches of 16, 10 ms" in ran.out
    assert "3.00 times as much as now." in ran.out
    assert "-batchSize: 4 # old\n+batchSize: 16 # old\n" in ran.out
    assert "+minWorkers: 2\n" in ran.out
    assert "Nothing was changed" in ran.out
    assert "<svg" in (tmp_path / "page.html").read_text()
    assert config.read_text() == "batchSize: 4 # old\nhandler: {}\n"


@pytest.mark.parametrize("before", [b"batchSize: 4\r\n# \r\nmaxWorkers: 1\r\n", b"# \nbatchSize: 4"])
def test_what_is_printed_is_a_patch_of_the_very_file(
    apis: FakeApis, body: Path, found: Callable[..., None], tmp_path: Path, before: bytes
) -> None:
    """With the ends of its lines, beside the sentences, which `patch` skips."""
    (config := tmp_path / "model-config.yaml").write_bytes(before)
    found([(BETTER, 300.0)])

    ran = _tune(apis, body, "--model-config", config)
    words = ["patch", "-p1"] if shutil.which("patch") else ["git", "apply", "-p1", "-"]
    subprocess.run(words, cwd=tmp_path, input=ran.out_bytes, check=True)

    after = config.read_bytes()
    assert yaml.safe_load(after)["batchSize"] == 16
    assert after.count(b"\r\n") == (after.count(b"\n") if b"\r" in before else 0)


def test_a_script_gets_the_patch_and_the_choice(apis: FakeApis, body: Path, found: Callable[..., None]) -> None:
    """One document."""
    found([(BETTER, 300.0)])

    document = _tune(apis, body, "--json").document

    assert document["chosen"] == {
        "version": "1.0",
        "minWorkers": 2,
        "maxWorkers": 2,
        "batchSize": 16,
        "maxBatchDelay": 10,
        "threads": {"intra": 1},
    }
    assert "-batchSize: 4\n" in document["patch"]
    assert document["applied"] is None
    assert document["settings"][0]["isPresent"]


def test_a_goal_that_no_setting_keeps_is_said_with_how_far_down_it_was_tried(
    apis: FakeApis, body: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or that nothing was tried, as no setting keeps it by the simulation."""
    said = []
    for foreseen, samples in ((200.0, [(184.0, Sample(90.0, 0.4)), (60.0, Sample(60.0, 0.09))]), (0.0, [])):

        def search(
            settings: Sequence[Setting],
            goal: Goal,
            trials: Trials,
            *,
            present: Setting,
            batching: Any,
            row: Row = Row(BETTER, foreseen, 0.0, samples),
        ) -> Found:
            return Found([row], {}, Row(present, 0.0, 0.0))

        monkeypatch.setattr(tune_search, "search", search)
        ran = _tune(apis, body)
        assert ran.status == 0, ran.err
        said.append(" ".join(ran.out.split()))

    assert "200 /s none, down to 60 /s 90 ms" in said[0]
    assert "No setting that was measured keeps p99=50ms" in said[0]
    assert "No setting keeps p99=50ms by the simulation" in said[1]


def test_what_is_hardly_better_changes_nothing(apis: FakeApis, body: Path, found: Callable[..., None]) -> None:
    """Five percent may be the machine; nothing is applied then."""
    found([(BETTER, 104.0)])

    ran = _tune(apis, body, "--apply")

    assert ran.status == 0, ran.err
    assert "It stays as it is: nothing is better by more than 5%." in ran.out
    assert "+batchSize" not in ran.out
    assert [asked.parameters for asked in apis.orders("PUT") if asked.path == "/models/digits/1.0"] == [
        {"batch_size": "4", "dry_run": "true"}
    ]


def test_what_is_found_is_applied_where_that_was_asked_for(
    apis: FakeApis, body: Path, found: Callable[..., None]
) -> None:
    """To the version that serves."""
    found([(BETTER, 300.0)])

    ran = _tune(apis, body, "--apply")

    assert "Applied to digits 1.0" in ran.out
    assert apis.orders("PUT")[-1].path == "/models/digits/1.0"
    assert apis.orders("PUT")[-1].parameters == {
        "batch_size": "16",
        "max_batch_delay": "10",
        "min_worker": "2",
        "max_worker": "2",
        "synchronous": "true",
    }


@pytest.mark.parametrize("flag", ["--apply", "--on-live"])
def test_where_a_document_decides_it_is_not_applied_and_nothing_is_loaded(
    apis: FakeApis, body: Path, flag: str
) -> None:
    """That is found out before minutes are spent; the sentence names the document and what can be done."""
    with fake_apis() as governed:
        governed.answer("GET /models/digits", [NOW])
        governed.answer("GET /models/digits/all", [NOW])
        governed.answer("GET /desired-state", {"source": "models.yaml"})
        governed.answer("PUT /models/digits/1.0", REFUSED, 409)

        ran = _tune(governed, body, flag)

        assert ran.status == 1
        assert "A document decides which models there are." in ran.err
        assert "Leave out --apply and --on-live: a copy is loaded then" in ran.err
        assert governed.orders("POST") == []


def test_where_a_document_decides_what_is_found_is_a_change_of_it(
    apis: FakeApis, body: Path, found: Callable[..., None]
) -> None:
    """A copy is measured as ever, and the keys are those of the document, which reads them."""
    apis._answers["GET /desired-state"] = []
    apis.answer("GET /desired-state", {"source": "models.yaml"})
    found([(BETTER, 300.0)])

    ran = _tune(apis, body)

    assert ran.status == 0, ran.err
    said = ran.out[ran.out.index("In models.yaml, in place of what it says of these keys") :]
    lines = said.splitlines()[1:-1]
    wanted = read("\n".join(lines).replace('"1.0":', '"1.0":\n        url: digits.mar', 1).encode(), "m.yaml")
    assert dict(wanted.models["digits"].versions["1.0"].config) == {
        "minWorkers": 2,
        "maxWorkers": 2,
        "batchSize": 16,
        "maxBatchDelay": 10,
        "threads": {"intra": 1},
    }
    assert "`marserve plan FILE` shows what the changed document would do" in said
    assert "--- a/model-config.yaml" not in ran.out
    assert _tune(apis, body, "--json").document["declaration"].startswith("models:\n  digits:\n")


def test_a_copy_that_is_refused_says_what_to_do(apis: FakeApis, body: Path) -> None:
    """Nothing is left to remove; a server of before knows no copies."""
    said = []
    for status, message in ((507, "No memory."), (400, "Parameter url is required.")):
        apis._answers["POST /models"] = []
        apis.answer("POST /models", {"code": status, "type": "AnyException", "message": message}, status)
        ran = _tune(apis, body)
        assert ran.status == 1
        assert "--on-live loads the version that serves" in ran.err
        said.append(ran.err)

    assert "No memory." in said[0]
    assert "The server makes no copies of models: it is of an earlier version" in said[1]
    assert apis.orders("DELETE") == []


@pytest.mark.usefixtures("hangs_up")
@pytest.mark.parametrize("ends_by", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, None])
def test_the_copy_is_removed_however_the_search_ends(
    apis: FakeApis, body: Path, monkeypatch: pytest.MonkeyPatch, ends_by: signal.Signals | None
) -> None:
    """By a signal or a failure, and the sentence says so."""
    take, is_sent = apis.take, threading.Event()

    def ending(asked: Asked) -> tuple[int, bytes, str]:
        if asked.path.startswith(f"/predictions/{COPY}") and (ends_by is None or len(apis.asked) > 20):
            if ends_by is not None and not is_sent.is_set():
                is_sent.set()
                os.kill(os.getpid(), ends_by)
            return 500, b"{}", "application/json"
        return take(asked)

    apis.take = ending  # type: ignore[method-assign]

    ran = _tune(apis, body, "--workers", "1", "--threads", "1")

    assert ran.status == (1 if ends_by is None else 128 + ends_by)
    said = "No batch of digits 1.0 was" if ends_by is None else "The copy is removed, and nothing changed."
    assert said in ran.err
    assert [asked.path for asked in apis.orders("DELETE")] == [f"/models/{COPY}/1.0"]


def test_a_copy_that_is_still_loading_at_ctrl_c_is_waited_for_and_removed(apis: FakeApis, body: Path) -> None:
    """Its registration goes on in the server."""
    take = apis.take

    def interrupted(asked: Asked) -> tuple[int, bytes, str]:
        if asked.path == "/models" and asked.method == "POST":
            os.kill(os.getpid(), signal.SIGINT)
        return take(asked)

    apis.take = interrupted  # type: ignore[method-assign]
    apis._answers[f"DELETE /models/{COPY}/1.0"] = []
    apis.answer(f"DELETE /models/{COPY}/1.0", {"code": 404, "message": "Not yet."}, 404)
    apis.answer(f"DELETE /models/{COPY}/1.0", {"status": "unregistered"})

    ran = _tune(apis, body)

    assert ran.status == 130
    assert "The copy is removed, and nothing changed." in ran.err
    assert len(apis.orders("DELETE")) == 2


def test_a_proxy_that_gives_up_waiting_is_no_refusal(apis: FakeApis, body: Path) -> None:
    """What loads behind it is removed."""
    apis._answers["POST /models"] = []
    apis.answer("POST /models", b"<html>Gateway Time-out</html>", 504, "text/html")

    ran = _tune(apis, body)

    assert ran.status == 1
    assert len(apis.orders("DELETE")) == 1


@pytest.mark.parametrize("at", [1, 2])
def test_a_copy_whose_load_got_no_answer_is_removed(
    apis: FakeApis, body: Path, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    """The server goes on with it, and may list it only later: the first copy, or one that took its place."""
    take = apis.take

    def breaking(asked: Asked) -> tuple[int, bytes, str]:
        if asked.path == "/models" and asked.method == "POST" and len(_registrations(apis)) == at - 1:
            take(asked)
            raise ConnectionError("broken")
        return take(asked)

    def search(settings: Sequence[Setting], goal: Goal, trials: Trials, **more: Any) -> Found:
        trials.batch_s(Layout(1, "1.0", 2), 8, 3)
        raise AssertionError("the search goes on without a copy")

    apis.take = breaking  # type: ignore[method-assign]
    apis._answers[f"DELETE /models/{COPY}/1.0"] = []
    for status in (200,) * (at - 1) + (404, 404, 200):
        apis.answer(f"DELETE /models/{COPY}/1.0", {"code": status, "message": "As it is."}, status)
    monkeypatch.setattr(tune_search, "search", search)

    ran = _tune(apis, body)

    assert ran.status == 1
    assert "broke during POST /models" in ran.err
    assert "marserve unregister" not in ran.err
    assert len(apis.orders("DELETE")) == at + 2


def test_a_copy_whose_load_got_no_answer_is_named_where_it_cannot_be_removed(
    apis: FakeApis, body: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may come later than it is looked for; beside what failed."""
    monkeypatch.setattr(tuned_copy, "LATE_S", 0.3)
    take = apis.take

    def breaking(asked: Asked) -> tuple[int, bytes, str]:
        if asked.path == "/models" and asked.method == "POST":
            raise ConnectionError("broken")
        return take(asked)

    apis.take = breaking  # type: ignore[method-assign]
    apis._answers[f"DELETE /models/{COPY}/1.0"] = []

    ran = _tune(apis, body)

    assert ran.status == 1
    assert "broke during POST /models" in ran.err
    assert f"{COPY} 1.0 may be there or still come; `marserve unregister {COPY}` removes it." in ran.err


def _registrations(apis: FakeApis) -> list[Asked]:
    return [asked for asked in apis.orders("POST") if asked.path == "/models"]


def test_a_removal_that_takes_too_long_is_given_up_with_the_copys_name(
    apis: FakeApis, body: Path, found: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a command that is to end would not."""
    monkeypatch.setattr(tuned_copy, "REMOVE_S", 0.3)
    found([(BETTER, 300.0)])
    take, is_over = apis.take, threading.Event()

    def waiting(asked: Asked) -> tuple[int, bytes, str]:
        if asked.method == "DELETE":
            is_over.wait(30)
        return take(asked)

    apis.take = waiting  # type: ignore[method-assign]

    ran = _tune(apis, body)
    is_over.set()

    assert f"{COPY} 1.0 is still there; `marserve unregister {COPY}` removes it." in ran.out


def test_a_copy_that_cannot_be_removed_is_named(apis: FakeApis, body: Path, found: Callable[..., None]) -> None:
    """With the command that removes it."""
    found([(BETTER, 300.0)])
    apis._answers[f"DELETE /models/{COPY}/1.0"] = []
    apis.answer(f"DELETE /models/{COPY}/1.0", {"code": 500, "message": "Oh."}, 500)

    ran = _tune(apis, body)

    assert f"`marserve unregister {COPY}` removes it" in ran.out


def test_on_live_the_version_itself_is_loaded_and_set_back(
    apis: FakeApis, body: Path, found: Callable[..., None]
) -> None:
    """Nothing is registered."""
    apis._answers["GET /models/digits"] = []
    apis.answer("GET /models/digits", [{**NOW, "minWorkers": 1, "maxWorkers": 3}])
    found([(BETTER, 300.0)])

    ran = _tune(apis, body, "--on-live")

    assert ran.status == 0, ran.err
    assert [asked.path for asked in apis.orders("POST") if asked.path == "/models"] == []
    assert apis.orders("DELETE") == []
    assert apis.orders("PUT")[-1].parameters == {
        "batch_size": "4",
        "max_batch_delay": "100",
        "min_worker": "1",
        "max_worker": "3",
        "synchronous": "true",
    }


def test_a_layout_that_the_server_refuses_is_left_out(
    apis: FakeApis, body: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as for memory: the true search goes on with the others, and says so."""
    monkeypatch.setattr(tune_space, "BATCH_SIZES", (1, 8))
    take = apis.take

    def full(asked: Asked) -> tuple[int, bytes, str]:
        answer = take(asked)
        if asked.parameters.get("min_worker") == "2":
            return 507, b'{"code": 507, "message": "There is no memory for 2 workers."}', "application/json"
        return answer

    apis.take = full  # type: ignore[method-assign]
    words: tuple[Any, ...] = (
        "tune",
        "digits",
        "--goal",
        "rate",
        "--inputs",
        body,
        "--workers",
        "1,2",
        "--threads",
        "1",
        "--for",
        "30s",
    )

    ran = marserve(*words, "--management", apis.url, "--inference", apis.url)

    assert ran.status == 0, ran.err
    assert "settings of 1 layouts simulated" in ran.out
    assert "note: 1.0, 2 workers of 1 thread: There is no memory for 2 workers." in ran.out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--goal", "p99"], "--goal is 'p99'; it is rate"),
        (["--goal", "rate", "--for", "soon"], "--for is 'soon', which is no time"),
        (["--goal", "rate", "--for", "1s"], "--for is '1s', which is too short: 10 s are the least"),
        (["--goal", "rate", "--workers", "1,many"], "--workers is '1,many'; it is numbers"),
        (["--goal", "rate", "--threads", "0"], "--threads is '0'; it is numbers"),
        (["--goal", "rate", "--threads", "2", "--apply"], "--threads and --apply exclude each other"),
        (["--goal", "rate", "--threads", "2", "--on-live"], "--threads and --on-live exclude each other"),
        (["--goal", "rate", "--model-config", "nothing.yaml"], "nothing.yaml cannot be read: No such file"),
        (["--goal", "rate", "--on-live", "--candidate", "2.0"], "--candidate and --on-live exclude each other"),
        (["--goal", "rate", "--batch-size", "8"], "--goal finds what the other options set"),
        (["--goal", "rate", "--dry-run"], "it changes nothing without --apply"),
        (["--apply"], "--apply is for a search"),
        (["--for", "5m"], "--for is for a search"),
    ],
)
def test_words_that_cannot_be_meant_are_refused_before_anything_is_asked(
    apis: FakeApis, body: Path, words: list[str], said: str
) -> None:
    """What was wrong, and the value."""
    inputs = [] if "--inputs" in words or "--goal" not in words else ["--inputs", str(body)]
    ran = marserve("tune", "digits", *words, *inputs, "--management", apis.url, "--inference", apis.url)

    assert ran.status == 2
    assert said in ran.err
    assert [asked.method for asked in apis.asked if asked.method != "GET"] == []


def test_an_optimised_version_is_a_candidate_and_takes_over_by_a_rollout(
    apis: FakeApis, body: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is loaded in the place of the other's copy, so that one is there at a time."""
    optimised = description(version="1.0-optimised", modelUrl="digits-optimised.mar", batchSize=4, maxBatchDelay=100)
    apis._answers["GET /models/digits/all"] = []
    apis.answer("GET /models/digits/all", [NOW, optimised, description(version="0.9")])
    apis.answer(f"DELETE /models/{COPY}/1.0-optimised", {"status": "unregistered"})
    apis.answer(f"PUT /models/{COPY}/1.0-optimised", {"status": "tuned"})
    apis.answer(f"POST /predictions/{COPY}/1.0-optimised", [1])
    chosen = Setting(Layout(1, "1.0-optimised"), 8, 0.0)

    def search(settings: Sequence[Setting], goal: Goal, trials: Trials, *, present: Setting, **more: Any) -> Found:
        for layout in dict.fromkeys(setting.layout for setting in settings):
            assert trials.batch_s(layout, 8, 3)
        now = Row(present, 100.0, 100.0)
        return Found([Row(chosen, 400.0, 400.0), now], {}, now)

    monkeypatch.setattr(tune_search, "search", search)

    ran = _tune(apis, body, "--apply", "--workers", "1")

    assert ran.status == 0, ran.err
    changes = [asked for asked in apis.asked if asked.method in ("POST", "DELETE") and "/predictions" not in asked.path]
    assert [(asked.method, asked.parameters.get("model_version") or asked.path) for asked in changes] == [
        ("POST", "1.0"),
        ("DELETE", f"/models/{COPY}/1.0"),
        ("POST", "1.0-optimised"),
        ("DELETE", f"/models/{COPY}/1.0-optimised"),
    ]
    assert "Not applied: it is version 1.0-optimised; let it take over with `marserve rollout" in ran.out


def test_another_version_that_is_best_is_told_with_the_roll_out_that_lets_it_take_over(
    apis: FakeApis, body: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To pack the tuned one anew with these options would bring nothing."""
    chosen = Row(Setting(Layout(1, "1.0-optimised"), 8, 0.0), 400.0, 400.0)

    def search(settings: Sequence[Setting], goal: Goal, trials: Trials, *, present: Setting, **more: Any) -> Found:
        now = Row(present, 100.0, 100.0)
        return Found([chosen, now], {}, now)

    monkeypatch.setattr(tune_search, "search", search)

    ran = _tune(apis, body)

    assert ran.status == 0, ran.err
    assert "the best is version 1.0-optimised" in ran.out
    assert "`marserve rollout digits 1.0-optimised` lets it take over" in ran.out


def test_each_number_of_threads_is_a_copy_of_its_own(
    apis: FakeApis, body: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are tried as far as this machine has processors, each with the numbers of workers that leave it any."""
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: range(4))
    seen: list[Layout] = []

    def search(settings: Sequence[Setting], goal: Goal, trials: Trials, *, present: Setting, **more: Any) -> Found:
        seen.extend(dict.fromkeys(setting.layout for setting in settings))
        for layout in (Layout(1, "1.0", 2), Layout(2, "1.0", 2), Layout(1, "1.0", 4)):
            assert trials.measure(Setting(layout, 4, 0.0), 500.0, 5).rate > 0
        now = Row(present, 100.0, 100.0)
        return Found([Row(Setting(Layout(1, "1.0", 4), 4, 0.0), 300.0, 300.0), now], {}, now)

    monkeypatch.setattr(tune_search, "search", search)

    ran = _tune(apis, body)

    assert [(layout.workers, layout.threads) for layout in seen] == [
        (1, 1),
        (1, 2),
        (1, 4),
        (2, 1),
        (2, 2),
        (4, 1),
    ]
    copies = [asked.parameters["threads"] for asked in apis.orders("POST") if asked.path == "/models"]
    assert copies == ["1", "2", "4"]
    assert len(apis.orders("DELETE")) == 3
    assert "+threads: {intra: 4}" in ran.out
    assert "threads and padding come with the archive" in ran.out


@pytest.mark.parametrize(
    ("described", "flags", "said"),
    [
        ({}, ["--apply"], "--apply changes what serves"),
        ({}, ["--on-live"], "--on-live changes what serves"),
        ({"threadsPerWorker": 0}, [], "the server does not say how many"),
        ({"workerProgram": ["node", "w.mjs"]}, [], "programs in another language"),
        ({"parallelType": "tp", "parallelLevel": 2}, [], "groups of processes"),
        ({"workers": [{"id": "1", "node": "far"}]}, [], "on other machines"),
        ({"deviceType": "gpu"}, [], "--threads names numbers to try all the same"),
    ],
)
def test_where_threads_cannot_be_tried_a_note_says_why(
    apis: FakeApis, body: Path, found: Callable[..., None], described: dict[str, Any], flags: list[str], said: str
) -> None:
    """All else is."""
    apis._answers["GET /models/digits"] = []
    apis.answer("GET /models/digits", [{**NOW, **described}])
    found([])

    ran = _tune(apis, body, *flags)

    assert ran.status == 0, ran.err
    assert "note: Threads are not searched: " in ran.out
    assert said in ran.out
    assert len([asked for asked in apis.orders("POST") if asked.path == "/models"]) <= 1


def test_a_server_that_dies_fails_the_search_and_says_what_may_be_left(
    apis: FakeApis, body: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not taken for a layout that was refused."""
    take = apis.take

    def dying(asked: Asked) -> tuple[int, bytes, str]:
        if asked.method == "PUT" or (asked.method == "DELETE" and asked.path.startswith("/models")):
            raise ConnectionError("dead")
        return take(asked)

    apis.take = dying  # type: ignore[method-assign]

    ran = _tune(apis, body)

    assert ran.status == 1
    assert "broke" in ran.err
    assert f"{COPY} 1.0 is still there; `marserve unregister {COPY}` removes it." in ran.err


def test_full_batches_are_asked_for_by_no_more_clients_than_the_queue_takes() -> None:
    """Else the first ones leave in small batches, and others are refused before any is full."""
    copy = TunedCopy(None, NOW, Layout(1), None, [], Goal(), 1.0, print)  # type: ignore[arg-type]

    assert copy._filling(Setting(Layout(2), 8, 0.0)).clients == 32
    assert copy._filling(Setting(Layout(2), 32, 0.0)).clients == 100
    assert copy._filling(Setting(Layout(4), 32, 0.0)).clients == 128
    assert copy._filling(Setting(Layout(64), 32, 0.0)).clients == 1024


GOAL_POLICY = {"latencyGoalMs": 200.0, "lengthFrom": "body_bytes", "paddingBudget": 0.25, "costs": []}


def test_where_a_policy_finds_the_sizes_of_batches_the_padding_is_tuned(
    apis: FakeApis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Costs are those that the version has learned by itself, under loads of several widths; no delay is set."""
    (inputs := tmp_path / "texts").mkdir()
    for length in (10, 1000):
        (inputs / f"{length}.txt").write_text("x" * length)
    costs = [{"lengthUpTo": 15, "bySize": {"1": 4.0}}, {"lengthUpTo": 1023, "bySize": {"1": 5.0, "8": 40.0}}]
    now = {**NOW, "batchSize": 64, "goal": {**GOAL_POLICY, "costs": costs}}
    apis._answers["GET /models/digits"] = []
    apis.answer("GET /models/digits", [now])
    apis.answer(f"GET /models/{COPY}/1.0", [now])
    seen: list[Any] = []

    def search(settings: Sequence[Setting], goal: Goal, trials: Trials, *, present: Setting, batching: Any) -> Found:
        seen.extend([settings, present, batching])
        assert trials.seen_costs(present.layout) == [(15, 1, 0.004), (1023, 1, 0.005), (1023, 8, 0.04)]
        better = replace(present, layout=replace(present.layout, padding=0.1), batch_size=32)
        assert trials.measure(better, 500.0, 5).rate > 0
        row = Row(present, 100.0, 100.0)
        return Found([Row(better, 300.0, 300.0), row], {}, row)

    monkeypatch.setattr(tune_search, "search", search)

    ran = _tune(apis, inputs, "--workers", "1", "--threads", "1")

    assert ran.status == 0, ran.err
    settings, present, batching = seen
    assert {setting.layout.padding for setting in settings} == {0.1, 0.25, 0.5, 0.75}
    assert {setting.batch_size for setting in settings} == {8, 32, 64}
    assert present == Setting(Layout(1, "1.0", 1, 0.25), 64, -1.0)
    assert (batching.goal_s, batching.length_from) == (0.2, "body_bytes")
    assert [len(request.parts[0].body) for request in batching.requests] == [10, 1000]
    copies = [asked.parameters["padding_budget"] for asked in apis.orders("POST") if asked.path == "/models"]
    assert copies == ["0.25", "0.1"]
    assert all("max_batch_delay" not in asked.parameters for asked in apis.orders("PUT"))
    assert "-paddingBudget: 0.25\n" in ran.out
    assert "+paddingBudget: 0.1\n" in ran.out
    assert "maxBatchDelay" not in ran.out


@pytest.mark.parametrize(
    ("goal", "flags", "said"),
    [
        ({"lengthFrom": None}, [], "no lengthFrom of its configuration says how long inputs are"),
        ({"lengthFrom": "handler"}, [], "or only its handler knows"),
        ({"lengthFrom": "header:X-Tokens"}, [], "lengths are in the header X-Tokens, which these requests do not have"),
        ({}, ["--apply"], "it comes with the archive, which --apply and --on-live leave as it is"),
        ({}, [], "all inputs are of about one length (3 to 3); --inputs names others"),
    ],
)
def test_where_padding_cannot_be_tried_a_note_says_why(
    apis: FakeApis, body: Path, found: Callable[..., None], goal: dict[str, Any], flags: list[str], said: str
) -> None:
    """All else is."""
    apis._answers["GET /models/digits"] = []
    apis.answer("GET /models/digits", [{**NOW, "goal": {**GOAL_POLICY, **goal}}])
    found([])

    ran = _tune(apis, body, *flags)

    assert ran.status == 0, ran.err
    assert "note: The padding of batches is not searched: " in ran.out
    assert said in ran.out


def test_traffic_beside_the_search_is_a_note(apis: FakeApis, body: Path, found: Callable[..., None]) -> None:
    """The figures are those of a machine that had it, too."""
    apis._answers["GET /models/digits"] = []
    apis.answer("GET /models/digits", [{**NOW, "lastMinute": {"requestsPerSecond": 12.5}}])
    found([(BETTER, 300.0)])

    assert "note: Clients sent 12.5 requests a second before" in _tune(apis, body).out
    apis.answer("GET /models/digits", [{**NOW, "lastMinute": {"requestsPerSecond": 0.017}}])
    apis.answer("GET /models/digits", [{**NOW, "lastMinute": {"requestsPerSecond": 0.017}}])
    _tune(apis, body)
    assert "Clients sent" not in _tune(apis, body).out


def test_a_candidate_that_is_no_version_says_how_an_archive_becomes_one(apis: FakeApis, body: Path) -> None:
    """Nothing is loaded."""
    ran = _tune(apis, body, "--candidate", "digits-optimised.mar")

    assert ran.status == 1
    assert "`marserve register ARCHIVE` makes an archive one" in ran.err
    assert [asked.path for asked in apis.orders("POST")] == []


def test_an_unknown_model_is_an_error_before_anything_is_loaded(apis: FakeApis, body: Path) -> None:
    """In the server's words."""
    ran = marserve(
        "tune", "digit", "--goal", "rate", "--inputs", body, "--management", apis.url, "--inference", apis.url
    )

    assert ran.status == 1
    assert "/models/digit" in ran.err
    assert apis.orders("POST") == []
