"""Asks a server by kserve's own clients, and prints what it said: `kserve_client.py HTTP GRPC`."""

import asyncio
import json
import sys

import kserve
import numpy
from kserve.inference_client import RESTConfig

http, grpc = sys.argv[1:]


def request(shape, values, *, is_binary=True):
    """An inference of the protocol's second version."""
    pair = kserve.InferInput("pair", shape, "FP32")
    pair.set_data_from_numpy(numpy.array(values, numpy.float32), binary_data=is_binary)
    return kserve.InferRequest("sums", [pair])


def texts(*, is_binary=True):
    """Two texts."""
    made = kserve.InferInput("text", [2], "BYTES")
    made.set_data_from_numpy(numpy.array(["ab", "ä"], object), binary_data=is_binary)
    return kserve.InferRequest("shout", [made])


def words(answer):
    """The texts of an answer's only output."""
    return [each.decode() if isinstance(each, bytes) else each for each in answer.outputs[0].as_numpy().ravel()]


def outputs(answer):
    """The values of an answer by name."""
    return {each.name: [float(value) for value in each.as_numpy().ravel()] for each in answer.outputs}


async def refused(coroutine):
    """The text of the error that it raises."""
    try:
        return f"answered: {await coroutine}"
    except Exception as error:
        return f"{type(error).__name__}: {error} {getattr(getattr(error, 'response', None), 'text', '')}"


async def main():
    """Ask by each."""
    v1 = kserve.InferenceRESTClient(RESTConfig(protocol="v1"))
    v2 = kserve.InferenceRESTClient(RESTConfig(protocol="v2"))
    async with kserve.InferenceGRPCClient(grpc) as remote:
        good, wrong = request([2, 2], [[1, 2], [3, 4]]), request([2, 1], [[1], [3]])
        instances = {"instances": [{"pair": [1, 2]}, {"pair": [3, 4]}]}
        said = {
            "ready": {
                "v1": await v1.is_model_ready(http, "sums"),
                "v2": await v2.is_model_ready(http, "sums"),
                "grpc": await remote.is_model_ready("sums"),
                "server": [
                    await v2.is_server_live(http),
                    await v2.is_server_ready(http),
                    await remote.is_server_live(),
                    await remote.is_server_ready(),
                ],
            },
            "v1": await v1.infer(http, instances, model_name="sums"),
            "v2": outputs(await v2.infer(http, good, model_name="sums")),
            "v2_json": outputs(
                await v2.infer(http, request([2, 2], [[1, 2], [3, 4]], is_binary=False), model_name="sums")
            ),
            "v2_wrong": await refused(v2.infer(http, wrong, model_name="sums")),
            "grpc": outputs(await remote.infer(good)),
            "texts": [
                words(await v2.infer(http, texts(), model_name="shout")),
                words(await v2.infer(http, texts(is_binary=False), model_name="shout")),
                words(await remote.infer(texts())),
            ],
            "grpc_wrong": await refused(remote.infer(wrong)),
        }
    await v1.close()
    await v2.close()
    print(json.dumps(said))


asyncio.run(main())
