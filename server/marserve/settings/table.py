"""The table: every key, declared once, as a field of a section of `Settings`.

A field's type is that of its value. The call beside it says how the value is read, the default of `torchserve …`, that
of `marserve …` if it differs (`marserve=`), one sentence, unit and bounds. Keys of TorchServe keep its names and their
`TS_…` variables, of which only exceptions are named; every key can also be set as `MARSERVE_<KEY>` (`load.py` says when
each is read). Times are in seconds and sizes in bytes, except in keys whose names say otherwise.

`accepts=` marks a key whose value has no effect: it is accepted, and the sentence is logged once. `refuses=` marks a
key that asks, with any value but its default, for a feature that does not exist: the server does not start.
"""

# ruff: noqa: RUF009 - the calls beside the fields declare them

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

from marserve.settings.interpreters import INTERPRETERS, AllowedInterpreter
from marserve.settings.shown_address import hide_each, hide_query
from marserve.settings.stores import NO_STORES, STORES, Secret, Stores
from marserve.settings.values import (
    BOOL,
    CHOICE,
    FILE,
    FLOAT,
    FOLDERS,
    HOSTS,
    INT,
    INT_CHOICE,
    LENIENT_CHOICE,
    LOAD_MODELS,
    MINUTES,
    MODEL_MEMORY,
    MODELS,
    NO_MODELS,
    OPTIONAL_INT,
    OPTIONAL_TEXT,
    PATH,
    REGEX,
    REGEXES,
    ROUTE,
    SHARE,
    SIZE,
    TEXT,
    WORDS,
    Address,
    Kind,
    LoadModels,
    Models,
    address_kind,
)
from marserve.settings.watches import (
    EVENT_SECRETS,
    NO_SECRETS,
    STORE_POLICY,
    WATCHES,
    NewVersionPolicy,
    WatchedPlace,
)

Entry = Literal["torchserve", "marserve"]
T = TypeVar("T")


@dataclass(frozen=True)
class Key:
    """The declaration of one key. `defaults` are by entry; `ts_env` and `always_env` are variables' names.

    `example` is the value that the root `config.properties` sets. `hide` removes parts of a text that may be secret.
    TorchServe's keys keep its precedence.
    """

    name: str
    kind: Kind[Any]
    sentence: str
    defaults: Mapping[Entry, Any]
    unit: str = ""
    minimum: float | None = None
    maximum: float | None = None
    choices: tuple[str, ...] = ()
    ts_env: str | None = None
    always_env: str | None = None
    accepts: str | None = None
    refuses: str | None = None
    example: str | None = None
    is_secret: bool = False
    hide: Callable[[str], str] | None = None
    is_torchserves: bool = True

    @property
    def env(self) -> str:
        """Marserve's variable that sets it."""
        return f"MARSERVE_{self.name.upper()}"

    def show(self, value: object) -> str:
        """The value as it is written in the file; secrets are hidden."""
        return self.show_text(self.kind.write(value))

    def show_text(self, text: str) -> str:
        """The same for a value as it was written."""
        if self.is_secret:
            return "***"
        return text if self.hide is None else self.hide(text)


@dataclass(frozen=True)
class Origin:
    """The place of a key's value: `config.properties, line 14`, `--model-store`, `TS_JOB_QUEUE_SIZE`.

    `raw` is the text before variables took the place of `$$NAME$$`, None without such variables.
    `is_default`: it comes from the file of defaults, which has the lowest precedence.
    """

    where: str
    text: str
    raw: str | None = None
    is_default: bool = False


_SAME = cast(Any, object())


def _key(kind: Kind[T], default: T, sentence: str, *, marserve: T = _SAME, **facts: Any) -> T:
    """A key of TorchServe's. Its variable is `TS_` and its name, unless `ts_env` is given."""
    defaults = {"torchserve": default, "marserve": default if marserve is _SAME else marserve}
    facts |= {"kind": kind, "sentence": sentence, "defaults": defaults}
    declared: Any = field(default_factory=lambda: default, metadata={"key": facts})
    return cast(T, declared)


def _own(kind: Kind[T], default: T, sentence: str, *, marserve: T = _SAME, **facts: Any) -> T:
    """A key that TorchServe does not have."""
    return _key(kind, default, sentence, marserve=marserve, ts_env=None, is_torchserves=False, **facts)


