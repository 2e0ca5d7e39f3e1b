"""`marserve_client` and a real server: with keys, tensors, streams that end early, deadlines, full queues, managing."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import marserve.client
from marserve_client import (
    BadInput,
    Client,
    Conflict,
    ConnectionLost,
    DeadlinePassed,
    Forbidden,
    NotFound,
    Overloaded,
    ServerFailed,
    WrongKey,
    key_file,
)
from support.both_clients import Asking, Clients
from support.pages import block
from support.server import Server, make_archive, poll

ODD = """
import os, time
from marserve_handlers import model

@model
def odd(text: str) -> dict:
    word, _, value = text.partition(" ")
    if word == "sleep":
        time.sleep(float(value))
    if word == "raise":
        raise ValueError("no luck")
    return {"said": text}
"""
PIECES = """
import os, time
from collections.abc import Iterator
from marserve_handlers import Event, model

@model
def pieces(text: str) -> Iterator[Event]:
    word, _, value = text.partition(" ")
    try:
        yield Event("one")
        if word == "raise":
            raise ValueError("no luck")
        if word == "die":
            os.kill(os.getpid(), 9)
        while word == "endless":
            time.sleep(0.01)
            yield Event("more")
    finally:
        if value:
            open(value, "w").close()
"""
TENSORS = """
from marserve_handlers import Tensor, model

KINDS = {"half": "float16", "brain": "bfloat16", "whole": "int64", "flag": "bool"}
NAMED = {name: Tensor(kind, ["batch", "n"]) for name, kind in KINDS.items()}

@model(inputs=NAMED, outputs=NAMED)
class Tensors:
    def predict(self, half, brain, whole, flag):
        return {"half": half, "brain": brain, "whole": whole, "flag": flag}
"""
MODELS = {"odd": ODD, "pieces": PIECES, "tensors": TENSORS, "sums": block("docs/declared-handlers.md", "sums")}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One server for the file, which asks for keys and shows what handlers raise."""
    folder = tmp_path_factory.mktemp("client")
    store = folder / "store"
    store.mkdir()
    for name, text in MODELS.items():
        config = "minWorkers: 1\nmaxWorkers: 1\n" + ("jobQueueSize: 1\n" if name == "odd" else "")
        make_archive(store / f"{name}.mar", text, config=config)
    settings = {
        "load_models": "none",
        "disable_token_authorization": "false",
        "expose_errors": "traceback",
        "allow_uploads": "true",
    }
    with Server(folder, entry="marserve", store=store, settings=settings) as server:
        with Client(management=server.management, key=key_file(folder / "key_file.json")) as client:
            for name in MODELS:
                client.register(f"{name}.mar")
        yield server


@pytest.fixture
def client(server: Server, clients: Clients) -> Asking:
    """A client of it with its keys."""
    return clients(server.inference, server.management, key=key_file(server.folder / "key_file.json"))


@pytest.fixture(params=["sync", "async"])
def clients(request: pytest.FixtureRequest) -> Iterator[Clients]:
    """Makes clients of both kinds, in turn."""
    made = Clients(request.param)
    yield made
    made.close()


def test_a_wrong_key_and_none_are_told_apart_from_other_refusals(server: Server, clients: Clients) -> None:
    """401, 403, for both APIs; nothing is said of models."""
    wrong, none = clients(server.inference, server.management, key="wrong"), clients(server.inference)
    with pytest.raises(WrongKey) as refused:
        none.predict("odd", "x")
    with pytest.raises(WrongKey):
        wrong.models()
    with pytest.raises(WrongKey):
        wrong.infer("sums", {"pair": [[1, 2]]})

    assert refused.value.status == 401
    assert refused.value.request_id
    assert none.is_alive()  # needs no key


def test_tensors_go_and_come(client: Asking) -> None:
    """Of several types in one request; what does not fit names the tensor."""
    sent = {
        "half": np.array([[0.5, -2]], "float16"),
        "brain": np.array([[0x3FC0, 0xC000]], "uint16"),
        "whole": np.array([[1, -(1 << 40)]]),
        "flag": np.array([[True, False]]),
    }

    came = client.infer("tensors", sent, datatypes={"brain": "BF16"})

    assert came.datatypes == {"half": "FP16", "brain": "BF16", "whole": "INT64", "flag": "BOOL"}
    assert {name: array.tolist() for name, array in came.items()} == {
        name: each.tolist() for name, each in sent.items()
    }
    assert client.infer("sums", {"pair": [[1, 2], [3, 4.5]]})["sum"].tolist() == [3, 7.5]
    with pytest.raises(BadInput) as wrong:
        client.infer("sums", {"pair": np.ones((1, 3), "float32")})
    assert (wrong.value.field, wrong.value.status) == ("pair", 400)
    with pytest.raises(NotFound, match=r"it has 1\.0"):
        client.infer("sums", {"pair": [[1, 2]]}, version="7")


@pytest.mark.torch
def test_tensors_of_torch_go_and_come(client: Asking) -> None:
    """bfloat16 and float16 as they are."""
    import torch

    sent = {"half": torch.tensor([[0.5]], dtype=torch.float16), "brain": torch.tensor([[1.5]], dtype=torch.bfloat16)}
    rest = {"whole": torch.tensor([[1]]), "flag": torch.tensor([[True]])}

    came = client.infer("tensors", {**sent, **rest})

    assert all(torch.equal(came.torch(name), tensor) for name, tensor in {**sent, **rest}.items())


