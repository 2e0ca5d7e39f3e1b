"""`marserve run` as a person uses it: a file that answers, changes that are taken, Ctrl-C, and nothing left."""

from __future__ import annotations

import json
import os
import re
import select
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import httpx
import pytest

from marserve.cli.local.templates import TEMPLATES
from support.lit_api import write_litserve
from support.local_run import LIMIT_S, Run
from support.server import poll


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a model of two classes and a file that it reads."""
    made = tmp_path / "here"
    made.mkdir()
    (made / "word.txt").write_text("quiet")
    (made / "shout.py").write_text(
        "class Net:\n"
        "    def __call__(self, text):\n"
        "        return text.upper()\n\n"
        "class Shout:\n"
        "    def initialize(self, context):\n"
        "        self.net, self.word = Net(), open('word.txt').read()\n\n"
        "    def handle(self, data, context):\n"
        "        return [self.net(bytes(row['body']).decode() + self.word) for row in data]\n"
    )
    return made


def test_a_file_answers_in_one_command_and_leaves_nothing(folder: Path) -> None:
    """Its class names the model; the folder stays as it was; Ctrl-C is status 130."""
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with Run(folder, "shout.py") as run:
        assert run.url.endswith("/predictions/shout")

        answer = httpx.post(run.url, content=b"be ")
        status = run.interrupt()

    assert answer.text == "BE QUIET"
    assert status == 130, run.lines
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert not list(run.temporary.iterdir())


LITSERVE = """
import litserve as ls

class Square(ls.LitAPI):
    def setup(self, device):
        self.model = lambda x: x**2

    def decode_request(self, request):
        return request["input"]

    def predict(self, x):
        return self.model(x)

    def encode_response(self, output):
        return {"output": output}

if __name__ == "__main__":
    ls.LitServer(Square()).run(port=8000)
"""
FAULTY = """
from marserve_handlers import BadInput

def handle(data, context):
    said = [bytes(row["body"]).decode() for row in data or []]
    if "raise" in said:
        raise ValueError("on purpose")
    return [BadInput("expected no mistake") if each == "mistake" else each for each in said]
"""


def test_a_failed_request_names_the_authors_own_file_and_a_clients_mistake_is_a_line(tmp_path: Path) -> None:
    """In the answer, and in the logs that are asked for; a wrong path is answered with the right one."""
    here = tmp_path / "here"
    here.mkdir()
    (here / "faulty.py").write_text(FAULTY)
    with Run(here, "faulty.py", "--name", "faulty", "--verbose") as run:
        base = run.url.partition("/predictions")[0]
        failed, mistaken, lost = (
            httpx.post(run.url, content=b"raise"),
            httpx.post(run.url, content=b"mistake"),
            httpx.post(f"{base}/predict", content=b"fine"),
        )
        run.wait_for("expected no mistake")
        for _ in poll(10, "the end of the traceback in the log"):
            logged = httpx.get(f"{base}/logs", params={"request": failed.headers["x-request-id"]}).text
            if "ValueError: on purpose" in logged:
                break
        run.interrupt()

    at = f'File "{here}/faulty.py", line 7, in handle'
    assert failed.status_code == 500
    assert f"  {at}" in failed.json()["exception"]["traceback"]
    assert json.dumps(at)[1:-1] in logged
    assert any(at in line for line in run.lines)
    assert str(run.temporary) not in failed.text + logged + "".join(run.lines)
    assert mistaken.status_code == 400
    about = [line for line in run.lines if mistaken.headers["x-request-id"] in line or "expected no" in line]
    assert about == [f"Request {mistaken.headers['x-request-id']}: expected no mistake"]
    assert lost.json()["message"].startswith("There is no route /predict here; did you mean /predictions/faulty?")


WORDS = """
from collections.abc import Iterator
from marserve_handlers import Event, model

@model
def words(text: str) -> Iterator[Event]:
    yield Event("one")
    raise ValueError("on purpose")
