"""One annotated value: from the bytes of a request to a checked object, and from what `predict` gave to an answer.

What can be annotated: a pydantic model (which is reached through the author's class alone), a dataclass, a TypedDict or
another type that msgspec reads, `dict`, `bytes`, `str`, a Pillow image.
"""

from __future__ import annotations

import codecs
import dataclasses
import io
import json
import re
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import msgspec

from marserve_handlers.declared.answer import JsonAnswer
from marserve_handlers.declared.bodies import JSON, Body, kind_of, only_body, read_json, read_json_slowly, what_came
from marserve_handlers.declared.declaration import DeclarationError, ItemType
from marserve_handlers.errors import BadInput
from marserve_handlers.support.shown import short, shown

# Reads a request: its values by name, and name and content type of each, empty outside of a server.
Decode = Callable[[Mapping[str, Any], Sequence[tuple[str, str | None]]], Any]
# The answer's body or JSON, and its content type; empty for none, and for JSON.
Encoded = tuple[bytes | JsonAnswer, str]

TEXT: Final = "text/plain; charset=utf-8"
BYTES: Final = "application/octet-stream"
PNG: Final = "image/png"

# Types that say nothing of what a body is.
_UNNAMED: Final = ("", "application/octet-stream")
# Of what a library says, which may repeat a value of the client's.
_MAX_MESSAGE: Final = 300
# How many of a body's faults are named.
_MAX_FAULTS: Final = 3

_PLACE = re.compile(r" - at `(.*)`$")


def is_pydantic(annotation: Any) -> bool:
    """Whether an annotation is a model of pydantic, by its methods."""
    return (
        isinstance(annotation, type)
        and hasattr(annotation, "model_validate_json")
        and hasattr(annotation, "model_json_schema")
    )


def is_picture(annotation: Any) -> bool:
    """Whether an annotation is Pillow's `Image`."""
    return isinstance(annotation, type) and annotation.__module__ == "PIL.Image" and annotation.__name__ == "Image"


def input_type(words: str, annotation: Any, parameter: str) -> tuple[ItemType, Decode]:
    """What a request must hold for this annotation, and how it is read. Raises DeclarationError.

    `words` are the parameter's in messages of the load, `parameter` is its name.
    """
    if annotation in (bytes, bytearray):
        return ItemType("bytes", BYTES), _read_bytes if annotation is bytes else _read_bytearray
    if annotation is str:
        return ItemType("text", "text/plain", _text_schema(parameter)), _text_reader(parameter)
    if is_picture(annotation):
        return ItemType("image", "image/*"), _read_picture
    if is_pydantic(annotation):
        return ItemType("json", JSON, annotation.model_json_schema()), _pydantic_reader(annotation)
    schema = schema_of(words, annotation)
    return ItemType("json", JSON, schema), _json_reader(annotation)


def output_type(words: str, annotation: Any, *, is_stream: bool = False) -> ItemType:
    """What an answer of this annotation is. Raises DeclarationError."""
    if annotation in (bytes, bytearray):
        return ItemType("bytes", BYTES, stream=is_stream)
    if annotation is str:
        return ItemType("text", "text/plain", stream=is_stream)
    if annotation is Any or annotation is None or annotation is type(None):
        return ItemType("any", stream=is_stream)
    if is_picture(annotation):
        return ItemType("image", PNG, stream=is_stream)
    if is_stream and getattr(annotation, "__qualname__", "") == "Event" and annotation.__module__.endswith(".events"):
        return ItemType("events", "text/event-stream", stream=True)
    if is_pydantic(annotation):
        return ItemType("json", JSON, annotation.model_json_schema(mode="serialization"), is_stream)
    return ItemType("json", JSON, schema_of(words, annotation), is_stream)


def schema_of(words: str, annotation: Any) -> dict[str, Any]:
    """The JSON schema of a type that msgspec reads. Raises DeclarationError for other types."""
    try:
        if _has_custom(msgspec.inspect.type_info(annotation), set()):
            raise TypeError("it is, or holds, a class that JSON cannot be read into")
        schema = msgspec.json.schema(annotation)
    except Exception as error:  # msgspec raises TypeError, and what the author's annotations raise
        raise DeclarationError(
            f"{words} is annotated with {annotation!r}, which cannot be used ({error}): take a pydantic model, a "
            "dataclass, dict, bytes, str, or PIL.Image.Image."
        ) from None
    return _flat(schema)