_JVM = "the Java server's, without effect here"


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class Addresses:
    """Addresses and transport."""

    inference_address: Address = _key(
        address_kind(80, 443),
        Address("http", "127.0.0.1", 8080),
        "Where predictions are answered: http://host:port, https://host:port or unix:/path.",
        example="http://127.0.0.1:8080",
    )
    management_address: Address = _key(
        address_kind(8081, 8444),
        Address("http", "127.0.0.1", 8081),
        "Where models are managed; may be the same as inference_address.",
        example="http://127.0.0.1:8081",
    )
    metrics_address: Address = _key(
        address_kind(8082, 8445),
        Address("http", "127.0.0.1", 8082),
        "Where metrics are shown.",
        example="http://127.0.0.1:8082",
    )
    private_key_file: Path | None = _key(PATH, None, "The private key (PEM) for https addresses.")
    certificate_file: Path | None = _key(
        PATH, None, "The certificate, or chain of certificates (PEM), for https addresses."
    )
    keystore: Path | None = _key(
        PATH,
        None,
        "A PKCS12 keystore with key and certificate for https addresses, in place of PEM files; reading it needs "
        "marserve[security].",
    )
    keystore_pass: str = _key(TEXT, "changeit", "The keystore's password.", is_secret=True)
    keystore_type: str = _key(TEXT, "PKCS12", "The keystore's format; no other can be read.")
    cors_allowed_origin: str | None = _key(
        OPTIONAL_TEXT,
        None,
        "Origin whose pages may call from a browser, or `*`: sent with every answer, as it stands. `marserve` takes a "
        "list, in commas, and sends back the one that asks. Where no key is asked for, pages of other origins change "
        "nothing.",
    )
    cors_allowed_methods: str | None = _key(OPTIONAL_TEXT, None, "Methods that such pages may use, as in `GET, POST`.")
    cors_allowed_headers: str | None = _key(OPTIONAL_TEXT, None, "Headers that such pages may send.")
    grpc_inference_address: str = _key(TEXT, "127.0.0.1", "Host of the gRPC inference API.")
    grpc_management_address: str = _key(TEXT, "127.0.0.1", "Host of the gRPC management API.")
    grpc_inference_port: int = _key(INT, 7070, "Port of the gRPC inference API.", minimum=0, maximum=65534)
    grpc_management_port: int = _key(INT, 7071, "Port of the gRPC management API.", minimum=0, maximum=65534)
    grpc_inference_max_connection_age_ms: int | None = _key(
        OPTIONAL_INT,
        None,
        "How long a gRPC inference connection may live; no limit if not given.",
        unit="ms",
        minimum=1,
    )
    grpc_management_max_connection_age_ms: int | None = _key(
        OPTIONAL_INT,
        None,
        "How long a gRPC management connection may live; no limit if not given.",
        unit="ms",
        minimum=1,
    )
    grpc_inference_max_connection_age_grace_ms: int | None = _key(
        OPTIONAL_INT, None, "How long calls may go on when such a connection is too old.", unit="ms", minimum=1
    )
    grpc_management_max_connection_age_grace_ms: int | None = _key(
        OPTIONAL_INT, None, "How long calls may go on when such a connection is too old.", unit="ms", minimum=1
    )
    enable_grpc_ssl: bool = _key(BOOL, False, "TLS on the gRPC ports, with certificate_file and private_key_file.")
    grpc_max_connection_idle_ms: int | None = _own(
        OPTIONAL_INT,
        None,
        "How long a gRPC connection may have no call until its client is asked to go; no limit if not given.",
        unit="ms",
        minimum=1,
    )
    grpc_keepalive_time: float = _own(
        FLOAT,
        60.0,
        "After how long a silence the client of a gRPC connection is asked whether it is still there.",
        unit="s",
        minimum=1,
    )
    grpc_keepalive_timeout: float = _own(
        FLOAT, 20.0, "How long that client may take to answer before its connection is cut.", unit="s", minimum=1
    )
    grpc_min_ping_interval: float = _own(
        FLOAT,
        10.0,
        "How often a gRPC client may ask whether the server is there; one that asks more often is sent away.",
        unit="s",
        minimum=0,
    )
    grpc_max_calls_per_connection: int = _own(
        INT, 1024, "Calls that one gRPC connection may have under way; further ones wait in the client.", minimum=1
    )
    ts_open_inference_protocol: bool = _key(
        BOOL,
        False,
        "Answer the Open Inference Protocol (/v2) too; the variable's word for yes is `oip`.",
        marserve=True,
        always_env="TS_OPEN_INFERENCE_PROTOCOL",
        ts_env=None,
    )
    open_inference_control: bool = _own(
        BOOL,
        False,
        "Take calls of the Open Inference Protocol that change the server (loading and unloading models, registering "
        "shared memory, settings of the log and of traces) at the inference address too, with the management key; at "
        "the management address they are always taken.",
    )
    system_shared_memory_folder: Path | None = _own(
        PATH,
        None,
        "The folder whose files clients of the Open Inference Protocol may register as system shared memory, as "
        "/dev/shm; none if not given. They may read and write each file of it that the server can.",
    )
    system_shared_memory_size: int = _own(
        SIZE,
        1 << 30,
        "Bytes that all registered regions together may have, and the inputs of one request that lie in them.",
        minimum=1,
    )
    system_shared_memory_max_regions: int = _own(
        INT, 1024, "Regions of system shared memory that may be registered.", minimum=1
    )
    health_route: str | None = _own(
        ROUTE,
        None,
        "A further path for a platform that chooses it (Vertex AI) to ask whether the server is ready: 200, else 503.",
        always_env="AIP_HEALTH_ROUTE",
    )
    predict_route: str | None = _own(
        ROUTE,
        None,
        "A further path that predicts with the only model loaded at start, for platforms that choose it (Vertex AI).",
        always_env="AIP_PREDICT_ROUTE",
    )
    enable_docs: bool = _own(
        BOOL,
        False,
        "Answer / with what the server is, /openapi.json with the API description, and /docs with a page that shows "
        "the routes and tries models, on each HTTP port. The inference port then lists its models' names, and "
        "marserve's management port has the dashboard.",
        marserve=True,
    )
    sagemaker_endpoints: bool = _own(
        BOOL, False, "Answer /ping and /execution-parameters as SageMaker's plug-in for TorchServe does."
    )
    use_native_io: bool = _key(
        BOOL,
        True,
        "With false, `unix:` addresses are refused.",
        accepts="workers use socket pairs either way",
        ts_env=None,
    )


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class ModelsAndWorkers:
    """Models and workers."""

    model_store: Path | None = _key(
        PATH,
        None,
        "The folder of archives; `torchserve` needs one, here or with --model-store.",
        marserve=Path("model_store"),
        example="model_store",
    )
    workflow_store: Path | None = _key(PATH, None, "The folder of workflow archives; the model store if not given.")
    model_roots: tuple[Path, ...] = _own(
        FOLDERS,
        (),
        "Further folders: a registration's url may be the absolute path of an archive or a model's folder below one.",
    )
    load_models: LoadModels = _key(
        LOAD_MODELS,
        (),
        "What to load at start: all, or a list of archives in the store.",
        example="all",
        hide=hide_each,
    )
    strict_start: bool = _own(
        BOOL,
        False,
        "Whether the server ends, with exit status 1, when a model of the start cannot be loaded; else it is left out, "
        "and /readyz says so.",
    )
    models: Models = _key(
        MODELS,
        NO_MODELS,
        'How versions are served: {"name": {"version": {"minWorkers": 1, "maxWorkers": 1, "batchSize": 1, '
        '"maxBatchDelay": 100, "responseTimeout": 120, "startupTimeout": 120}}}. It loads nothing.',
        ts_env=None,
    )
    model_snapshot: str | None = _key(
        OPTIONAL_TEXT,
        None,
        "The models to load at start, and how each is served, as in a snapshot (JSON); load_models is then not used.",
        ts_env=None,
    )
    desired_state: str | None = _own(
        OPTIONAL_TEXT,
        None,
        "The document that names the server's models: a file, or the address of an object. It alone decides: "
        "load_models and model_snapshot must not be set too, and snapshots are not read.",
        hide=hide_query,
    )
    desired_state_changes: Literal["refuse", "adopt"] = _own(
        CHOICE,
        "refuse",
        "Calls that change models while a desired state decides: they are refused, or written into its document.",
        choices=("refuse", "adopt"),
    )
    desired_state_interval: float = _own(
        FLOAT,
        10.0,
        "Pause between two looks for changes of the desired state's document, a quarter more or less.",
        unit="s",
        minimum=0.1,
    )
    undo_window: float = _own(
        FLOAT,
        300.0,
        "How long versions stay loaded that a change of the desired state has replaced or removed, so that undo only "
        "switches; 0: not at all. They end earlier if their memory is needed.",
        unit="s",
        minimum=0,
    )
    default_workers_per_model: int = _key(
        INT,
        0,
        "Workers of a model without a number of its own; 0: at start one for each accelerator, without any one on all "
        "cores (under torchserve one for each core), and none for a registration that names none.",
        minimum=0,
    )
    job_queue_size: int = _key(INT, 100, "Requests of a model version that may wait.", minimum=1)
    default_response_timeout: int = _key(INT, 120, "How long a worker may take for a batch.", unit="s", minimum=1)
    default_startup_timeout: int = _key(INT, 120, "How long a worker may take to load its model.", unit="s", minimum=1)
    unregister_model_timeout: int = _key(
        INT, 120, "How long stopping the workers of a model may take.", unit="s", minimum=0
    )
    number_of_gpu: int | None = _key(
        OPTIONAL_INT,
        None,
        "Use at most so many accelerators; all that are visible if not given. 0: none is looked for.",
        minimum=0,
    )
    cpu_pinning: Literal["off", "near", "cores"] = _own(
        CHOICE,
        "off",
        "Whether workers keep to processors: with an accelerator to those near it (its NUMA node), or to as many cores "
        "of their own as they have threads. A model's own `cpuPinning` comes first.",
        choices=("off", "near", "cores"),
    )
    default_service_handler: str | None = _key(OPTIONAL_TEXT, None, "Handler of archives that name none.")
    service_envelope: str | None = _key(
        OPTIONAL_TEXT,
        None,
        "Envelope around all handlers: body, json, kserve, kservev2, or a module with a class of that kind.",
    )
    decode_input_request: bool = _key(BOOL, True, "Hand JSON and text bodies to handlers decoded.")
    invalid_json: Literal["pass", "refuse"] = _own(
        CHOICE,
        "pass",
        "What becomes of an application/json body that is not JSON, where a model's `invalidJson` does not say: refuse "
        "answers 400 with line and column, pass gives its bytes to the handler.",
        marserve="refuse",
        choices=("pass", "refuse"),
    )
    limit_max_image_pixels: bool = _key(BOOL, True, "Keep Pillow's limit on the size of pictures in vision handlers.")
    install_py_dep_per_model: bool = _key(BOOL, False, "Install the requirements that archives bring.")
    default_requirements_file: str | None = _own(
        OPTIONAL_TEXT,
        None,
        "Requirements file of models without a manifest: where it is there it is installed, into an environment of the "
        "model's own.",
    )
    allowed_interpreters: tuple[AllowedInterpreter, ...] = _own(
        INTERPRETERS,
        (),
        "Interpreters (CPython 3.10 to 3.13, with msgspec) that a model's configuration may name for its workers: by "
        "`python: PATH`, or by `environment: NAME`; none if not given.",
    )
    watch_model_store: NewVersionPolicy | None = _own(
        STORE_POLICY,
        None,
        "The policy for archives that appear in the model store while the server runs; off: the store is not watched.",
    )
    watches: tuple[WatchedPlace, ...] = _own(
        WATCHES, (), 'Further watched places: [{"place": "s3://bucket/models/", "policy": "load"}].'
    )
    watch_interval: float = _own(
        FLOAT,
        30.0,
        "Pause between two looks at a place that is watched; folders tell of most changes at once.",
        unit="s",
        minimum=1,
    )
    watch_settle_time: float = _own(
        FLOAT, 2.0, "How long a file in a watched folder must stay unchanged before it counts.", unit="s", minimum=0
    )
    late_event_timeout: float = _own(
        FLOAT, 60.0, "How long to look for an object in its store after an event has announced it.", unit="s", minimum=0
    )
    download_connections: int = _own(
        INT,
        8,
        "Connections that one download may use at a time, where its origin lets it be read in parts; 1: no parts.",
        minimum=1,
        maximum=64,
    )
    download_cache: Path | None = _own(
        PATH,
        None,
        "The folder that keeps fetched files by their content, for all servers of the machine; if not given, they are "
        "kept only in the model store.",
    )
    download_cache_size: int = _own(
        SIZE, 50 << 30, "The size of that folder; the least recently used files are deleted first.", minimum=0
    )
    archive_digests: Literal["given", "beside", "required"] = _own(
        CHOICE,
        "given",
        "Which SHA-256 digests of fetched archives are compared: those given as #sha256=HEX in addresses; those beside "
        "archives, as NAME.sha256, as well; or required: there must be one or the other.",
        choices=("given", "beside", "required"),
    )
    keep_fetched_archives: bool = _own(
        BOOL,
        False,
        "Whether an archive that the server fetched stays in the model store when its last version is unregistered.",
    )
    late_archive_timeout: float = _own(
        FLOAT,
        0.0,
        "How long to wait for an archive that its origin does not have (404), at the start and in registrations.",
        unit="s",
        minimum=0,
        marserve=2.0,
    )
    environment_folder: Path | None = _own(
        PATH,
        None,
        "The folder for installed requirements of archives; `marserve/environments` in the user's cache folder if not "
        "given.",
    )
    environment_cache_size: int = _own(
        SIZE,
        20 << 30,
        "The size of that folder; environments that no model uses are deleted first. 0: no limit.",
        minimum=0,
    )
    environment_timeout: int = _own(
        INT, 1800, "How long the installation of one archive's requirements may take.", unit="s", minimum=1
    )
    blacklist_env_vars: re.Pattern[str] | None = _key(
        REGEX, None, "Variables whose whole name matches are hidden from workers."
    )
    initial_worker_port: int = _key(INT, 9000, "Worker ids count up from here.", minimum=0)
    initial_distribution_port: int = _key(
        INT, 29500, "Ids of workers with a `parallelLevel` count up from here, in steps of it.", minimum=0
    )
    autoscale: bool = _own(
        BOOL,
        False,
        "Whether the number of workers follows the need between a model's least and most; a model's own `autoscale` "
        "comes first.",
        marserve=True,
    )
    max_worker_memory: int = _own(
        SIZE,
        0,
        "Memory that a worker may hold by itself; 0: no limit. A model's own `maxWorkerMemory` comes first.",
        minimum=0,
    )
    model_memory: int | Literal["auto"] = _own(
        MODEL_MEMORY,
        0,
        "Memory for models, all of their processes together: a load that would not fit is refused before it starts. "
        "auto: what the machine, or the container, has, less a tenth (256 MiB at least); 0: no limit.",
        minimum=0,
        marserve="auto",
    )
    model_load: Literal["start", "on_demand"] = _own(
        CHOICE,
        "start",
        "When models are loaded: at once, or when the first request asks (on_demand); they then make room for others. "
        "A model's own `load` comes first.",
        choices=("start", "on_demand"),
    )
    least_residence: float = _own(
        FLOAT,
        10.0,
        "How long a model that was loaded on demand stays at least before it makes room for another.",
        unit="s",
        minimum=0,
    )
    worker_cgroup: Path | None = _own(
        PATH,
        None,
        "An empty cgroup v2 folder that the server may write: workers with a memory limit get a group each in it.",
    )
    ray_address: str = _own(
        TEXT,
        "auto",
        "The Ray cluster for models with `launcher: ray`: HOST:PORT of its head, or auto for the one that a node on "
        "this machine belongs to. Nothing connects before such a model is loaded.",
    )
    ray_connect_timeout: float = _own(FLOAT, 20.0, "How long joining that cluster may take.", unit="s", minimum=1)
    ray_listen: str = _own(
        TEXT,
        "",
        "HOST:PORT where the server awaits its agents on the cluster's nodes; if not given, this machine's address in "
        "the cluster and a free port.",
    )
    ray_advertise: str = _own(
        TEXT, "", "HOST:PORT that agents connect to, if it is not the address at which the server listens."
    )
    ray_tls: bool = _own(
        BOOL,
        True,
        "Encrypt the connections of server and agents, and have each show a certificate that the server made.",
    )
    ray_cache: str = _own(
        TEXT,
        "",
        "The folder on the cluster's nodes for unpacked archives; if not given, marserve/node in the user's cache.",
    )
    ray_cache_size: int = _own(
        SIZE, 64 << 30, "The size of that folder; archives that no worker uses are deleted first.", minimum=0
    )
    swap_order: Literal["load_first", "unload_first"] = _own(
        CHOICE,
        "load_first",
        "When a swap loads the new archive: beside the old one, with memory for both and no gap, or after that has "
        "ended (unload_first).",
        choices=("load_first", "unload_first"),
    )
    optimise_share: float = _own(
        FLOAT,
        0.25,
        "How much of a processor core the search for a faster build may take beside what serves, for models whose "
        "configuration has `optimise`: 0.25 is a quarter. 0: none is looked for. As `torchserve` none is.",
        minimum=0,
        maximum=64,
    )
    readiness_rule: Literal["any", "min", "all"] = _own(
        CHOICE,
        "any",
        "How many loaded workers make a model ready: one, its minWorkers, or all there should be. A model's own "
        "`readinessRule` comes first.",
        choices=("any", "min", "all"),
    )
    worker_threads: int = _own(
        INT, 0, "Threads that a CPU worker computes with; 0: the cores divided among the model's workers.", minimum=0
    )
    ts_header_key_sequence_id: str = _key(
        TEXT, "ts_request_sequence_id", "Header with the id of a sequence.", ts_env="TS_HEADER_KEY_SEQUENCE_ID"
    )
    ts_header_key_sequence_start: str = _key(
        TEXT, "ts_request_sequence_start", "Header that begins a sequence.", ts_env="TS_HEADER_KEY_SEQUENCE_START"
    )
    ts_header_key_sequence_end: str = _key(
        TEXT, "ts_request_sequence_end", "Header that ends a sequence.", ts_env="TS_HEADER_KEY_SEQUENCE_END"
    )


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class Security:
    """Security."""

    disable_token_authorization: bool = _key(
        BOOL, False, "Serve all clients; with false requests need a key of token_file.", marserve=True, example="true"
    )
    token_expiration_min: float = _key(
        MINUTES, 60.0, "How long a token is good for.", unit="min", minimum=0, ts_env="TS_TOKEN_EXPIRATION_TIME_MIN"
    )
    token_file: Path = _own(
        FILE,
        Path("key_file.json"),
        "Where the server writes the keys that clients must send; only its owner may read the file.",
    )
    allow_open_ping: bool = _own(
        BOOL,
        False,
        "Answer /ping without a token, as the other health probes; with false it needs one while tokens are on.",
    )
    allow_open_inference: bool = _own(
        BOOL, False, "Answer inference without a token; management still needs one while tokens are on."
    )
    enable_model_api: bool = _key(
        BOOL, False, "Let the management API register and remove models.", marserve=True, example="true"
    )
    allow_uploads: Literal["protected", "true", "false"] = _own(
        CHOICE,
        "false",
        "Let clients upload archives into the model store (with enable_model_api=true): protected: with the management "
        "key, and without keys from this machine; true: from everywhere.",
        marserve="protected",
        choices=("protected", "true", "false"),
    )
    allow_open_management: bool = _own(
        BOOL, False, "Let the management API listen beyond this machine although nothing authenticates its callers."
    )
    allowed_hosts: tuple[str, ...] = _own(
        HOSTS,
        (),
        "Hosts that requests without a key may name in their Host, *.example.com for those below one, * for all; if "
        "not given, this machine's own names for an address on loopback, and all for any other.",
    )
    unprotected_management: Literal["refuse", "loopback"] = _own(
        CHOICE,
        "refuse",
        "With unprotected management addresses beyond this machine the server does not start, or only callers on this "
        "machine may use management.",
        choices=("refuse", "loopback"),
    )
    allowed_urls: tuple[str, ...] = _key(
        REGEXES, (), "Patterns of URLs that archives may be fetched from; none if not given."
    )
    use_env_allowed_urls: bool = _key(
        BOOL, False, "Take allowed_urls from TS_ALLOWED_URLS (with enable_envvars_config=true).", ts_env=None
    )
    enable_envvars_config: bool = _key(
        BOOL, False, "Let TS_ variables override this file; counts only in the file itself.", ts_env=None
    )
    stores: Stores = _own(
        STORES,
        NO_STORES,
        'Options of object stores, by the beginnings of their addresses: {"s3://bucket/": {"region": "eu-west-1"}}.',
        is_secret=True,
    )
    event_secrets: Mapping[str, Secret] = _own(
        EVENT_SECRETS,
        NO_SECRETS,
        'Secrets of the senders of object stores\' events, by source: {"minio": {"env": "MINIO_EVENT_SECRET"}}.',
        is_secret=True,
    )
    trusted_models: tuple[str, ...] = _own(
        WORDS,
        (),
        "Archives, by name or SHA-256, whose pickles are opened unchecked, whose native code is loaded, and whose "
        "workers may be programs.",
    )


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class Observing:
    """Metrics and logs."""

    enable_metrics_api: bool = _key(BOOL, True, "Open metrics_address.")
    metrics_mode: Literal["log", "prometheus", "legacy"] = _key(
        LENIENT_CHOICE,
        "log",
        "With prometheus metrics are at metrics_address, with log they are lines in ts_metrics.log and "
        "model_metrics.log, with legacy lines too, except for three counters.",
        marserve="prometheus",
        choices=("log", "prometheus", "legacy"),
        example="prometheus",
    )
    metrics_config: Path | None = _key(PATH, None, "A YAML file that lists the metrics; not given: the built-in list.")
    model_metrics_auto_detect: bool = _key(BOOL, False, "Accept handlers' metrics that the list does not name, too.")
    disable_system_metrics: bool = _key(
        BOOL, False, "Show nothing of the machine's processor, memory, disk and accelerators."
    )
    system_metrics_cmd: str | None = _key(
        OPTIONAL_TEXT,
        None,
        "Python code that measures the machine in the server's place: a script and its arguments.",
        ts_env=None,
    )
    metric_time_interval: int = _key(INT, 60, "How often the machine is measured.", unit="s", minimum=1, ts_env=None)
    log_location: Path | None = _own(
        PATH,
        Path("logs"),
        "Folder of access_log.log, ts_log.log and model_log.log; not given: standard output only.",
        marserve=None,
        always_env="LOG_LOCATION",
    )
    metrics_location: Path | None = _own(
        PATH,
        Path("logs"),
        "Folder of ts_metrics.log and model_metrics.log; not given: log_location.",
        marserve=None,
        always_env="METRICS_LOCATION",
    )
    log_format: Literal["text", "json"] = _own(
        CHOICE, "text", "Lines as TorchServe prints them, or one JSON object a line.", choices=("text", "json")
    )
    access_log_request_id: bool = _own(
        BOOL,
        False,
        "Whether text lines of the access log end with the request's id, as TorchServe's do not; JSON always has it.",
        marserve=True,
    )
    access_log_sample: float = _own(
        FLOAT,
        1.0,
        "The share of requests that have a line in the access log, 0 to 1, chosen by their ids. Those that failed "
        "(4xx, 5xx, broken streams) or were slow always have one.",
        minimum=0,
        maximum=1,
    )
    access_log_slow: float = _own(
        FLOAT, 1.0, "From when on a request is slow to access_log_sample.", unit="s", minimum=0
    )
    log_request_ids: bool = _own(
        BOOL,
        False,
        "Whether text lines of the server and model log name the requests that they belong to; JSON always does.",
        marserve=True,
    )
    take_request_id: bool = _own(
        BOOL,
        False,
        "Whether a client's X-Request-Id is the id of its request; if not, it only stands beside it in the logs.",
        marserve=True,
    )
    log_level: Literal["debug", "info", "warning", "error"] = _own(
        CHOICE, "info", "The least level of the server log.", choices=("debug", "info", "warning", "error")
    )
    loop_stall_threshold: float = _own(
        FLOAT,
        1.0,
        "How long the server's event loop may stand still until the log says what holds it.",
        unit="s",
        minimum=0.05,
    )
    livez_after_stall: float = _own(
        FLOAT,
        0.0,
        "How long /livez is 503 after such a stall, so that a server that stalls again and again is started anew.",
        marserve=10.0,
        unit="s",
        minimum=0,
    )
    abort_when_stuck: float = _own(
        FLOAT,
        0.0,
        "How long the event loop may stand still until the process ends itself, with exit status 70 and the place in "
        "the log. 0: it never does.",
        unit="s",
        minimum=0,
    )
    async_logging: bool = _key(
        BOOL, False, "Log without making requests wait.", accepts="logging never waits here, whatever this says"
    )


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class Limits:
    """Limits."""

    max_request_size: int = _key(INT, 6_553_500, "The largest request body.", unit="bytes", minimum=0)
    max_response_size: int = _key(INT, 6_553_500, "The largest answer of a handler.", unit="bytes", minimum=0)
    max_request_line: int = _own(INT, 8 * 1024, "The longest request line; longer: 414.", unit="bytes", minimum=64)
    max_header_bytes: int = _own(
        INT, 64 * 1024, "All headers of a request together; more: 431.", unit="bytes", minimum=256
    )
    max_header_lines: int = _own(INT, 100, "Headers of a request; more: 431.", minimum=1)
    header_timeout: float = _own(
        FLOAT, 10.0, "How long a client may take to send its headers; longer: 408.", unit="s", minimum=0.01
    )
    body_timeout: float = _own(
        FLOAT,
        30.0,
        "How long a client that sends less than min_body_rate may take for a body; longer: 408.",
        unit="s",
        minimum=0.01,
    )
    min_body_rate: int = _own(
        INT,
        1024,
        "Bytes a second, over 10 s, under which a body is too slow: 408. 0: no such limit.",
        unit="bytes/s",
        minimum=0,
    )
    write_timeout: float = _own(
        FLOAT, 60.0, "How long a client may take none of its answer before it is cut off.", unit="s", minimum=0.01
    )
    keep_alive_timeout: float = _own(
        FLOAT, 75.0, "How long a connection may stay idle between requests.", unit="s", minimum=0.01
    )
    max_connections: int = _own(
        INT, 10_000, "Connections of a listener; more are closed at once. 0: no limit.", minimum=0
    )
    max_connections_per_address: int = _own(
        INT, 5_000, "Connections from one address; more are closed at once. 0: no limit.", minimum=0
    )
    max_bytes_in_flight: int | Literal["auto"] = _own(
        MODEL_MEMORY,
        "auto",
        "Bytes of requests that are read or run, and of answers that wait for their clients, all together. Beyond it "
        "bodies wait unread, then are refused (503); for those up to 64 KiB there is a sixteenth more, at least 4 MiB. "
        "auto: a quarter of the memory of the machine, or the container; 0: no limit.",
        minimum=0,
    )
    large_answer_memory: int = _own(
        SIZE,
        256 * 1024**2,
        "Memory of all answers over 1 MiB together, while their clients take them. More waits in files below "
        "`temporary_folder`, as do answers to slow clients; on the way there memory may hold three times as much.",
        minimum=16 * 1024**2,
    )
    large_answer_disk: int = _own(
        SIZE,
        32 * 1024**3,
        "Files of all such answers together; a tenth of the disk stays free in any case. Beyond both limits the answer "
        "that waits longest is cut off.",
        minimum=0,
    )
    max_archive_bytes: int = _own(INT, 64 * 1024**3, "What an archive may hold, unpacked.", unit="bytes", minimum=1)
    max_upload_size: int = _own(SIZE, 16 << 30, "The largest archive that a client may upload; larger: 413.", minimum=1)
    max_archive_entries: int = _own(INT, 50_000, "Files and folders an archive may hold.", minimum=1)


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class Life:
    """Starting and stopping."""

    drain_timeout: float = _own(
        FLOAT, 30.0, "How long accepted requests may still take when the server stops.", unit="s", minimum=0
    )
    drain_delay: float = _own(
        FLOAT,
        0.0,
        "How long to go on accepting, with /readyz already at 503, before the server begins to stop. Containers want "
        "5, the time until load balancers have noticed.",
        unit="s",
        minimum=0,
    )
    max_parallel_loads: int = _own(
        INT,
        0,
        "How many model versions load for the first time at once; the others wait their turn. 0: twice the cores, at "
        "least 8.",
        minimum=0,
    )
    preemption_file: Path | None = _own(
        PATH,
        None,
        "A file that appears when this machine is to be taken away: the server then stops as on SIGTERM. Its folder "
        "must exist, the file must not.",
    )
    preemption_signal: Literal["none", "SIGUSR1", "SIGUSR2", "SIGHUP", "SIGPWR", "SIGQUIT"] = _own(
        CHOICE,
        "none",
        "A signal with the same meaning.",
        choices=("none", "SIGUSR1", "SIGUSR2", "SIGHUP", "SIGPWR", "SIGQUIT"),
    )
    preemption_interval: float = _own(
        FLOAT,
        1.0,
        "Pause between two looks for the file, and two questions to plug-ins whether the machine is to be taken away.",
        unit="s",
        minimum=0.05,
    )
    unavailable_status: Literal[503, 429] = _own(
        INT_CHOICE, 503, "Status of a request that comes while a queue is full.", choices=("503", "429")
    )
    flight_recorder_size: int = _own(
        SIZE,
        8 * 1024**2,
        "Memory for what became of the last requests, a timeline of some 1 KiB each: the newest ones, and of each "
        "model the slowest of the last hour and the latest that failed. 0: none are kept, and stages have no "
        "histograms.",
        minimum=0,
    )
    flight_recorder_file: Path | None = _own(
        PATH,
        None,
        "A file for the same, of that size, which outlives the server: after a crash `marserve explain --previous` "
        "reads what it leaves. Writing it costs each request some microseconds.",
    )
    tracing: Literal["off", "otlp"] = _own(
        CHOICE,
        "off",
        "Send a trace of each request, its stages as spans, to a collector of OpenTelemetry; needs marserve[otlp]. "
        "`OTEL_EXPORTER_OTLP_ENDPOINT` and OpenTelemetry's other variables say where and how.",
        choices=("off", "otlp"),
    )
    trace_sample: float | Literal["auto"] = _own(
        SHARE,
        "auto",
        "The share of traces that are sent, of those that begin here; of others their caller decides. auto: as "
        "`OTEL_TRACES_SAMPLER` and `OTEL_TRACES_SAMPLER_ARG` say, else all.",
        minimum=0,
        maximum=1,
    )
    trace_slower_than: float = _own(
        FLOAT,
        1.0,
        "Requests that took longer are sent whatever their share, as are all that failed. 0: only those that failed.",
        unit="s",
        minimum=0,
    )
    body_sample: float = _own(
        FLOAT,
        0.0,
        "The share of requests whose headers and bodies, and whose answers, are written to the server's log while that "
        "is at the level DEBUG. They may hold what nobody should read: for debugging only.",
        minimum=0,
        maximum=1,
    )
    body_sample_size: int = _own(
        SIZE, 4096, "How much of each body such a record has, at most.", minimum=1, maximum=1024**2
    )
    body_sample_hide: tuple[str, ...] = _own(
        WORDS,
        (
            *("*password*", "*passwd*", "*secret*", "*token*", "*api_key*", "*apikey*", "*access_key*"),
            *("*private_key*", "*credential*", "*authorization*", "*cookie*"),
        ),
        "What such a record does not show: values under these names in JSON, forms, texts, queries and headers; `*` "
        "stands for any characters, and `-` is as `_`. Of JSON over 8 KiB, of what is no text, and of streams only the "
        "length is shown.",
    )
    replay_sample: float = _own(
        FLOAT,
        0.0,
        "The share of batches whose requests are kept with their bodies, so that `marserve replay` can run them again. "
        "Those with a value that `body_sample_hide` names are not kept, and its headers are left out.",
        minimum=0,
        maximum=1,
    )
    replay_size: int = _own(
        SIZE,
        16 * 1024**2,
        "Memory for them; the oldest leave first. Of one request at most a sixteenth of it is kept.",
        minimum=0,
    )
    expose_errors: Literal["off", "message", "traceback"] = _own(
        CHOICE,
        "off",
        "What the body of a handler's failure, or the last Server-Sent Event of its stream, says of the exception, "
        "under the key `exception`: type and message, or the traceback too. Only for clients that may read the "
        "model's code.",
        choices=("off", "message", "traceback"),
    )
    handler_error_status: Literal[503, 500] = _own(
        INT_CHOICE,
        503,
        "Status of a request whose handler raised, or gave an answer that cannot be sent. Clients and load balancers "
        "send again what got a 503. gRPC: UNAVAILABLE for 503, INTERNAL for 500.",
        marserve=500,
        choices=("503", "500"),
    )
    config_snapshots: bool = _own(
        BOOL,
        True,
        "Write settings and models into `config` below the log folder after each change, and start from the newest of "
        "these snapshots if no file of settings is named. `torchserve --ncs` switches it off.",
        marserve=False,
    )
    config_snapshots_kept: int = _own(
        INT, 0, "How many snapshots are kept; the oldest go. 0: all.", marserve=20, minimum=0
    )
    state_folder: Path | None = _own(
        PATH,
        None,
        "What the server keeps for its next start (the history of desired states, roll-outs under way, what it "
        "fetched); `state` below the log folder if not given.",
    )
    temporary_folder: Path | None = _own(
        PATH, None, "Where archives are unpacked; the system's temporary folder if not given.", always_env="TEMP"
    )


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class Kept:
    """Kept from TorchServe."""

    debug: bool = _key(
        BOOL,
        False,
        "Wait for one worker that is started by hand.",
        refuses="asks to wait for a worker that is started by hand; set it to false, and attach a debugger to a "
        "running worker, whose pid describe tells",
    )
    cpu_launcher_enable: bool = _key(
        BOOL,
        False,
        "Start workers through Intel's CPU launcher.",
        refuses="asks for Intel's launcher, which workers are not started through; set it to false, and share out the "
        "cores with worker_threads",
    )
    cpu_launcher_args: str | None = _key(
        OPTIONAL_TEXT, None, "Arguments of that launcher.", accepts="without effect while cpu_launcher_enable is false"
    )
    ipex_enable: bool = _key(
        BOOL,
        False,
        "Use Intel's extension for PyTorch.",
        refuses="asks for Intel's extension, whose work torch itself does by now; set it to false, and let the handler "
        "import it where it is still wanted",
    )
    ipex_gpu_enable: bool = _key(
        BOOL,
        False,
        "Use Intel's extension on its GPUs.",
        refuses="asks for Intel's extension, whose work torch itself does by now; set it to false, and let the handler "
        "use the device xpu",
    )
    cpp_log_config: Path | None = _key(
        PATH, None, "Log configuration of the C++ backend.", accepts="the C++ backend's, without effect here"
    )
    model_server_home: Path | None = _key(
        PATH,
        None,
        "The folder TorchServe is installed in.",
        always_env="TS_MODEL_SERVER_HOME",
        accepts="without effect: the server finds its own parts",
        ts_env=None,
    )
    python: str | None = _key(
        OPTIONAL_TEXT,
        None,
        "The interpreter of workers.",
        accepts="without effect: workers run under the server's own interpreter",
        ts_env=None,
    )
    number_of_netty_threads: int = _key(INT, 0, "Threads of the Java server.", accepts=_JVM)
    netty_client_threads: int = _key(INT, 0, "Threads of the Java server.", accepts=_JVM)
    prefer_direct_buffer: bool = _key(BOOL, False, "Memory of the Java server.", accepts=_JVM)
    io_ratio: int = _key(INT, 50, "Threads of the Java server.", accepts=_JVM, ts_env=None)
    vmargs: str | None = _key(OPTIONAL_TEXT, None, "Arguments of the Java virtual machine.", accepts=_JVM, ts_env=None)
    plugins_path: str | None = _key(
        OPTIONAL_TEXT,
        None,
        "Folder of Java plug-ins.",
        accepts="Java plug-ins are not loaded; sagemaker_endpoints=true stands in for SageMaker's, and installed "
        "Python packages for others (entry points marserve.endpoints and marserve.snapshots)",
        ts_env=None,
    )
    NUM_WORKERS: int = _key(
        INT,
        1,
        "Requests at once that /execution-parameters offers to SageMaker's batch transforms.",
        minimum=0,
        ts_env=None,
    )