"""


def test_a_stream_that_fails_names_the_authors_own_file_in_its_last_event(tmp_path: Path) -> None:
    """Its data is a body's: `exception` is for clients of this machine."""
    here = tmp_path / "here"
    here.mkdir()
    (here / "words.py").write_text(WORDS)
    with Run(here, "words.py") as run:
        headers = {"accept": "text/event-stream", "content-type": "text/plain"}
        answer = httpx.post(run.url, content=b"go", headers=headers)
        run.interrupt()

    first, last = answer.text.removesuffix("\n\n").split("\n\n")
    name, data = last.split("\n")
    said = json.loads(data.removeprefix("data: "))
    assert (answer.status_code, first, name) == (200, "data: one", "event: error")
    assert (said["code"], said["message"]) == (500, "Prediction failed")
    assert (said["exception"]["type"], said["exception"]["message"]) == ("ValueError", "on purpose")
    assert f'  File "{here}/words.py", line 8, in words' in said["exception"]["traceback"]
    assert str(run.temporary) not in answer.text


@pytest.mark.system
def test_a_file_of_litserve_answers_at_its_own_route_and_at_ours(tmp_path: Path) -> None:
    """The line that is shown asks its own."""
    here = tmp_path / "here"
    here.mkdir()
    write_litserve(tmp_path)
    (here / "server.py").write_text(LITSERVE)
    with Run(here, "server.py", "--name", "square", PYTHONPATH=str(tmp_path)) as run:
        own = run.wait_for(r"(http://\S+/predict)$")[1]
        base = own.removesuffix("/predict")
        answers = [httpx.post(url, json={"input": 3}) for url in (own, f"{base}/predictions/square")]
        run.interrupt()

    assert [(each.status_code, each.json()) for each in answers] == [(200, {"output": 9})] * 2


@pytest.mark.system
def test_a_file_that_fails_at_its_import_is_one_sentence_and_status_2(folder: Path) -> None:
    """Though only its worker imports it; `--verbose` has the traceback."""
    (folder / "shout.py").write_text("import sys\n\nsys.exit(3)\n" + (folder / "shout.py").read_text())

    with Run(folder, "shout.py") as run:
        status = run.process.wait(LIMIT_S)

    assert status == 2, run.lines
    assert run.lines[0] == "marserve: shout.py, line 3: it ends the process while it is imported (SystemExit: 3)."
    assert "Traceback" not in "".join(run.lines)


@pytest.mark.system
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 0), (signal.SIGKILL, -9)])
def test_a_signal_ends_an_import_that_does_not_end(tmp_path: Path, number: int, status: int) -> None:
    """Its process goes with the command; unless that is killed, nothing is left in the temporary folder."""
    here, gate = tmp_path / "here", tmp_path / "gate"
    here.mkdir()
    os.mkfifo(gate)
    (here / "up.py").write_text(
        "from marserve_handlers import model\n\n@model\ndef up(text: str) -> str: ...\n\n"
        f"print(open({str(gate)!r}).read())\n"
    )

    with Run(here, "up.py") as run, gate.open("wb", buffering=0) as opened:  # opens when the import reads
        run.process.send_signal(number)
        ended = run.process.wait(LIMIT_S)
        broken = select.poll()
        broken.register(opened, select.POLLERR)

        assert broken.poll(LIMIT_S * 1000)  # the import's process has gone

    # Python itself may end by SIGINT; to a shell both are 130.
    assert ended in (status, -2 if number == signal.SIGINT else status)
    assert number == signal.SIGKILL or not list(run.temporary.iterdir())


DIGITS = """
from marserve_handlers import Tensor, model

@model(inputs={"pixels": Tensor("float32", ["batch", 4])}, outputs={"scores": Tensor("float32", ["batch", 4])})
class Digits:
    def predict(self, pixels):
        return {"scores": pixels / 3}
"""


@pytest.mark.system
def test_what_is_run_answers_as_its_archive_byte_for_byte(tmp_path: Path) -> None:
    """What fits and what does not; both declare the same before they are asked."""
    here = tmp_path / "here"
    here.mkdir()
    (here / "digits.py").write_text(DIGITS)
    packed = [sys.executable, "-m", "marserve.cli", "archive", "digits.py:Digits"]
    subprocess.run(packed, cwd=here, check=True, capture_output=True)
    json_type = {"content-type": "application/json"}
    requests: list[tuple[bytes, dict[str, str]]] = [
        (b'{"pixels": [1, 2, 3, 4]}', json_type),
        (b'{"pixels": [[1, 2, 3, 4], [5, 6, 7, 8]]}', json_type),
        (b'{"pixels": [1, 2, 3]}', json_type),
        (b'{"pixel": [1, 2, 3, 4]}', json_type),
        (b'{"pixels": ', json_type),
        (b"\x00\x01", {"content-type": "image/png"}),
        (b"[1, 2, 3, 4]", {}),
    ]

    def answers(source: str) -> list[tuple[int, str, bytes, object]]:
        with Run(here, source) as run, httpx.Client() as client:
            base = run.url.partition("/predictions")[0]
            declared = client.get(f"{base}/models/digits").json()[0]["declaration"]
            asked = [client.post(run.url, content=body, headers=headers) for body, headers in requests]
            run.interrupt()
        return [(one.status_code, one.headers.get("content-type", ""), one.content, declared) for one in asked]

    of_source = answers("digits.py:Digits")

    assert of_source == answers("digits.mar")
    assert [status for status, *_ in of_source[:4]] == [200, 200, 400, 400]


