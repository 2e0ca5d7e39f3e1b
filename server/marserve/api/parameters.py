"""Reads the parameters of management calls the way TorchServe's clients send them.

Values in a query are text. TorchServe takes an integer that does not parse as not given, and only the word `true` as
true (contract 2.1). `integer` does the same, for calls that were recorded; `whole` refuses such a value. JSON has
types, so a value of the wrong type is an error. `warnings` name unknown parameters and those that were taken as not
given.
"""

from __future__ import annotations

import json
import re
from asyncio import to_thread
from collections.abc import Collection, Mapping
from typing import Any, Final, NamedTuple

from starlette.requests import Request

from marserve.api.decoding import SHORT_BYTES
from marserve.errors import BadInput, without_stop
from marserve.files.nearest import did_you_mean
from marserve.model_options import Said, read_value, said_in
from marserve.option_values import Unusable
from marserve.registry.intake.registration import MOST_WORKERS, CopyParameters, RegisterParameters

NO_KMS = (
    "s3_sse_kms=true asks for a download from S3 with a signature, and this url is no address of S3; name "
    "s3://bucket/key or https://bucket.s3.region.amazonaws.com/key, or leave s3_sse_kms out."
)
# The numbers that clients send for "not given": -1, and for this parameter TorchServe's own.
_NOT_GIVEN = {"max_batch_delay": (-100, -10000)}

# Far more than any call's parameters take; a body over `SHORT_BYTES` is read in a thread.
MOST_BODY_BYTES: Final = 256 * 1024
MOST_THREADS: Final = 1024
# How many unknown names are listed.
MOST_WARNINGS: Final = 20

# TorchServe's integers have 32 bits; a longer one does not parse.
_INTEGER = re.compile(r"[+-]?[0-9]{1,10}", re.ASCII).fullmatch
_LARGEST = 2**31 - 1


TEXT: Final = {"type": "string"}
INTEGER: Final = {"type": "integer"}
FLAG: Final = {"type": "boolean"}


class Parameter(NamedTuple):
    """A parameter of a call, as the API description shows it: a sentence, and its JSON Schema."""

    help: str
    schema: Mapping[str, Any] = TEXT


