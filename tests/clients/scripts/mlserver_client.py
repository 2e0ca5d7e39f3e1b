"""Encodes requests by MLServer's codecs, sends them by httpx, and prints what the codecs make of the answers.

`mlserver_client.py HTTP [CALL …]`.
"""

import json
import sys
from datetime import datetime

import httpx
import numpy
import pandas
from mlserver.codecs import (
    Base64Codec,
    DatetimeCodec,
    NumpyCodec,
    NumpyRequestCodec,
    PandasCodec,
    StringCodec,
    StringRequestCodec,
)
from mlserver.codecs.json import decode_json_input_or_output, encode_to_json
from mlserver.types import InferenceRequest, InferenceResponse, Parameters, RequestInput, RequestOutput

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


def one(*inputs, **members):
    """A request of these inputs."""
    return InferenceRequest(inputs=list(inputs), **members)


def type_of(said):
    """The content type of an answer or an output."""
    return said.parameters.content_type if said.parameters else None


def of_texts(name, content_type, *texts):
    """An input of texts, by no codec."""
    parameters = Parameters(content_type=content_type)
    return RequestInput(name=name, datatype="BYTES", shape=[len(texts)], data=list(texts), parameters=parameters)


def pair(values):
    """A request with one array."""
    return one(NumpyCodec.encode_input("pair", numpy.array(values, numpy.float32)))


def numbers():
    """An array by numpy's codec, both ways."""
    said = infer("sums", pair([[1, 2], [3, 4]]))
    return {each.name: [type_of(each), NumpyCodec.decode_output(each).ravel().tolist()] for each in said.outputs}


def onnx():
    """A list of numbers of which one is missing, to an ONNX model, the whole request by numpy's codec."""
    given = numpy.array([[1, numpy.nan]], numpy.float32)
    request = NumpyRequestCodec.encode_request(given)
    request.inputs[0].name = "x"
    said = infer("identity", request)
    return [type_of(said), numpy.isnan(NumpyRequestCodec.decode_response(said)).tolist()]


def lists():
    """Lists of numbers, which numpy's codec makes columns."""
    inputs = [NumpyCodec.encode_input(name, numpy.array([1.5, 2])) for name in ("left", "right")]
    return NumpyCodec.decode_output(infer("lists", one(*inputs)).outputs[-1]).tolist()


def frame(model="columns"):
    """A frame of pandas, column by column; a value is missing."""
    given = pandas.DataFrame({"left": [1.0, 2.0], "right": [3.0, None]})
    said = infer(model, PandasCodec.encode_request(given))
    return [type_of(said), PandasCodec.decode_response(said).fillna(-1).to_dict("records")]


def texts():
    """Texts, by the codec of inputs and that of requests."""
    said = infer("shout", one(StringCodec.encode_input("text", ["hello", "ä"])))
    whole = infer("shout", StringRequestCodec.encode_request(["one"], use_bytes=False))
    return [
        type_of(said.outputs[0]),
        StringCodec.decode_output(said.outputs[0]),
        type_of(whole),
        StringRequestCodec.decode_response(whole),
    ]


def text_frame():
    """A frame of one column of texts, answered by objects."""
    said = infer("measured", PandasCodec.encode_request(pandas.DataFrame({"text": ["a", "bcd"]}, dtype=object)))
    return [type_of(said.outputs[0]), PandasCodec.decode_response(said)["output"].tolist()]


def in_base64():
    """Bytes that are no text, both ways."""
    said = infer("turned", one(Base64Codec.encode_input("data", [b"\xff\x00", b"ab"], use_bytes=False)))
    return [type_of(said.outputs[0]), [each.hex() for each in Base64Codec.decode_output(said.outputs[0])]]


def days():
    """Dates come as texts, and go so where the output is asked for as one."""
    when = DatetimeCodec.encode_input("text", [datetime(2026, 11, 27, 12)], use_bytes=False)
    wanted = RequestOutput(name="output", parameters=Parameters(content_type=DatetimeCodec.ContentType))
    [output] = infer("shout", one(when, outputs=[wanted])).outputs
    return [type_of(output), DatetimeCodec.decode_output(output)[0].isoformat()]


def objects():
    """JSON in texts, both ways."""
    text = encode_to_json({"a": [1]}, use_bytes=False)
    said = infer("measured", one(of_texts("text", "json", text)))
    return [type_of(said.outputs[0]), decode_json_input_or_output(said.outputs[0])]


asked = {
    "numpy": numbers,
    "onnx": onnx,
    "lists": lists,
    "frame": frame,
    "string": texts,
    "text_frame": text_frame,
    "base64": in_base64,
    "datetime": days,
    "json": objects,
    "wrong": lambda: infer("sums", pair([[1], [3]])),
    "wrong_text": lambda: infer("sums", one(StringCodec.encode_input("pair", ["a"]))),
    "wrong_array": lambda: infer("shout", pair([[1, 2]])),
    "wrong_base64": lambda: infer("turned", one(of_texts("data", "base64", "é"))),
}
print(json.dumps({name: asked[name]() for name in only or asked}))