@pytest.mark.system
def test_changes_are_taken_without_a_lost_request(folder: Path) -> None:
    """Ten saves a second; a syntax error, a deleted file and a model that cannot load keep the one before."""
    text = (folder / "shout.py").read_text()
    answers: Counter[tuple[int, str]] = Counter()
    with Run(folder, "shout.py", "--reload") as run, httpx.Client() as client:
        url, stop = run.url, threading.Event()

        def ask() -> None:
            while not stop.is_set():
                got = client.post(url, content=b"")
                answers[got.status_code, got.text] += 1

        asking = [threading.Thread(target=ask) for _ in range(3)]
        for thread in asking:
            thread.start()

        def save(new: str | None, shown: str) -> None:
            since = len(run.lines)
            if new is None:
                (folder / "shout.py").unlink()
            else:
                (folder / "shout.py").write_text(new)
            run.wait_for(shown, since)

        save(text.replace(".upper()", ".title()"), "the new one answers")
        assert client.post(url, content=b"").text == "Quiet"
        save("class Shout:\n    def handle(", r"shout\.py, line 2: ")
        save(None, "shout.py is gone")
        save(text.replace("self.net, self.word", "raise RuntimeError('no net')#"), "RuntimeError: no net")
        assert client.post(url, content=b"").text == "Quiet"
        since = len(run.lines)
        for number in range(10):
            (folder / "shout.py").write_text(text.replace(".upper()", f".upper() + '{number}'"))
            time.sleep(0.1)  # ten saves a second is the claim
        run.wait_for("the new one answers", since)
        end = time.monotonic() + LIMIT_S
        while client.post(url, content=b"").text != "QUIET9":
            assert time.monotonic() < end, run.lines
        stop.set()
        for thread in asking:
            thread.join(LIMIT_S)
        status = run.interrupt()

    assert status == 130
    assert {code for code, _ in answers} == {200}, answers
    assert {text for _, text in answers} <= {"QUIET", "Quiet", *(f"QUIET{number}" for number in range(10))}
    assert not list(run.temporary.iterdir())


@pytest.mark.system
@pytest.mark.parametrize("template", TEMPLATES)
def test_what_is_new_answers_the_line_that_is_shown(tmp_path: Path, template: str) -> None:
    """Each template, served and asked as its author would."""
    if template == "onnx":
        pytest.importorskip("onnxruntime", reason="the extra onnx is not installed")
    here = tmp_path / "here"
    here.mkdir()
    made = [sys.executable, "-m", "marserve.cli", "new", "mine", "--template", template]
    subprocess.run(made, cwd=here, check=True, capture_output=True)
    with Run(here, "mine") as run:
        line = run.wait_for(r"(curl .*)$")[1]
        asked = subprocess.run(
            ["bash", "-c", f"{line} -s -f"], cwd=here, capture_output=True, timeout=LIMIT_S, check=False
        )
        run.interrupt()

    assert asked.returncode == 0, run.lines
    assert asked.stdout


@pytest.mark.system
def test_the_model_on_the_first_screen_of_the_readme_answers(tmp_path: Path) -> None:
    """As it stands there, in one command."""
    readme = (Path(__file__).parents[2] / "README.md").read_text("utf-8")
    block = re.search(r"(?:^    .*\n|^\n(?=    ))+", readme[readme.index("    # digits.py") :], re.MULTILINE)
    assert block is not None
    here = tmp_path / "here"
    here.mkdir()
    (here / "digits.py").write_text(re.sub(r"^    ", "", block[0], flags=re.MULTILINE))

    with Run(here, "digits.py") as run:
        answer = httpx.post(run.url, json={"pixels": [1, 2, 3, 4]})
        run.interrupt()

    assert answer.json() == {"scores": [2.0, 4.0, 6.0, 8.0]}
