"""Open Inference over REST: a declared handler that gives its tensor back, beside what an HTTP server alone can do.

Measured: one marserve with one worker, metrics and access log on. All servers stay up and take turns, in another order
each round:

    1 MB, binary           the values behind the JSON, and the answer's likewise, beside the bare ASGI application that
                           echoes the same body: requests a second, with batches of one and of up to 16
    1,000 floats, JSON     beside MLServer and KServe's model server, each with a model that makes an array of a tensor
                           and gives it back by the server's own codec, in one process: MLServer without its processes
                           for models, which would cost it a way there and back. Each is installed into an environment
                           of the run's own, and left out, and said so, where that fails

Read the ratios, never the rates: load generator, server and worker share the cores of one machine.
"""

from __future__ import annotations

import json
import random
import shutil
from collections import defaultdict
from contextlib import ExitStack
from pathlib import Path

from figures import Figure, Goal
from load_generator import Load
from peer_environment import CannotInstall, make_environment
from plan import Plan
from servers import BESIDE, BareAsgi, Marserve, Sample, Server, free_ports, make_archive
from turns import in_turns, rate

NUMBERS = 1 << 18
FLOATS = 1000
MANY, FEW = 64, 16
BATCH, DELAY_MS = 16, 5
PIECES = 4
OF_BARE, TIMES_PEERS = 0.45, 3.0
PATH = "/v2/models/tensors/infer"
PEERS = {"mlserver": "mlserver==1.7.1", "kserve": "kserve==0.21.0"}
NAMES = {"mlserver": "MLServer 1.7.1", "kserve": "KServe 0.21.0"}
INSTALL_LIMIT_S = 600.0
JSON = "application/json"


def measure(plan: Plan) -> list[Figure]:
    """The figures of the protocol. Raises CannotMeasure."""
    binary, of_binary = _binary_body(plan.folder / "tensors-binary")
    floats = _json_body(plan.folder / "tensors-json")
    rates: dict[str, list[float]] = defaultdict(list)
    with ExitStack() as stack:
        servers: dict[str, Server] = {"bare": stack.enter_context(BareAsgi(plan.new_folder("bare")))}
        for name, batch in (("single", 1), ("batched", BATCH)):
            config = {"minWorkers": 1, "maxWorkers": 1, "batchSize": batch, "maxBatchDelay": DELAY_MS}
            archive = make_archive(plan.folder / f"tensors-{name}", "tensors", "tensors.py", config)
            sample = Sample(b'{"x": [1, 2]}', JSON)
            servers[name] = stack.enter_context(Marserve("marserve", archive, plan.new_folder(name), sample=sample))
        for name in PEERS:
            peer = _start_peer(plan, name)
            if peer is not None:
                servers[name] = stack.enter_context(peer)
        for number in range(plan.rounds):
            plan.say(f"open_inference: round {number + 1} of {plan.rounds}")
            of_json = [name for name in servers if name not in ("bare", "batched")]
            for what, names, body, content_type, connections in (
                ("binary", ["bare", "single", "batched"], binary, of_binary, MANY),
                ("json", of_json, floats, JSON, FEW),
            ):

                def run(
                    name: str, body: Path = body, content_type: str = content_type, connections: int = connections
                ) -> Load:
                    server = servers[name]
                    load = plan.generator.run(
                        server.port, "/" if name == "bare" else PATH, body_file=body, content_type=content_type,
                        connections=connections, seconds=0.3 if plan.is_quick else 0.6, warm_up_s=0.1,
                    ).must_be_clean(server.name)  # fmt: skip
                    server.settle()
                    server.forget_output()
                    return load

                for name, loads in in_turns(names, number, PIECES, run).items():
                    rates[f"{name} {what}"].append(rate(loads))
    near, faster = Goal("at least", OF_BARE, "compared"), Goal("at least", TIMES_PEERS, "compared")
    large = f"1 MB tensor, binary, {MANY} connections"
    return [
        Figure(f"{large}, one by one", "/s", rates["single binary"], "bare ASGI", rates["bare binary"], goal=near),
        Figure(f"{large}, batches of up to {BATCH}", "/s", rates["batched binary"], "bare ASGI", rates["bare binary"]),
        *(
            Figure(f"{FLOATS:,} floats, JSON, {FEW} connections", "/s", rates["single json"], NAMES[name],
                   rates[f"{name} json"], goal=faster)
            for name in PEERS if rates[f"{name} json"]
        ),
    ]  # fmt: skip


def _binary_body(file: Path) -> tuple[Path, str]:
    """A request with its values behind the JSON; the load generator has no other place for a header."""
    tensor = {"name": "x", "datatype": "FP32", "shape": [1, NUMBERS], "parameters": {"binary_data_size": 4 * NUMBERS}}
    head = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
    file.write_bytes(head + bytes(4 * NUMBERS))
    return file, f"application/octet-stream\r\nInference-Header-Content-Length: {len(head)}"


def _json_body(file: Path) -> Path:
    drawn = random.Random(1)
    data = [round(drawn.uniform(-1, 1), 6) for _ in range(FLOATS)]
    tensor = {"name": "x", "datatype": "FP32", "shape": [1, FLOATS], "data": data}
    file.write_text(json.dumps({"inputs": [tensor]}))
    return file


def _start_peer(plan: Plan, name: str) -> Server | None:
    """The peer's server with its model; None, saying why, where it cannot be installed."""
    programs = _install(plan, name)
    if programs is None:
        return None
    folder = plan.new_folder(name)
    folder.mkdir(parents=True)
    ports = free_ports(3)
    if name == "mlserver":
        shutil.copy(BESIDE / "mlserver_model.py", folder)
        model = {"name": "tensors", "implementation": "mlserver_model.Tensors"}
        (folder / "model-settings.json").write_text(json.dumps(model))
        addresses = dict(zip(("http_port", "grpc_port", "metrics_port"), ports, strict=True))
        (folder / "settings.json").write_text(json.dumps({"parallel_workers": 0, "host": "127.0.0.1", **addresses}))
        command = [str(programs / "mlserver"), "start", str(folder)]
    else:
        command = [str(programs / "python"), str(BESIDE / "kserve_model.py"), f"--http_port={ports[0]}"]
        command += ["--enable_grpc=false", "--workers=1"]
    tensor = {"name": "x", "datatype": "FP32", "shape": [1, 2], "data": [1, 2]}
    sample = Sample(json.dumps({"inputs": [tensor]}).encode(), JSON)
    return Server(NAMES[name], command, ports[0], PATH, folder, sample=sample)


def _install(plan: Plan, name: str) -> Path | None:
    """The folder of programs of the peer's environment; None, saying why, where it cannot be made."""
    folder = plan.folder / f"{name}-environment"
    plan.say(f"installing {PEERS[name]} into an environment of its own")
    try:
        return make_environment(folder, [PEERS[name]], INSTALL_LIMIT_S).parent
    except CannotInstall as error:
        plan.say(error.left_out(NAMES[name]))
        return None