# The options of a version that a call may name. The number of workers has other names in each call.
CALLED_OPTIONS = {
    option.parameter: option for option in said_in("registration") if option.key not in ("minWorkers", "maxWorkers")
}
_OF_OPTIONS = {
    name: Parameter(option.help, option.kind_in("registration").schema) for name, option in CALLED_OPTIONS.items()
}
DRY_RUN = {"dry_run": Parameter("only say what would be, and whether it can be", FLAG)}
SIGNED = {"s3_sse_kms": Parameter("sign the download from an https address of S3", FLAG)}
PAGE_PARAMETERS = {
    "limit": Parameter("most entries in the answer, 1 to 100; 100 if not given", INTEGER),
    "next_page_token": Parameter("`nextPageToken` of the page before", INTEGER),
}
_ARCHIVE_PARAMETERS = {
    "url": Parameter("the archive's name in the model store, or its address"),
    "model_name": Parameter("in place of the manifest's name"),
    "handler": Parameter("in place of the manifest's handler"),
    "runtime": Parameter("of the workers", {"enum": ["python", "python3"]}),
    **_OF_OPTIONS,
    "initial_workers": Parameter("workers to start with", INTEGER),
    "synchronous": Parameter("wait until the workers have loaded the model", {**FLAG, "default": True}),
    **SIGNED,
    **DRY_RUN,
}
COPY_OF: Final = "copy_of"
_OF_COPIES = {
    COPY_OF: Parameter("in place of url: a copy of this model, to be measured; no snapshot or document has it"),
    "model_version": Parameter("of a copy: the version that is copied; the default one if not given"),
    "threads": Parameter("of a copy: threads of each worker, in place of the version's", INTEGER),
    "padding_budget": Parameter("of a copy: in place of the version's paddingBudget", {"type": "number"}),
}
REGISTER_PARAMETERS = {**_ARCHIVE_PARAMETERS, **_OF_COPIES}
SWAP_PARAMETERS = {
    **_ARCHIVE_PARAMETERS,
    "version": Parameter("whose place is taken; if not given, that of the archive's own name, else the default"),
    "order": Parameter("as the setting swap_order if not given", {"enum": ["load_first", "unload_first"]}),
    "keep_old": Parameter("leave the other version registered", {**FLAG, "default": False}),
    "check": Parameter("send the new version its samples before it answers", {**FLAG, "default": True}),
}
SCALE_PARAMETERS = {
    "min_worker": Parameter("fewest workers, 0 ends them all; 1 if not given", INTEGER),
    "max_worker": Parameter("most workers; `min_worker` if not given", INTEGER),
    "synchronous": Parameter("wait until the workers have loaded the model", {**FLAG, "default": False}),
    "model_version": Parameter("the version, where the path names none; the default one if not given"),
    # TorchServe documents these two and ignores them; its clients still send them.
    "timeout": Parameter("not used", INTEGER),
    "number_gpu": Parameter("not used", INTEGER),
    **{name: _OF_OPTIONS[name] for name in ("batch_size", "max_batch_delay")},
    **DRY_RUN,
}
UNREGISTER_PARAMETERS = {
    "model_version": Parameter("the version, where the path names none; needed if there are several"),
    "force": Parameter("also a version that has a weight or a label, and these with it", FLAG),
    **DRY_RUN,
}
WORKFLOW_PARAMETERS = {
    "url": Parameter("the archive's name in the workflow store"),
    "workflow_name": Parameter("in place of the manifest's name"),
    **{name: _OF_OPTIONS[name] for name in ("response_timeout", "startup_timeout")},
    **SIGNED,
}


class QueryParameters:
    """Parameters from a query string; the last of a name counts. `known` are the names that are used."""

    def __init__(self, values: Mapping[str, str], known: Collection[str]) -> None:
        self._values = values
        self.warnings = _unknown(values, known)

    @property
    def names(self) -> Collection[str]:
        """The names of all given parameters, known or not."""
        return self._values.keys()

    def has(self, name: str) -> bool:
        """Whether a value is given."""
        return self._values.get(name) is not None

    def text(self, name: str) -> str | None:
        """The value, or None."""
        return self._values.get(name)

    def integer(self, name: str) -> int | None:
        """The value as a whole number; None if it is not given or does not parse."""
        word = self._values.get(name)
        if word is None:
            return None
        if _INTEGER(word) and -_LARGEST - 1 <= (number := int(word)) <= _LARGEST:
            return number
        self.warnings.append(f"{name} is {_shown(word)}, which is no whole number; it counts as not given")
        return None

    def whole(self, name: str) -> int | None:
        """As `integer`, but raises BadInput for a value that does not parse: the call would do something else."""
        word = self._values.get(name)
        number = None if word is None else self.integer(name)
        if word is not None and number is None:
            raise BadInput(f"{name} is {_shown(word)}; it must be a whole number of at most {_LARGEST}.")
        return number

    def up_to(self, name: str, default: int, most: int) -> int:
        """A whole number from 1 to `most`; `default` if it is not given. Raises BadInput for any other."""
        number = self.whole(name)
        if number is None:
            return default
        if not 1 <= number <= most:
            raise BadInput(f"{name} is {number}; it must be a whole number from 1 to {most}.")
        return number

    def flag(self, name: str, default: bool) -> bool:
        """True for the word `true` in any case, `default` where nothing is given, False for anything else."""
        word = self._values.get(name)
        if word is None:
            return default
        if word.lower() not in ("true", "false"):
            self.warnings.append(f"{name} is {_shown(word)}, which counts as false; say true or false")
        return word.lower() == "true"