def _flat(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema without a reference at its top, where nothing else refers to what that names."""
    reference, definitions = schema.get("$ref"), schema.get("$defs")
    if not isinstance(reference, str) or not isinstance(definitions, dict):
        return schema
    name = reference.rpartition("/")[2]
    others = {key: value for key, value in definitions.items() if key != name}
    if name not in definitions or f'"{reference}"' in json.dumps(definitions):
        return schema
    return {**definitions[name], **({"$defs": others} if others else {})}


def _has_custom(info: Any, seen: set[int]) -> bool:
    """Whether a type is, or holds, a class that msgspec does not read."""
    if isinstance(info, msgspec.inspect.CustomType):
        return True
    if id(info) in seen:
        return False
    seen.add(id(info))
    if isinstance(info, (tuple, list)):
        return any(_has_custom(each, seen) for each in info)
    if isinstance(info, (msgspec.inspect.Type, msgspec.inspect.Field)):
        return any(_has_custom(getattr(info, name), seen) for name in info.__struct_fields__ if name != "default")
    return False


# ------------------------------------------------------------------------------------------------ from a request


def _needed(row: Mapping[str, Any], what: str, content_type: str) -> Body:
    body = only_body(row)
    if body is None:
        raise BadInput(f"expected {what} as the body, got {what_came(row, content_type)}")
    return body


def _read_bytes(row: Mapping[str, Any], parts: Sequence[tuple[str, str | None]]) -> bytes:
    return bytes(_needed(row, "bytes", BYTES))


def _read_bytearray(row: Mapping[str, Any], parts: Sequence[tuple[str, str | None]]) -> bytearray:
    return bytearray(_needed(row, "bytes", BYTES))


def _text_reader(parameter: str) -> Decode:
    """Reads text: as it is, or as JSON says it, alone or in an object as the value of the parameter's name."""
    of_json = f'a JSON text or {{"{parameter}": text}}'

    def decode(row: Mapping[str, Any], parts: Sequence[tuple[str, str | None]]) -> str:
        body = _needed(row, "text", "text/plain")
        content_type = next((kind for name, kind in reversed(parts) if row.get(name) is body), None) or ""
        essence = content_type.partition(";")[0].strip().lower()
        if essence == JSON:
            return _text_of_json(read_json(body), parameter, of_json)
        if essence not in _UNNAMED and not essence.startswith("text/"):
            raise BadInput(f"expected text/plain, or {JSON} with {of_json}, got {short(essence)}")
        try:
            return body.decode()
        except UnicodeDecodeError as error:
            raise BadInput(f"expected UTF-8 text, got another byte at {error.start}") from None

    return decode


def _text_schema(parameter: str) -> dict[str, Any]:
    """The JSON schema of what `_text_reader` reads."""
    text = {"type": "string"}
    named = {"type": "object", "properties": {parameter: text}, "required": [parameter], "additionalProperties": False}
    return {"anyOf": [text, named]}


def _text_of_json(value: Any, parameter: str, wanted: str) -> str:
    field = None
    if type(value) is dict:
        for name in value:
            if name != parameter:
                raise BadInput(f"there is no such field; expected {wanted}", name)
        if not value:
            raise BadInput("is missing, expected a text", parameter)
        value, field, wanted = value[parameter], parameter, "a text"
    if type(value) is not str:
        raise BadInput(f"expected {wanted}, got {kind_of(value)}", field)
    return value


def _read_picture(row: Mapping[str, Any], parts: Sequence[tuple[str, str | None]]) -> Any:
    # here: only models that take pictures need Pillow and numpy
    from marserve_handlers.support.pictures import open_picture

    return open_picture(_needed(row, "a picture", BYTES))


def _is_form(row: Mapping[str, Any]) -> bool:
    return (
        bool(row)
        and "body" not in row
        and "data" not in row
        and not (len(row) == 1 and next(iter(row)).lstrip()[:1] in ("{", "["))
    )


def _fields(row: Mapping[str, Any]) -> dict[str, str]:
    try:
        return {name: value.decode() for name, value in row.items()}
    except UnicodeDecodeError:
        raise BadInput("expected fields of UTF-8 text") from None


def _pydantic_reader(cls: Any) -> Decode:
    read, validate = cls.model_validate_json, cls.model_validate

    def decode(row: Mapping[str, Any], parts: Sequence[tuple[str, str | None]]) -> Any:
        try:
            body = row.get("body")
            if body is None:
                if _is_form(row):
                    return validate(_fields(row))
                body = _needed(row, "a JSON object", JSON)
            return read(body.removeprefix(codecs.BOM_UTF8) if body[:1] == b"\xef" else body)
        except BadInput:
            raise
        except ValueError as error:  # pydantic's ValidationError is one
            raise _pydantic_fault(error, row) from None

    return decode


def _pydantic_fault(error: ValueError, row: Mapping[str, Any]) -> Exception:
    find = getattr(error, "errors", None)
    if find is None or type(error).__name__ != "ValidationError":
        return error
    found = find(include_url=False, include_context=False)
    first = found[0]
    if first["type"] == "json_invalid":
        try:
            read_json_slowly(_needed(row, "a JSON object", JSON))
        except BadInput as fault:
            return fault
        return BadInput(f"the body is not JSON: {first['msg']}")
    further = [f"; {_place_of(each)}: {_pydantic_message(each)}" for each in found[1:_MAX_FAULTS]]
    left = len(found) - _MAX_FAULTS
    more = f" (and {left} more)" if left > 0 else ""
    return BadInput("".join([_pydantic_message(first), *further, more]), _place_of(first) or None)


def _pydantic_message(fault: Mapping[str, Any]) -> str:
    message = short(fault["msg"], _MAX_MESSAGE)
    message = message[:1].lower() + message[1:]
    return message if fault["type"] == "missing" else f"{message}, got {shown(fault.get('input'))}"


def _place_of(fault: Mapping[str, Any]) -> str:
    """The field's name; empty where the whole is meant."""
    return ".".join(map(str, fault["loc"]))


def _json_reader(annotation: Any) -> Decode:
    kind = dict[str, Any] if annotation is dict else annotation
    read = msgspec.json.Decoder(kind).decode

    def decode(row: Mapping[str, Any], parts: Sequence[tuple[str, str | None]]) -> Any:
        body = row.get("body")
        try:
            if body is None:
                if _is_form(row):
                    return msgspec.convert(_fields(row), kind, strict=False)
                body = _needed(row, "JSON", JSON)
            return read(body)
        except msgspec.ValidationError as error:
            raise _msgspec_fault(error) from None
        except (msgspec.DecodeError, UnicodeError, RecursionError):
            value = read_json_slowly(body or b"")
        try:
            return msgspec.convert(value, kind)
        except msgspec.ValidationError as error:
            raise _msgspec_fault(error) from None

    return decode


def _msgspec_fault(error: msgspec.ValidationError) -> BadInput:
    text = str(error)
    place = _PLACE.search(text)
    message = short(text[: place.start()] if place else text, _MAX_MESSAGE)
    path = place[1].removeprefix("$").removeprefix(".") if place else ""
    return BadInput(message[:1].lower() + message[1:].replace("`", ""), path or None)


# ------------------------------------------------------------------------------------------------ to an answer


def converter(words: str, annotation: Any) -> Callable[[Any], Any] | None:
    """What checks an answer by its annotation before it is encoded; None where there is nothing to check."""
    if is_pydantic(annotation):

        def validate(value: Any) -> Any:
            return value if isinstance(value, annotation) else annotation.model_validate(value)

        return validate
    if annotation in (bytes, bytearray, str) or is_picture(annotation):
        wanted: Any = (bytes, bytearray, memoryview) if annotation in (bytes, bytearray) else annotation

        def check(value: Any) -> Any:
            if not isinstance(value, wanted):
                raise TypeError(
                    f"{words} returned {type(value).__name__}, and is annotated to return {annotation.__name__}"
                )
            return value

        return check
    if dataclasses.is_dataclass(annotation) or typing.is_typeddict(annotation):
        is_dict = typing.is_typeddict(annotation)

        def convert(value: Any) -> Any:
            if not is_dict and isinstance(value, typing.cast("type", annotation)):
                return value
            return msgspec.convert(value, annotation)

        return convert
    return None


def encode_item(value: Any) -> Encoded:
    """One answer's body, or its JSON, and its content type. Raises TypeError for what cannot be written."""
    if isinstance(value, str):
        return str.encode(value), TEXT
    if isinstance(value, (bytes, bytearray, memoryview)):
        return bytes(value), BYTES
    dump = getattr(value, "model_dump_json", None)
    if dump is not None:
        return JsonAnswer(dump().encode()), ""
    if is_picture_value(value):
        file = io.BytesIO()
        value.save(file, "PNG")
        return file.getvalue(), PNG
    return JsonAnswer(encode_json(value)), ""


def encode_json(value: Any) -> bytes:
    """JSON text of plain values, dataclasses, arrays and numbers of numpy and torch; NaN and Infinity as such."""
    text = msgspec.json.encode(value, enc_hook=_plain)
    if b"null" not in text:
        return text
    # NaN was written as null, if there was one: Python's writer has a word for it, which clients of today read.
    return json.dumps(msgspec.to_builtins(value, enc_hook=_plain), separators=(",", ":")).encode()


def _plain(value: Any) -> Any:
    for method in ("model_dump", "tolist"):
        make = getattr(value, method, None)
        if make is not None:
            return make()
    raise TypeError(f"an answer of type {type(value).__name__} cannot be written as JSON")


def is_picture_value(value: Any) -> bool:
    """Whether a value is a picture of Pillow's."""
    return any(cls.__module__ == "PIL.Image" and cls.__name__ == "Image" for cls in type(value).__mro__)
