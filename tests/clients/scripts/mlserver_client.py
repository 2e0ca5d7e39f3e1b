"""Encodes requests by MLServer's codecs, sends them by httpx, and prints what the codecs make of the answers.

`mlserver_client.py HTTP`.
"""

import json
import sys

import httpx
import numpy
import pandas
from mlserver.codecs import NumpyCodec, PandasCodec
from mlserver.types import InferenceRequest, InferenceResponse

(http,) = sys.argv[1:]


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


frame = pandas.DataFrame({"left": [1.0, 2.0], "right": [3.0, 4.0]})
said = infer("sums", pair([[1, 2], [3, 4]]))
columns = infer("columns", PandasCodec.encode_request(frame))
print(
    json.dumps(
        {
            "numpy": {each.name: NumpyCodec.decode_output(each).ravel().tolist() for each in said.outputs},
            "frame": PandasCodec.decode_response(columns).to_dict("records"),
            "wrong": infer("sums", pair([[1], [3]])),
        }
    )
)