def test_a_handlers_exception_comes_with_its_traceback(client: Asking) -> None:
    """As `expose_errors` lets it; the request's id leads to the log."""
    with pytest.raises(ServerFailed) as failed:
        client.predict("odd", "raise")

    assert failed.value.exception is not None
    assert failed.value.exception[:2] == ("ValueError", "no luck")
    assert any("no luck" in line for line in failed.value.exception.traceback)
    assert failed.value.request_id


def test_a_generators_exception_comes_with_its_traceback_in_the_last_event(client: Asking) -> None:
    """Behind the events that came before."""
    with pytest.raises(ServerFailed) as failed:
        client.items("events", "pieces", "raise")

    assert [event.data for event in failed.value.came] == ["one"]  # type: ignore[attr-defined]
    assert failed.value.exception is not None
    assert failed.value.exception[:2] == ("ValueError", "no luck")
    assert any("in pieces" in line for line in failed.value.exception.traceback)


def test_the_server_ends_what_comes_too_late(client: Asking) -> None:
    """Its 504 arrives, with the request's id, and the client has not given up before."""
    with pytest.raises(DeadlinePassed) as late:
        client.predict("odd", "sleep 1", timeout=0.3)

    assert late.value.status == 504
    assert late.value.request_id
    assert client.predict("odd", "quick").json() == {"said": "quick"}


def test_a_full_queue_is_waited_for(server: Server) -> None:
    """Requests that it refuses come again when it says, and all are answered."""
    tries: list[int] = []
    came: list[Any] = []
    with Client(
        server.inference,
        key=key_file(server.folder / "key_file.json"),
        before=lambda sending: tries.append(sending.number),
    ) as many:
        threads = [
            threading.Thread(target=lambda: came.append(many.predict("odd", "sleep 0.3").json())) for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)

    assert came == [{"said": "sleep 0.3"}] * 4
    assert max(tries) > 1


def test_a_stream_that_is_closed_ends_in_the_handler(client: Asking, tmp_path: Path) -> None:
    """Its `finally` runs: no worker works for one that has gone."""
    mark = tmp_path / "ended"

    came = client.items("events", "pieces", f"endless {mark}", most=3)

    assert [event.data for event in came] == ["one", "more", "more"]
    for _ in poll(20, "the handler's generator is closed"):
        if mark.exists():
            break


def test_a_worker_that_dies_breaks_its_stream_off(client: Asking) -> None:
    """Behind what had come; it is not run again, and the next one is answered."""
    with pytest.raises(ConnectionLost) as lost:
        client.items("stream", "pieces", "die")

    assert lost.value.came == [b"one\n"]  # type: ignore[attr-defined]
    client.wait_until_ready("pieces", timeout=30)
    assert [event.data for event in client.items("events", "pieces", "now")] == ["one"]


def test_models_come_change_and_go(server: Server, client: Asking, tmp_path: Path) -> None:
    """Uploaded, registered, scaled, given weights, rolled out, unregistered; each refusal has its class."""
    for version in ("1.0", "2.0"):
        file = tmp_path / f"more-{version}.mar"
        make_archive(file, block("docs/declared-handlers.md", "sums"), name="more", version=version)
        client.upload(file, replace=True)
        client.register(file.name, initial_workers=1)

    assert client.scale("more", 2, version="1.0")["status"]
    assert [each["modelVersion"] for each in client.describe("more")] == ["1.0", "2.0"]
    assert "more" in client.models()
    assert client.set_traffic("more", {"1.0": 3, "2.0": 1})["weights"] == {"1.0": 3, "2.0": 1}
    with pytest.raises(Conflict):
        client.unregister("more", version="2.0")
    client.reset_traffic("more")
    begun = client.begin_rollout("more", "2.0", hold=60, min_requests=1)
    assert begun.is_begun
    with pytest.raises(Conflict):
        client.begin_rollout("more", "2.0")
    assert client.order_rollout("more", "abort")["state"] == "aborted"
    assert client.rollout("more")["state"] == "aborted"
    assert client.swap("more", "more-1.0.mar", version="1.0")["replacedVersion"] == "1.0"
    client.set_default("more", "2.0")
    with pytest.raises(Forbidden):
        client.unregister("more", version="2.0")
    client.unregister("more", version="1.0")
    client.unregister("more")
    with pytest.raises(NotFound):
        client.describe("more")
    with pytest.raises(NotFound, match="not there"):
        client.register("not there.mar")


def test_a_server_of_torchserves_command_line_is_waited_for(tmp_path: Path) -> None:
    """It speaks no Open Inference: its management address says whether a model answers. A full one says 503 so, too."""
    store = tmp_path / "store"
    store.mkdir()
    make_archive(store / "odd.mar", ODD, config="minWorkers: 1\nmaxWorkers: 1\n")
    ready = threading.Event()
    with Server(tmp_path, store=store) as server, Client(server.inference, server.management) as client:

        def wait() -> None:
            client.wait_until_ready("odd", timeout=60)
            ready.set()

        thread = threading.Thread(target=wait)
        thread.start()
        assert not ready.is_set()
        client.register("odd.mar", initial_workers=1)
        thread.join(60)
        with pytest.raises(Overloaded, match="Prediction failed") as failed:
            client.predict("odd", "raise")

    assert ready.is_set()
    assert failed.value.retry_after_s is None


def test_the_servers_package_shows_the_same_client() -> None:
    """`marserve.client` has all that `marserve_client` shows."""
    import marserve_client

    assert marserve.client.__all__ == marserve_client.__all__
    assert all(getattr(marserve.client, name) is getattr(marserve_client, name) for name in marserve_client.__all__)