@dataclass(frozen=True, kw_only=True)
class Settings(Addresses, ModelsAndWorkers, Security, Observing, Limits, Life, Kept):
    """The effective settings. Made by `load_settings`; attributes have the keys' names.

    `warnings` are sentences that an operator should act on, `notes` need no action: log each once.
    `source_file` is the file that was read, or None. Relative paths have been joined to `working_directory`.
    `restored_from` names the snapshot that took the file's place, if one did, and `original_file` is the file that the
    settings were read from before the first snapshot of them.
    """

    entry: Entry
    working_directory: Path
    source_file: Path | None = None
    restored_from: str | None = None
    original_file: Path | None = None
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    origins: Mapping[str, tuple[Origin, ...]] = field(default_factory=dict)

    @property
    def management_is_kept_here(self) -> bool:
        """Whether only callers on this machine may use management, because nothing authenticates them."""
        is_protected = self.allow_open_management or not self.disable_token_authorization
        return self.unprotected_management == "loopback" and not is_protected

    @property
    def cors_origins(self) -> tuple[str, ...]:
        """The origins in `cors_allowed_origin`, which are separated by commas."""
        return tuple(filter(None, (each.strip() for each in (self.cors_allowed_origin or "").split(","))))

    def explain(self, name: str) -> str:
        """The source of the value of `name`, and the sources that it overrides: one line for a person.

        Raises KeyError for an unknown key.
        """
        key = KEYS[name]
        value = f"{name}={key.show(getattr(self, name))}"
        origins = self.origins.get(name, ())
        if not origins:
            return f"{value} (default of {self.entry})"
        *overruled, winner = origins
        beaten = "".join(f", over {origin.where} ({key.show_text(origin.text)})" for origin in reversed(overruled))
        return f"{value} ({winner.where}{beaten})"


