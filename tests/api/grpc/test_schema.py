"""Tests for the gRPC messages: names and numbers as TorchServe's clients have them compiled in."""

from __future__ import annotations

from hashlib import sha256
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import descriptor_pb2

from marserve.api.grpc.schema import COMPILED, Schema
from support.grpc_house import repeats
from support.inventory import inventory
from support.pages import ROOT

SCHEMA = Schema()
PREDICT = "org.pytorch.serve.grpc.inference.PredictionsRequest"


def grpc_files() -> list[dict[str, Any]]:
    """What the inventory says of each of TorchServe's `.proto` files."""
    files: list[dict[str, Any]] = inventory("grpc")
    return files


def full_name(name: str, package: str) -> str:
    """A message's name with its package."""
    return name if name.startswith("google.") else f"{package}.{name}"


def test_every_method_of_the_inventory_is_there() -> None:
    """With its messages, and the sides that stream."""
    walked = 0
    for file in grpc_files():
        for service in file["services"]:
            methods = SCHEMA.methods(service["service"])
            assert set(methods) == {method["name"] for method in service["methods"]}
            for method in service["methods"]:
                made = methods[method["name"]]
                assert (made.client_streaming, made.server_streaming) == (
                    method["request_stream"],
                    method["response_stream"],
                )
                assert made.input_type.full_name == full_name(method["request"], file["package"])
                assert made.output_type.full_name == full_name(method["response"], file["package"])
                walked += 1

    assert walked == 16


def test_every_field_of_the_inventory_is_there() -> None:
    """With its number, type and label; and there are no others but ours, from 1001 on."""
    walked = 0
    for file in grpc_files():
        for message in file["messages"]:
            made = SCHEMA.message(full_name(message["message"], file["package"])).DESCRIPTOR
            ours = {field.name for field in made.fields if field.number > 1000}
            assert {field["name"] for field in message["fields"]} == set(made.fields_by_name) - ours
            for field in message["fields"]:
                described = made.fields_by_name[field["name"]]
                assert described.number == field["number"], field
                assert kind_of(described) == field["type"].rpartition(".")[2], field
                assert repeats(described) == (field["label"] == "repeated" or field["type"].startswith("map<"))
                walked += 1

    assert walked >= 60


KINDS = {
    1: "double",
    2: "float",
    3: "int64",
    4: "uint64",
    5: "int32",
    8: "bool",
    9: "string",
    12: "bytes",
    13: "uint32",
}


def kind_of(field: Any) -> str:
    """The type of a field as a `.proto` file writes it, without package."""
    if field.message_type is None:
        return KINDS[field.type]
    if field.message_type.GetOptions().map_entry:
        entry = field.message_type.fields_by_name
        return f"map<{kind_of(entry['key'])},{kind_of(entry['value'])}>".rpartition(".")[2]
    name: str = field.message_type.name
    return name


def whole_kind(field: Any) -> str:
    """As `kind_of`, with enums and both types of a map."""
    if field.enum_type is not None:
        return str(field.enum_type.name)
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        key, value = field.message_type.fields
        return f"map<{kind_of(key)},{kind_of(value)}>"
    return kind_of(field)


def test_a_request_is_read_from_its_bytes() -> None:
    """Written by hand: field number and wire type in one byte, length, content."""
    data = b"\x0a\x04echo" + b"\x12\x031.0" + b"\x1a\x0b\x0a\x04data\x12\x03abc" + b"\x22\x01s"

    message = SCHEMA.message(PREDICT).FromString(data)

    assert (message.model_name, message.model_version, message.sequence_id) == ("echo", "1.0", "s")
    assert dict(message.input) == {"data": b"abc"}


def test_an_optional_field_knows_whether_it_was_given() -> None:
    """An empty sequence id is another thing than none."""
    assert not SCHEMA.message(PREDICT)().HasField("sequence_id")
    assert SCHEMA.message(PREDICT)(sequence_id="").HasField("sequence_id")


def test_a_parameter_has_one_of_three_values() -> None:
    """The last one set counts."""
    parameter = SCHEMA.message("inference.InferParameter")(bool_param=True)
    parameter.string_param = "x"

    assert parameter.WhichOneof("parameter_choice") == "string_param"


def test_the_open_inference_service_stands_under_the_standards_name_too() -> None:
    """Clients of the standard do not know TorchServe's package."""
    standard = SCHEMA.methods("inference.GRPCInferenceService")

    assert set(standard) > set(SCHEMA.methods("org.pytorch.serve.grpc.openinference.GRPCInferenceService"))
    assert standard["ModelInfer"].input_type.full_name == "inference.ModelInferRequest"


def test_the_messages_are_compiled_from_the_proto_files_as_they_are() -> None:
    """`make protos` notes what it has compiled; here no compiler is needed."""
    folder = COMPILED.parent
    noted = {name: digest for digest, name in map(str.split, (folder / "messages.sha256").read_text().splitlines())}

    files = {str(file.relative_to(folder)): sha256(file.read_bytes()).hexdigest() for file in folder.rglob("*.proto")}

    assert files == noted