class StrictParameters(QueryParameters):
    """Parameters of a query that was never recorded."""

    def flag(self, name: str, default: bool) -> bool:
        """True or False for the words `true` and `false` in any case, `default` where nothing is given.

        Raises BadInput for another word.
        """
        word = self._values.get(name)
        if word is not None and word.lower() not in ("true", "false"):
            raise BadInput(f"{name} is {_shown(word)}; it must be true or false.")
        return super().flag(name, default)


def read_strictly(values: Mapping[str, str], known: Collection[str]) -> StrictParameters:
    """The parameters of a query that was never recorded. Raises BadInput for a name that is not known."""
    given = StrictParameters(values, known)
    if given.warnings:
        raise BadInput(f"{without_stop(given.warnings[0])}.")
    return given


class JsonParameters:
    """Parameters from a JSON object; null counts as not given. Raises BadInput for values of another type."""

    def __init__(self, body: bytes, known: Collection[str]) -> None:
        """Read the object in `body`. Raises BadInput if it is no object."""
        try:
            values = json.loads(body) if body.strip() else None
        except (ValueError, RecursionError):
            raise BadInput("The body is not valid JSON.") from None
        if not isinstance(values, dict):
            raise BadInput("The body must be a JSON object that holds the parameters.")
        self._values: dict[str, Any] = values
        self.warnings = _unknown(values, known)

    @property
    def names(self) -> Collection[str]:
        """The names of all given parameters, known or not."""
        return self._values.keys()

    def has(self, name: str) -> bool:
        """Whether a value is given."""
        return self._values.get(name) is not None

    def text(self, name: str) -> str | None:
        """The value as text; a number counts as its digits."""
        value = self._values.get(name)
        if value is None:
            return None
        if isinstance(value, bool | list | dict):
            raise BadInput(f"{name} must be text.")
        try:
            str(value).encode()
        except UnicodeEncodeError:
            raise BadInput(f"{name} holds half of a surrogate pair, which is no text.") from None
        return str(value)

    def integer(self, name: str) -> int | None:
        """The value as a whole number; `"3"` and `3.0` are 3."""
        value = self._values.get(name)
        if value is None:
            return None
        if isinstance(value, str) and _INTEGER(value):
            value = int(value)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or not -_LARGEST - 1 <= value <= _LARGEST:
            raise BadInput(f"{name} must be a whole number of at most {_LARGEST}.")
        return value

    def whole(self, name: str) -> int | None:
        """As `integer`."""
        return self.integer(name)

    def flag(self, name: str, default: bool) -> bool:
        """The value as true or false; the words `"true"` and `"false"` count too."""
        value = self._values.get(name)
        if value is None:
            return default
        if isinstance(value, str) and value.lower() in ("true", "false"):
            return value.lower() == "true"
        if not isinstance(value, bool):
            raise BadInput(f"{name} must be true or false.")
        return value


Parameters = QueryParameters | JsonParameters


async def read_parameters(request: Request, known: Collection[str]) -> Parameters:
    """The parameters of a call: from the body alone if it is JSON, else from the query. Raises BadInput."""
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        return QueryParameters(request.query_params, known)
    body = await request.body()
    if len(body) > MOST_BODY_BYTES:
        raise BadInput(f"The body has {len(body)} bytes; parameters may have {MOST_BODY_BYTES}.")
    if len(body) > SHORT_BYTES:
        return await to_thread(JsonParameters, body, known)
    return JsonParameters(body, known)


def _unknown(values: Collection[str], known: Collection[str]) -> list[str]:
    warnings: list[str] = []
    for name in values:
        if name not in known:
            warnings.append(f"parameter {_shown(name)} is not known and not used{did_you_mean(name, known)}")
            if len(warnings) == MOST_WARNINGS:
                break
    return warnings


def _shown(word: str) -> str:
    return repr(word if len(word) <= 60 else word[:57] + "...")


