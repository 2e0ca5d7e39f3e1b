"""A real server with models under other interpreters: served beside the server's own, refused, replaced, cut off."""

from __future__ import annotations

import json
import os
import platform
import shutil
import signal
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest

from support.other_python import make_environment, real_environment, real_pythons
from support.processes import until_blocking
from support.server import Server, make_archive

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are told by /proc")

HANDLER = """
import os, sys, time

def handle(data, context):
    if data is None:
        return None
    body = data[0]["body"]
    if body == b"die":
        os._exit(7)
    if body == b"hang":
        time.sleep(60)
    if body == b"fail":
        raise ValueError("a bad picture")
    if body == b"stream":
        from ts.handler_utils.utils import send_intermediate_predict_response
        for piece in ("a", "b"):
            send_intermediate_predict_response([piece], context.request_ids, "ok", 200, context)
    print("answered by", sys.prefix)
    return [{"version": sys.version.split()[0], "prefix": sys.prefix, "rows": len(data)}] * len(data)
"""


def described(server: Server, name: str) -> dict[str, Any]:
    """What describe says of a model."""
    [document] = server.client.get(f"{server.management}/models/{name}").json()
    return dict(document)


def ask(server: Server, name: str, body: bytes = b"x", **headers: str) -> Any:
    """The answer of a model."""
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    return server.client.post(f"{server.inference}/predictions/{name}", content=body, headers=names)


@pytest.mark.system
def test_a_model_under_another_interpreter_is_served_beside_one_under_the_servers(tmp_path: Path) -> None:
    """Its worker dies, and is replaced; after a change of the interpreter none is started, and describe says why."""
    python = make_environment(tmp_path / "e", "msgspec")
    server = Server(tmp_path, settings={"allowed_interpreters": f"old={python}"})
    make_archive(server.store / "own.mar", HANDLER)
    make_archive(server.store / "other.mar", HANDLER, config="environment: old\n")
    make_archive(server.store / "unknown.mar", HANDLER, config="environment: new\n")
    with server:
        for name in ("own", "other"):
            assert server.register(f"{name}.mar").status_code == 200
        refused = server.register("unknown.mar")
        assert (refused.status_code, refused.headers["x-marserve-cause"]) == (400, "interpreter_refused")
        assert f"allowed_interpreters=old={python},new=/path/to/bin/python" in refused.json()["message"]

        assert ask(server, "own").json()["prefix"] == sys.prefix
        answer = ask(server, "other", x_request_id="order-17")
        assert answer.json()["prefix"] == str(tmp_path / "e")
        until_blocking(lambda: f"answered by {tmp_path}/e" in server.output(), "the handler's line in the log")
        shown = {"path": str(python), "version": platform.python_version(), "name": "old"}
        assert described(server, "other")["interpreter"] == shown
        assert "interpreter" not in described(server, "own")

        [links] = server.temporary.glob("marserve-*/interpreters")
        shutil.rmtree(links)  # as what tidies temporary folders does
        assert ask(server, "other", b"die").status_code == 500
        until_blocking(lambda: described(server, "other")["state"] == "ready", "another worker")
        assert ask(server, "other").status_code == 200

        os.utime(tmp_path / "e" / "pyvenv.cfg", ns=(1, 1))
        [worker] = described(server, "other")["workers"]
        os.kill(worker["pid"], signal.SIGKILL)
        until_blocking(
            lambda: "has changed since" in described(server, "other").get("lastDeath", {}).get("detail", ""),
            "the reason of the start that was refused",
        )
        assert ask(server, "other").status_code == 503
        assert ask(server, "own").status_code == 200

        server.client.delete(f"{server.management}/models/other")
        assert server.register("other.mar").status_code == 200
        assert ask(server, "other").status_code == 200


GROUP = """
import os, sys
import torch, torch.distributed as distributed

class Handler:
    def initialize(self, context):
        distributed.init_process_group("gloo")

    def handle(self, data, context):
        if data[0]["body"] == b"die" and os.environ["RANK"] == "1":
            os._exit(3)
        total = torch.ones(1)
        distributed.all_reduce(total)
        return [{"prefix": sys.prefix, "ranks": total.item()}] * len(data)
"""


@pytest.mark.long
@pytest.mark.timeout(180)
def test_ranks_of_a_group_run_under_another_interpreter(tmp_path: Path) -> None:
    """They find each other, and are formed anew when one dies."""
    python = make_environment(tmp_path / "e")
    [site_packages] = (tmp_path / "e").glob("lib/python*/site-packages")
    (site_packages / "tests.pth").write_text(sysconfig.get_path("purelib") + "\n")  # torch, and what it needs
    server = Server(tmp_path, settings={"allowed_interpreters": f"torchy={python}"})
    config = "environment: torchy\nparallelType: tp\ntorchrun:\n  nproc-per-node: 2\n"
    make_archive(server.store / "m.mar", GROUP, config=config)
    with server:
        answer = server.register("m.mar")
        assert answer.status_code == 200, answer.text
        expected = {"prefix": str(tmp_path / "e"), "ranks": 2.0}
        assert ask(server, "m").json() == expected

        ask(server, "m", b"die")
        until_blocking(lambda: ask(server, "m").status_code == 200, "another group", timeout_s=60)
        assert ask(server, "m").json() == expected
        assert "rank 1" in described(server, "m")["lastDeath"]["detail"]


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("python", real_pythons() or [pytest.param("", marks=pytest.mark.skip("no other Python"))])
def test_a_model_runs_under_a_real_interpreter_of_another_version(tmp_path: Path, python: str) -> None:
    """Batches, streams, failures, deadlines, a time limit and a death, as under the server's own."""
    program = real_environment(python, tmp_path / "e")
    if program is None:
        pytest.skip(f"msgspec cannot be installed for {python}")
    server = Server(tmp_path, settings={"allowed_interpreters": str(program)}, entry="marserve")
    config = f"python: {program}\nbatchSize: 4\nmaxBatchDelay: 50\nresponseTimeout: 3\nminWorkers: 2\nmaxWorkers: 2\n"
    make_archive(server.store / "m.mar", HANDLER, config=config)
    with server:
        answer = server.register("m.mar", initial_workers=2)
        assert answer.status_code == 200, answer.text
        answer = ask(server, "m").json()
        assert answer["prefix"] == str(tmp_path / "e")
        assert described(server, "m")["interpreter"]["version"] == answer["version"]
        assert not sys.version.startswith(answer["version"])
        assert ask(server, "m", b"stream").text.startswith("ab")
        assert ask(server, "m", b"fail").status_code == 500
        until_blocking(lambda: "ValueError: a bad picture" in server.output(), "the traceback in the log")
        assert ask(server, "m", b"hang", x_marserve_timeout_ms="500").status_code == 504
        assert ask(server, "m", b"die").status_code == 500
        until_blocking(lambda: described(server, "m")["state"] == "ready", "workers again", timeout_s=60)
        assert ask(server, "m").status_code == 200
        assert json.dumps(described(server, "m")["workers"])