def test_the_proto_files_compile_to_the_messages(tmp_path: Path) -> None:
    """Byte for byte, as users compile them."""
    protoc = pytest.importorskip("grpc_tools.protoc")
    names = [line.split()[1] for line in COMPILED.with_name("messages.sha256").read_text().splitlines()]
    known = Path(import_module("grpc_tools").__file__ or "").with_name("_proto")
    paths = [f"-I{folder}" for folder in (COMPILED.parent, known)]

    assert protoc.main(["protoc", *paths, f"--descriptor_set_out={tmp_path / 'made'}", *names]) == 0

    assert (tmp_path / "made").read_bytes() == COMPILED.read_bytes()


def services() -> dict[str, str]:
    """The file of each service."""
    files = descriptor_pb2.FileDescriptorSet.FromString(COMPILED.read_bytes()).file
    return {f"{file.package}.{service.name}": file.name for file in files for service in file.service}


@pytest.mark.parametrize("service", services())
def test_the_page_names_every_service_its_methods_and_its_file(service: str) -> None:
    """Whoever writes a client looks there first; the file lies where the page says."""
    page = (ROOT / "docs" / "grpc.md").read_text(encoding="utf-8")
    file = services()[service]

    missing = [name for name in (service, file, *SCHEMA.methods(service)) if f"`{name}`" not in page]

    assert missing == []
    assert (COMPILED.parent / file).is_file()


# By message: each field's number, name, type and whether it repeats (*), as clients of the protocol have it.
PUBLIC = {
    "google.rpc.Status": "1 code int32, 2 message string, 3 details *Any",
    "google.rpc.ErrorInfo": "1 reason string, 2 domain string, 3 metadata *map<string,string>",
    "grpc.health.v1.HealthCheckRequest": "1 service string",
    "grpc.health.v1.HealthCheckResponse": "1 status ServingStatus",
    **{
        f"grpc.reflection.{version}.{message}": fields
        for version in ("v1", "v1alpha")
        for message, fields in {
            "ServerReflectionRequest": "1 host string, 3 file_by_filename string, 4 file_containing_symbol string, "
            "5 file_containing_extension ExtensionRequest, 6 all_extension_numbers_of_type string, "
            "7 list_services string",
            "ExtensionRequest": "1 containing_type string, 2 extension_number int32",
            "ServerReflectionResponse": "1 valid_host string, 2 original_request ServerReflectionRequest, "
            "4 file_descriptor_response FileDescriptorResponse, "
            "5 all_extension_numbers_response ExtensionNumberResponse, "
            "6 list_services_response ListServiceResponse, 7 error_response ErrorResponse",
            "FileDescriptorResponse": "1 file_descriptor_proto *bytes",
            "ExtensionNumberResponse": "1 base_type_name string, 2 extension_number *int32",
            "ListServiceResponse": "1 service *ServiceResponse",
            "ServiceResponse": "1 name string",
            "ErrorResponse": "1 error_code int32, 2 error_message string",
        }.items()
    },
}


@pytest.mark.parametrize("name", PUBLIC)
def test_the_messages_of_health_reflection_and_errors_are_the_public_ones(name: str) -> None:
    """Clients have theirs from other packages; `make test-beside` asks with these."""
    fields = SCHEMA.message(name).DESCRIPTOR.fields

    shown = [f"{field.number} {field.name} {'*' * repeats(field)}{whole_kind(field)}" for field in fields]

    assert ", ".join(shown) == PUBLIC[name]


def test_a_services_health_has_the_public_numbers() -> None:
    """A probe reads the number."""
    statuses = SCHEMA.pool.FindEnumTypeByName("grpc.health.v1.HealthCheckResponse.ServingStatus").values_by_name

    assert {name: value.number for name, value in statuses.items()} == {
        "UNKNOWN": 0,
        "SERVING": 1,
        "NOT_SERVING": 2,
        "SERVICE_UNKNOWN": 3,
    }


@pytest.mark.parametrize(
    ("service", "method"),
    [
        ("grpc.health.v1.Health", "Check"),
        ("grpc.health.v1.Health", "Watch >"),
        ("grpc.reflection.v1.ServerReflection", "< ServerReflectionInfo >"),
        ("grpc.reflection.v1alpha.ServerReflection", "< ServerReflectionInfo >"),
    ],
)
def test_health_and_reflection_stream_on_the_public_sides(service: str, method: str) -> None:
    """`<`: the client's; `>`: the server's."""
    shown = [
        " ".join(("<" * each.client_streaming, each.name, ">" * each.server_streaming)).strip()
        for each in SCHEMA.methods(service).values()
    ]

    assert method in shown


def test_the_standards_proto_file_has_all_that_torchserves_has() -> None:
    """The protocol is one; a field that is added to one of the files belongs into the other."""
    package = "org.pytorch.serve.grpc.openinference"
    torchserves = SCHEMA.pool.FindFileByName("org/pytorch/serve/grpc/open_inference.proto")

    for name, message in torchserves.message_types_by_name.items():
        standard = SCHEMA.message(f"inference.{name}").DESCRIPTOR
        fields = {field.name: (field.number, repeats(field), whole_kind(field)) for field in message.fields}
        assert (
            fields.items()
            <= {field.name: (field.number, repeats(field), whole_kind(field)) for field in standard.fields}.items()
        )
        assert set(message.nested_types_by_name) == set(standard.nested_types_by_name)
    assert (
        SCHEMA.methods(f"{package}.GRPCInferenceService").keys()
        < SCHEMA.methods("inference.GRPCInferenceService").keys()
    )
