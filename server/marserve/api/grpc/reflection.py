"""The reflection service (v1 and v1alpha): clients without `.proto` files ask it for services and messages.

It needs no key. It reads the bytes itself, so that an unreadable message is the client's error.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, Final

from marserve.api.grpc.calls import parse_question
from marserve.api.grpc.schema import REFLECTION, REFLECTION_OF_OLD_TOOLS, Schema
from marserve.api.grpc.transport.status import StatusCode
from marserve.api.grpc.transport.stream import Method, Stream

SERVICES: Final = tuple(f"{package}.ServerReflection" for package in (REFLECTION, REFLECTION_OF_OLD_TOOLS))


class GrpcReflection:
    """Shows these services, and the messages of `schema`."""

    def __init__(self, services: Collection[str], schema: Schema) -> None:
        self._services = sorted(services)
        self._schema = schema
        self._answers: Mapping[str, Callable[[Any], dict[str, Any]]] = {
            "file_by_filename": lambda name: self._files(schema.pool.FindFileByName(name)),
            "file_containing_symbol": lambda name: self._files(schema.pool.FindFileContainingSymbol(name)),
            "file_containing_extension": self._file_of_extension,
            "all_extension_numbers_of_type": self._extension_numbers,
            "list_services": lambda _: {
                "list_services_response": {"service": [{"name": name} for name in self._services]}
            },
        }

    def methods(self) -> dict[str, Method]:
        """The service's one method by path, under each name of the service."""
        methods: dict[str, Method] = {}
        for service in SERVICES:
            methods |= self._method(service)
        return methods

    def _method(self, service: str) -> dict[str, Method]:
        method = self._schema.methods(service)["ServerReflectionInfo"]
        read, write = (self._schema.message(kind.full_name) for kind in (method.input_type, method.output_type))

        async def info(stream: Stream) -> None:
            """Write an answer for each message, in order."""
            while (came := await stream.read()) is not None:
                question = parse_question(read, came)
                await stream.write(write(original_request=question, **self._answer(question)).SerializeToString())

        return {f"{service}/{method.name}": Method(info, is_dialogue=True)}

    def _answer(self, question: Any) -> dict[str, Any]:
        """The fields of an answer beside the question; an error, where there is no such thing, is an answer."""
        asked = question.WhichOneof("message_request")
        if asked is None:
            return _error(StatusCode.INVALID_ARGUMENT)
        try:
            return self._answers[asked](getattr(question, asked))
        except KeyError:
            return _error(StatusCode.NOT_FOUND)

    def _file_of_extension(self, asked: Any) -> dict[str, Any]:
        pool = self._schema.pool
        extended = pool.FindMessageTypeByName(asked.containing_type)
        return self._files(pool.FindExtensionByNumber(extended, asked.extension_number).file)

    def _extension_numbers(self, name: str) -> dict[str, Any]:
        pool = self._schema.pool
        extended = pool.FindMessageTypeByName(name)
        numbers = sorted(extension.number for extension in pool.FindAllExtensions(extended))
        found = {"base_type_name": extended.full_name, "extension_number": numbers}
        return {"all_extension_numbers_response": found}

    def _files(self, file: Any) -> dict[str, Any]:
        """The file, and after it those that it imports, each once."""
        found = {file.name: file.serialized_pb}
        waiting = list(file.dependencies)
        while waiting:
            needed = waiting.pop(0)
            if needed.name not in found:
                found[needed.name] = needed.serialized_pb
                waiting += needed.dependencies
        return {"file_descriptor_response": {"file_descriptor_proto": list(found.values())}}


def _error(status: StatusCode) -> dict[str, Any]:
    code, words = status.value
    return {"error_response": {"error_code": code, "error_message": words}}