def sign(url: str) -> str:
    """The address of an S3 object by which it is fetched with a signature. Raises BadInput for other addresses.

    KMS needs nothing else: S3 decrypts for clients that may read. Requests to `s3://` always have a signature.
    """
    if re.match(r"s3[an]?://", url, re.IGNORECASE):
        return url
    if not re.match(r"https://", url, re.IGNORECASE):
        raise BadInput(NO_KMS)
    return f"s3+{url}"


def read_registration(parameters: Parameters) -> RegisterParameters:
    """A registration's parameters, times in seconds. Raises BadInput if the URL, or a value in JSON, cannot be used."""
    url = parameters.text("url")
    if url is None:
        raise BadInput("Parameter url is required.")
    options = read_options(parameters)
    workers = parameters.integer("initial_workers")
    if workers is not None and workers < 0:
        parameters.warnings.append(f"initial_workers is {workers}, which counts as 0")
        workers = 0
    if parameters.flag("s3_sse_kms", False):
        url = sign(url)
    synchronous = parameters.flag("synchronous", True)
    return RegisterParameters(
        url=url,
        model_name=parameters.text("model_name") or None,
        handler=parameters.text("handler") or None,
        runtime=parameters.text("runtime"),
        options=options,
        initial_workers=workers,
        synchronous=synchronous,
        warnings=tuple(parameters.warnings),
    )


def read_copy(parameters: Parameters) -> CopyParameters:
    """The parameters of a copy. Raises BadInput for one that is missing, cannot be used, or is no copy's."""
    model, name = parameters.text(COPY_OF), parameters.text("model_name")
    if not model or not name:
        raise BadInput(f"A copy needs {COPY_OF}, the model, and model_name, its own name.")
    taken = {*_OF_COPIES, "model_name", "initial_workers", "synchronous"}
    if others := [each for each in parameters.names if each in REGISTER_PARAMETERS and each not in taken]:
        raise BadInput(f"{others[0]} is not of a copy, which is as the version that it copies; leave it out.")
    return CopyParameters(
        model,
        parameters.text("model_version") or None,
        name,
        _within(parameters, "initial_workers", 1, MOST_WORKERS) or 1,
        _within(parameters, "threads", 1, MOST_THREADS),
        _read_key(parameters, "padding_budget", "paddingBudget"),
        parameters.flag("synchronous", True),
    )


def _within(parameters: Parameters, name: str, least: int, most: int) -> int | None:
    number = parameters.whole(name)
    if number is not None and not least <= number <= most:
        raise BadInput(f"{name} is {number}; it must be a whole number from {least} to {most}.")
    return number


def _read_key(parameters: Parameters, name: str, key: str) -> Any:
    """The value of a parameter that is read as this key of a model's configuration."""
    word = parameters.text(name)
    if word is None:
        return None
    try:
        return read_value(key, float(word))
    except ValueError as error:
        why = str(error) if isinstance(error, Unusable) else "a number"
        raise BadInput(f"{name} is {_shown(word)}; it must be {without_stop(why)}.") from None


def read_options(parameters: Parameters, *names: str) -> Said:
    """What a call says of the options of these parameters, of all that it may say without names.

    Raises BadInput for a value that cannot be used.
    """
    return Said({CALLED_OPTIONS[name].attribute: _read_option(parameters, name) for name in names or CALLED_OPTIONS})


def _read_option(parameters: Parameters, name: str) -> Any:
    kind = CALLED_OPTIONS[name].kind_in("registration")
    value: object = None
    if kind.schema.get("type") == "integer":
        value = parameters.integer(name)
        value = None if value in _NOT_GIVEN.get(name, (-1,)) else value
    elif kind.schema.get("type") != "boolean":
        value = parameters.text(name)
    elif parameters.has(name):
        value = parameters.flag(name, False)
    if value is None:
        return None
    try:
        return kind.read(value)
    except Unusable as error:
        least = kind.schema.get("minimum")
        wanted = f"is {value!r}; it must be {error}" if least is None else f"must be {least} or more"
        raise BadInput(f"{name} {wanted}.") from None
