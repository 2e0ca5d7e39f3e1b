"""Encodes requests by MLServer's codecs, sends them by httpx, and prints what the codecs make of the answers.

`mlserver_client.py HTTP [CALL …]`.
"""

import json
import sys

import httpx
import numpy
import pandas
from mlserver.codecs import NumpyCodec, PandasCodec
from mlserver.types import InferenceRequest, InferenceResponse

http, *only = sys.argv[1:]


def infer(model, request):
    """The answer to a request; a refusal is its status and text."""
    url = f"{http}/v2/models/{model}/infer"
    came = httpx.post(url, content=request.model_dump_json(), headers={"Content-Type": "application/json"})
    return (
        InferenceResponse.model_validate_json(came.content)
        if came.status_code == 200
        else [came.status_code, came.text]
    )


def pair(values):
    """A request with one array."""
    array = numpy.array(values, numpy.float32)
    return InferenceRequest(inputs=[NumpyCodec.encode_input("pair", array)])


def numbers():
    """An array by numpy's codec, both ways."""
    said = infer("sums", pair([[1, 2], [3, 4]]))
    return {each.name: NumpyCodec.decode_output(each).ravel().tolist() for each in said.outputs}


def frame():
    """A frame of pandas, column by column."""
    given = pandas.DataFrame({"left": [1.0, 2.0], "right": [3.0, 4.0]})
    return PandasCodec.decode_response(infer("columns", PandasCodec.encode_request(given))).to_dict("records")


asked = {"numpy": numbers, "frame": frame, "wrong": lambda: infer("sums", pair([[1], [3]]))}
print(json.dumps({name: asked[name]() for name in only or asked}))
