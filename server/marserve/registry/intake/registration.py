"""The registry's input and output as plain data: its settings, registrations, and the sentences of its answers.

Every surface (REST, gRPC) makes and reads these.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from marserve.environments.interpreters import Interpreters
from marserve.errors import BadInput, without_stop
from marserve.model_options import NOTHING, Said, read_value
from marserve.registry.catalogue.snapshot import SnapshotVersion
from marserve.registry.intake.call_modes import PLAIN_NAMES, SequenceHeaderNames
from marserve.settings.values import Models

Progress = Literal["done", "begun", "partial"]
Freshness = Literal["stored", "at_start", "now"]
"""Which archive an address names: `stored`, fetched into the store, which must have no used file of its name;
`at_start`, the store's file of its name, fetched if it is missing; `now`, fetched from the address, whatever the store
has, and stored if the name is free."""
LentAs = tuple[str, str | None, str | None, str | None]
# A typing error must not start a hundred thousand processes.
MOST_WORKERS = 4096
LARGEST_BATCH = 65_536
LONGEST_BATCH_DELAY_S = 3600.0


@dataclass(frozen=True, slots=True)
class RegistryOptions:
    """The server's settings that concern models; times in seconds.

    `defaults` are the options of a version that no other layer sets.
    `workers_by_api` and `workers_at_startup` are the numbers of workers for versions without a number of their own.
    `models` is the setting of that name: model to version to values. With `installs_requirements` the requirements of
    archives are installed. The file `default_requirements` of a model without a manifest is installed in any case. Both
    may name addresses that match a pattern of `allowed_urls`. Versions that a desired state has replaced stay loaded
    for `undo_window_s`. `mig_instances` are those of the devices that are a part of a GPU. `as_torchserve`:
    describe has TorchServe's members for what models declare (none) and for workers without a process (-1).
    `interpreters` finds the interpreter that a model names.
    """

    workers_by_api: int = 0
    workers_at_startup: int = 1
    defaults: Said = NOTHING
    unregister_timeout_s: float = 120.0
    as_torchserve: bool = False
    default_handler: str | None = None
    envelope: str | None = None
    decode_input: bool = True
    limit_max_image_pixels: bool = True
    max_answer_bytes: int = 6_553_500
    threads: int = 0
    gpu_count: int = 0
    refuses_missing_devices: bool = False
    mig_instances: frozenset[int] = frozenset()
    models: Models = field(default_factory=dict)
    sequence_headers: SequenceHeaderNames = PLAIN_NAMES
    swap_order: Literal["load_first", "unload_first"] = "load_first"
    undo_window_s: float = 0.0
    installs_requirements: bool = False
    default_requirements: str | None = None
    allowed_urls: tuple[str, ...] = ()
    interpreters: Interpreters = field(default_factory=Interpreters)


@dataclass(frozen=True, slots=True)
class RegisterParameters:
    """The parameters of a registration; None if not given. `options` are the version's, without the number of workers.


    `warnings` are sentences about parameters that the surface ignored; they are logged and shown by describe.
    `workflow` is the workflow whose node the version is; with `is_function` it is a function there, which the list of
    models leaves out. `restored` is what a snapshot says of the version: it takes precedence over all else.
    `declared` is what a desired state says of the version, None without one. Its keys of a model's configuration take
    precedence over the archive's; it has both of `minWorkers` and `maxWorkers` or neither. `version` is the version
    that the archive must have. `is_at_startup`: the setting `load_models` names it. `is_arrival`: it appeared in a
    watched store; it gets workers as a model of the start does. `copy_of` is the model that it is a copy of.
    """

    url: str
    model_name: str | None = None
    handler: str | None = None
    runtime: str | None = None
    options: Said = NOTHING
    initial_workers: int | None = None
    synchronous: bool = True
    warnings: tuple[str, ...] = ()
    workflow: str | None = None
    is_function: bool = False
    restored: SnapshotVersion | None = None
    declared: Mapping[str, Any] | None = None
    version: str | None = None
    is_arrival: bool = False
    is_at_startup: bool = False
    freshness: Freshness = "stored"
    copy_of: str | None = None

    @property
    def said(self) -> Said:
        """What it says of all options, the number of workers among them."""
        workers = self.initial_workers
        return Said(self.options, {"min_workers": workers, "max_workers": workers})

    @property
    def lent_as(self) -> LentAs:
        """By what an archive that is unpacked already is found: what another registration would unpack alike."""
        return self.url, self.model_name, self.version, self.checkpoint

    @property
    def checkpoint(self) -> str | None:
        """The place of its weights that goes before the archive's: a snapshot's, or else the desired state's."""
        if self.restored is not None:
            return self.restored.options.get("checkpoint")
        written = (self.declared or {}).get("checkpoint")
        return None if written is None else str(read_value("checkpoint", written))


