"""Asks a server by tritonclient, and prints what it said: `triton_client.py WAY HTTP GRPC [CALL …]`.

WAY is `http`, `http.aio`, `grpc` or `grpc.aio`. The same calls are made through each, by its own
names; with CALL only those.
"""

import asyncio
import importlib
import inspect
import json
import queue
import sys

import ml_dtypes
import numpy as np
from tritonclient.utils import InferenceServerException, triton_to_np_dtype

way, http, grpc, *only = sys.argv[1:]
is_grpc = way.startswith("grpc")
client_module = importlib.import_module(f"tritonclient.{way}")
PAIR = np.array([[1, 2], [3, 4]], np.float32)
WISHES = {"priority": 1, "timeout": 20_000_000, "sequence_id": 9, "sequence_start": True, "sequence_end": True}


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
    """Everything that was asked for, in order; an error is its text."""

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
            name: [
                each.decode("utf-8", "backslashreplace") if isinstance(each, bytes) else each
                for each in array.ravel().tolist()
            ]
            for name, array in found.items()
        }
        return {"version": said["model_version"], "id": said.get("id", ""), **shown}

    async def described(model):
        """An inference made of what the model's metadata says, and of nothing else."""
        said = plain(await call("get_model_metadata", model))
        tensors = []
        for each in said["inputs"]:
            shape = [2 if int(size) < 0 else int(size) for size in each["shape"]]
            dtype = triton_to_np_dtype(each["datatype"])
            tensors.append(
                (each["name"], each["datatype"], np.full(shape, "MQ==" if dtype == np.object_ else 1, dtype))
            )
        wanted = [output(each["name"]) for each in said.get("outputs", ())]
        return await infer(model, inputs(*tensors), wanted or None)

    async def later():
        """An inference whose answer is fetched, or comes to a callback."""
        if is_grpc:
            came = queue.Queue()
            client.async_infer("sums", inputs(pair), callback=lambda result, error: came.put((result, error)))
            result, error = await asyncio.to_thread(came.get, timeout=30)
            return str(error) if error else result.as_numpy("sum").tolist()
        return client.async_infer("sums", inputs(pair)).get_result().as_numpy("sum").tolist()

    half = np.array([[0.5, -2.0]], np.float16)
    texts = np.array([["ab", "ä"]], object)
    pair = ("pair", "FP32", PAIR)
    asked = {
        "live": lambda: call("is_server_live"),
        "ready": lambda: call("is_server_ready"),
        "models": lambda: each(call("is_model_ready", name) for name in ("sums", "scores", "other")),
        "version": lambda: call("is_model_ready", "sums", "1.0"),
        "server": lambda: call("get_server_metadata"),
        "metadata": lambda: call("get_model_metadata", "sums"),
        "config": lambda: call("get_model_config", "sums"),
        "index": lambda: call("get_model_repository_index"),
        "described": lambda: described("sums"),
        "described_text": lambda: described("shout"),
        "described_row": lambda: described("rows"),
        "infer": lambda: infer("sums", inputs(pair), request_id="my-7"),
        "version_infer": lambda: infer("sums", inputs(pair), model_version="1.0"),
        "wanted": lambda: infer("sums", inputs(pair), [output("sum")]),
        "half": lambda: infer("halves", inputs(("half", "FP16", half))),
        "brain": lambda: infer("brains", inputs(("brain", "BF16", half.astype(ml_dtypes.bfloat16)))),
        "classes": lambda: infer("scores", inputs(pair), [output("scores", class_count=2)]),
        "texts": lambda: infer("shout", inputs(("text", "BYTES", np.array(["ab", "ä"], object)))),
        "bytes": lambda: infer("turned", inputs(("data", "BYTES", np.array([[b"\xff\x00"]], object)))),
        "texts_metadata": lambda: call("get_model_metadata", "shout"),
        "wishes": lambda: infer("sums", inputs(pair), **WISHES),
        "wrong_shape": lambda: infer("sums", inputs(("pair", "FP32", PAIR[:, :1]))),
        "wrong_name": lambda: infer("sums", inputs(("other", "FP32", PAIR))),
        "wrong_type": lambda: infer("sums", inputs(("pair", "BYTES", texts))),
        "unknown": lambda: infer("other", inputs(pair)),
        "control": lambda: each(
            (
                call("unload_model", "spare"),
                call("is_model_ready", "spare"),
                call("load_model", "spare"),
                call("is_model_ready", "spare"),
            )
        ),
    }
    if not is_grpc:
        text = ("text", "BYTES", np.array(["ab", "ä"], object))
        asked["texts_json"] = lambda: infer("shout", inputs(text, binary=False), [output("output", binary=False)])
        asked["json"] = lambda: infer("sums", inputs(pair, binary=False), [output("sum", binary=False)])
        asked["gzip"] = lambda: infer("sums", inputs(pair), request_compression_algorithm="gzip")
        both = {"request_compression_algorithm": "deflate", "response_compression_algorithm": "gzip"}
        asked["deflate"] = lambda: infer("sums", inputs(pair, binary=False), **both)
    elif way == "grpc":
        asked["gzip"] = lambda: infer("sums", inputs(pair), compression_algorithm="gzip")
    if not way.endswith("aio"):
        asked["async"] = later
    asked["statistics"] = lambda: call("get_inference_statistics", "sums")
    said = {}
    for name in only or asked:
        try:
            said[name] = plain(await asked[name]())
        except InferenceServerException as error:
            said[name] = {"message": error.message(), "status": error.status()}
    return said


async def each(coroutines):
    """What each of them gives, one after the other."""
    return [await one for one in coroutines]


async def main():
    """Ask by the client of the way."""
    client = client_module.InferenceServerClient(grpc if is_grpc else http)
    said = await ask(client)
    closed = client.close()
    if inspect.isawaitable(closed):
        await closed
    print(json.dumps(said))


asyncio.run(main())