def _keys(section: type) -> tuple[Key, ...]:
    """The keys that a class declares."""
    return tuple(
        Key(**{"name": each.name, "ts_env": f"TS_{each.name.upper()}", **each.metadata["key"]})
        for each in fields(section)
    )


SECTIONS: Mapping[str, tuple[Key, ...]] = {
    "Addresses and transport": _keys(Addresses),
    "Models and workers": _keys(ModelsAndWorkers),
    "Security": _keys(Security),
    "Metrics and logs": _keys(Observing),
    "Limits": _keys(Limits),
    "Starting and stopping": _keys(Life),
    "Kept from TorchServe": _keys(Kept),
}

KEYS: Mapping[str, Key] = {key.name: key for keys in SECTIONS.values() for key in keys}


def apis_by_address(settings: Settings) -> list[tuple[Address, list[str]]]:
    """The addresses, and the names of the APIs on each."""
    wanted = {"Inference": settings.inference_address, "Management": settings.management_address}
    if settings.enable_metrics_api:
        wanted["Metrics"] = settings.metrics_address
    by_address: dict[str, list[str]] = {}
    for name, address in wanted.items():
        by_address.setdefault(str(address), []).append(name)
    both = by_address[str(settings.inference_address)]
    if settings.enable_metrics_api and "Management" in both and "Metrics" not in both:
        both.append("Metrics")  # the contract's §1.1: a shared listener serves the metrics too
    return [(wanted[names[0]], names) for names in by_address.values()]
