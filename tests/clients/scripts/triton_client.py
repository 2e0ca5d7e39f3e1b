"""Asks a server by tritonclient, and prints what it said: `triton_client.py WAY HTTP GRPC`.

WAY is `http`, `http.aio`, `grpc` or `grpc.aio`. The same calls are made through each, by its own names.
"""

import asyncio
import importlib
import inspect
import json
import sys

import ml_dtypes
import numpy as np
from tritonclient.utils import InferenceServerException

way, http, grpc = sys.argv[1:]
is_grpc = way.startswith("grpc")
client_module = importlib.import_module(f"tritonclient.{way}")
PAIR = np.array([[1, 2], [3, 4]], np.float32)


def inputs(*tensors, binary=True):
    """The tensors (name, type, array) as inputs."""
    made = []
    for name, datatype, array in tensors:
        one = client_module.InferInput(name, list(array.shape), datatype)
        one.set_data_from_numpy(array) if is_grpc else one.set_data_from_numpy(array, binary_data=binary)
        made.append(one)
    return made


def output(name, *, binary=True, **more):
    """A requested output."""
    if is_grpc:
        return client_module.InferRequestedOutput(name, **more)
    return client_module.InferRequestedOutput(name, binary_data=binary, **more)


def plain(value):
    """An answer of either protocol as JSON: gRPC's messages as their JSON."""
    if hasattr(value, "DESCRIPTOR"):
        from google.protobuf.json_format import MessageToDict

        return MessageToDict(value, preserving_proto_field_name=True)
    return value


async def ask(client):
    """Everything, in order; an error is its text."""

    async def call(name, *words, **more):
        made = getattr(client, name)(*words, **more)
        return await made if inspect.isawaitable(made) else made

    async def infer(model, tensors, outputs=None, **more):
        answer = await call("infer", model, tensors, outputs=outputs, **more)
        said = answer.get_response()
        said = plain(said)
        names = [each["name"] for each in said["outputs"]]
        found = {name: answer.as_numpy(name) for name in names}
        shown = {
            name: [each.decode() if isinstance(each, bytes) else each for each in array.ravel().tolist()]
            for name, array in found.items()
        }
        return {"version": said["model_version"], "id": said.get("id", ""), **shown}

    async def refused(coroutine):
        try:
            return await coroutine
        except InferenceServerException as error:
            return {"message": error.message(), "status": error.status()}

    half = np.array([[0.5, -2.0]], np.float16)
    texts = np.array([["ab", "ä"]], object)
    said = {
        "live": await call("is_server_live"),
        "ready": await call("is_server_ready"),
        "models": [await call("is_model_ready", name) for name in ("sums", "sums", "other")],
        "version": await call("is_model_ready", "sums", "1.0"),
        "server": plain(await call("get_server_metadata"))["name"],
        "metadata": plain(await call("get_model_metadata", "sums"))["inputs"],
        "config": plain(await call("get_model_config", "sums")),
        "index": plain(await call("get_model_repository_index")),
        "infer": await infer("sums", inputs(("pair", "FP32", PAIR)), request_id="my-7"),
        "version_infer": await infer("sums", inputs(("pair", "FP32", PAIR)), model_version="1.0"),
        "wanted": await infer("sums", inputs(("pair", "FP32", PAIR)), [output("sum")]),
        "half": await infer("halves", inputs(("half", "FP16", half))),
        "brain": await infer("brains", inputs(("brain", "BF16", half.astype(ml_dtypes.bfloat16)))),
        "classes": await infer("scores", inputs(("pair", "FP32", PAIR)), [output("scores", class_count=2)]),
        "wishes": await infer(
            "sums", inputs(("pair", "FP32", PAIR)), priority=1, timeout=20_000_000, sequence_id=9, sequence_start=True,
            sequence_end=True,
        ),
        "wrong_shape": await refused(infer("sums", inputs(("pair", "FP32", PAIR[:, :1])))),
        "wrong_name": await refused(infer("sums", inputs(("other", "FP32", PAIR)))),
        "wrong_type": await refused(infer("sums", inputs(("pair", "BYTES", texts)))),
        "unknown": await refused(infer("other", inputs(("pair", "FP32", PAIR)))),
        "control": [
            await refused(call("unload_model", "spare")),
            await call("is_model_ready", "spare"),
            await refused(call("load_model", "spare")),
            await call("is_model_ready", "spare"),
        ],
    }  # fmt: skip
    if not is_grpc:
        said["json"] = await infer("sums", inputs(("pair", "FP32", PAIR), binary=False), [output("sum", binary=False)])
        for packing in ("gzip", "deflate"):
            said[packing] = await refused(
                infer("sums", inputs(("pair", "FP32", PAIR)), request_compression_algorithm=packing)
            )
    elif way == "grpc":
        said["gzip"] = await infer("sums", inputs(("pair", "FP32", PAIR)), compression_algorithm="gzip")
    said["statistics"] = plain(await call("get_inference_statistics", "sums"))["model_stats"][0]["inference_count"]
    return said


async def main():
    """Ask by the client of the way."""
    client = client_module.InferenceServerClient(grpc if is_grpc else http)
    said = await ask(client)
    closed = client.close()
    if inspect.isawaitable(closed):
        await closed
    print(json.dumps(said))


asyncio.run(main())