@dataclass(frozen=True, slots=True)
class CopyParameters:
    """The parameters of a copy: a version (None: the default one) of a model, registered again as the model `name`.

    `threads` (inside of one operator) and `padding_budget` are the copy's in place of the version's, None to keep them.
    """

    model: str
    version: str | None
    name: str
    workers: int = 1
    threads: int | None = None
    padding_budget: float | None = None
    synchronous: bool = True


@dataclass(frozen=True, slots=True)
class Registered:
    """A version that is now registered. `progress` is `done`, `begun` (the call does not wait) or `partial`.

    `wakes`: the first request starts its workers.
    """

    model: str
    version: str
    workers: int
    progress: Progress
    wakes: bool = False

    @property
    def own_message(self) -> str:
        """The sentence in marserve's words."""
        text = f"Model {self.model} version {self.version} is registered"
        if self.progress != "done":
            return f"{text}; {_OWN_PROGRESS[self.progress]}"
        if self.workers:
            return f"{text}, with {count_of(self.workers, 'worker')}"
        if self.wakes:
            return f"{text}; the first request starts its workers"
        return f"{text}, without workers; scaling it starts some (`marserve scale {self.model} 1`)"

    @property
    def message(self) -> str:
        """The sentence in the words of TorchServe."""
        if self.progress != "done":
            return _PROGRESS[self.progress]
        text = f'Model "{self.model}" Version: {self.version} registered with {self.workers} initial workers'
        if self.workers:
            return text
        if self.wakes:
            return text + ". The first request starts them."
        return text + ". Use scale workers API to add workers for the model."


@dataclass(frozen=True, slots=True)
class Scaled:
    """A version whose number of workers was changed. `version` is None if the client named none."""

    model: str
    version: str | None
    workers: int
    progress: Progress

    @property
    def own_message(self) -> str:
        """The sentence in marserve's words."""
        text = f"Model {self.model}{'' if self.version is None else f' version {self.version}'}"
        if self.progress != "done":
            return f"{text}: {_OWN_PROGRESS[self.progress]}"
        return f"{text} has {count_of(self.workers, 'worker') if self.workers else 'no workers'} now"

    @property
    def message(self) -> str:
        """The sentence in the words of TorchServe."""
        if self.progress != "done":
            return _PROGRESS[self.progress]
        named = "" if self.version is None else f", version: {self.version}"
        return f"Workers scaled to {self.workers} for model: {self.model}{named}"


_PROGRESS = {"begun": "Processing worker updates...", "partial": "Workers scaling in progress..."}
_OWN_PROGRESS = {"begun": "its workers are being started or ended", "partial": "some of its workers are still starting"}


def count_of(number: int, word: str) -> str:
    """A number with its word: `1 worker`, `2 workers`."""
    return f"{number} {word}{'' if number == 1 else 's'}"


@dataclass(frozen=True, slots=True)
class ModelPage:
    """One page of the models' list: (name, url of the default version), and the offset of the next page, if any."""

    models: list[tuple[str, str]]
    next_offset: int | None

    def document(self) -> dict[str, Any]:
        """The page as clients get it."""
        token = {} if self.next_offset is None else {"nextPageToken": str(self.next_offset)}
        return {**token, "models": [{"modelName": name, "modelUrl": url} for name, url in self.models]}


def check_workers(min_workers: int, max_workers: int) -> None:
    """Raise BadInput for invalid bounds."""
    if min_workers < 0 or max_workers > MOST_WORKERS:
        raise BadInput(f"min_worker and max_worker must be between 0 and {MOST_WORKERS}.")
    if max_workers < min_workers:
        raise BadInput("max_worker cannot be less than min_worker.")


def check_batching(batch_size: int | None, max_batch_delay_s: float | None) -> None:
    """Raise BadInput for an invalid size or delay of batches; None means unchanged."""
    if batch_size is not None and not 1 <= batch_size <= LARGEST_BATCH:
        raise BadInput(f"batch_size is {batch_size}; it must be from 1 to {LARGEST_BATCH}.")
    if max_batch_delay_s is not None and not 0 <= max_batch_delay_s <= LONGEST_BATCH_DELAY_S:
        longest_ms = LONGEST_BATCH_DELAY_S * 1000
        raise BadInput(f"max_batch_delay is {max_batch_delay_s * 1000:g} ms; it must be from 0 to {longest_ms:g}.")


def default_set_message(model: str, version: str, *, has_rule: bool = False) -> str:
    """The client's sentence after a change of the default version. `has_rule`: weights still decide."""
    text = f'Default version successfully updated for model "{model}" to "{version}"'
    return f"{without_stop(text)}. Its traffic goes by weights until they are deleted." if has_rule else text


def unregistered_message(model: str) -> str:
    """The client's sentence after a model or version was unregistered."""
    return f'Model "{model}" unregistered'
