"""Loads and unloads models by their names, and lists them, as Triton's extension "model_repository" has it.

A name is that of a registered model, of one that was unloaded here, or of an archive in the model store. What is
unloaded is no longer registered: its options are those of its archive when it is loaded again.
"""

from __future__ import annotations

from asyncio import to_thread
from collections.abc import Mapping
from typing import Any, Final

from marserve.api.open_inference.documents import Document, index_document, versions_of
from marserve.api.open_inference.shown import shown
from marserve.desired_state.policies import Changes
from marserve.errors import ArchiveNotFound, BadInput, ModelApiClosed, NotInStore, VersionConflict
from marserve.registry.intake.registration import RegisterParameters
from marserve.registry.models import Registry

# Of models that were unloaded the addresses of so many are remembered, the latest.
MOST_REMEMBERED: Final = 1000
_MOST_SHOWN: Final = 100

NOT_LOADED: Final = "not loaded"
UNLOADED: Final = "unloaded"


class Repository:
    """The model repository of a server. One for all its ports: it remembers what was unloaded, and from where."""

    def __init__(self, registry: Registry, changes: Changes, *, enable_model_api: bool) -> None:
        self._registry = registry
        self._changes = changes
        self._enable_model_api = enable_model_api
        self._unloaded: dict[str, str] = {}  # by model: what its default version was registered with

    async def load(self, model: str, parameters: Mapping[str, Any]) -> None:
        """Register a model that is not, and return when it is ready; wake its default version where it has no workers.

        Raises BadInput for any parameter, ModelApiClosed, NotInStore, and what registering and scaling raise.
        """
        for name in parameters:
            raise BadInput(_refusal(name))
        self._check_open()
        if self._registry.default_of(model) is not None:
            await self._make_ready(model)
            return
        known = self._unloaded.get(model)
        url = await to_thread(self._find, model) if known is None else known
        try:
            # As an archive that arrives in a watched store: it gets the workers of a model of the start.
            await self._changes.register(RegisterParameters(url=url, model_name=model, is_arrival=True))
        except VersionConflict:  # another call was faster
            await self._make_ready(model)
        except ArchiveNotFound:
            self._unloaded.pop(model, None)
            raise
        self._unloaded.pop(model, None)

    async def unload(self, model: str, parameters: Mapping[str, Any]) -> None:
        """Unregister all versions of a model, its default one last; what they had accepted is answered.

        Raises BadInput for another parameter than `unload_dependents` (no model has any), ModelApiClosed,
        ModelNotFound, and what unregistering raises.
        """
        for name, value in parameters.items():
            if name != "unload_dependents":
                raise BadInput(f"Parameter {_shown(name)} of an unload is not known; there is unload_dependents.")
            if not isinstance(value, bool):
                raise BadInput(f"Parameter {name} is {_shown(value)}; it must be true or false.")
        self._check_open()
        default = self._registry.name_of(model, None)
        url = self._registry.source_of(model, default)
        others = [name for name in self._registry.data_plane.version_names(model) if name != default]
        for version in (*others, default):
            await self._changes.unregister(model, version, force=True)
        if url is not None:
            self._unloaded.pop(model, None)
            self._unloaded[model] = url
            while len(self._unloaded) > MOST_REMEMBERED:
                del self._unloaded[next(iter(self._unloaded))]

    async def index(self, *, only_ready: bool) -> list[Document]:
        """All versions and their states, and behind them the models that could be loaded."""
        found = index_document(versions_of(self._registry), only_ready=only_ready)
        if only_ready or not self._enable_model_api:
            return found
        known = {each["name"] for each in found}
        served = self._registry.served_archives()
        stored = [_model_of(name) for name in await to_thread(self._registry.stored_archives) if name not in served]
        reasons = dict.fromkeys(stored, NOT_LOADED) | dict.fromkeys(self._unloaded, UNLOADED)
        loadable = sorted((name, reason) for name, reason in reasons.items() if name not in known)
        return [
            *found,
            *({"name": name, "version": "", "state": "UNAVAILABLE", "reason": why} for name, why in loadable),
        ]

    async def _make_ready(self, model: str) -> None:
        if self._registry.data_plane.is_model_ready(model):
            return
        described = self._registry.describe(model)
        least, most = max(1, described["minWorkers"]), max(1, described["maxWorkers"])
        await self._changes.scale(model, None, min_workers=least, max_workers=max(least, most), synchronous=True)

    def _find(self, model: str) -> str:
        """The archive of this name in the model store. Blocks. Raises NotInStore."""
        for name in self._registry.stored_archives():
            if model in (name, _model_of(name)):
                return name
        raise NotInStore(
            f"No model {_shown(model)} is registered, and the model store has no archive of that name. An archive of "
            "another name is registered by POST /models on the management address."
        )

    def _check_open(self) -> None:
        if not self._enable_model_api:
            raise ModelApiClosed


def _model_of(archive: str) -> str:
    """The name that an archive of the store is loaded by."""
    for ending in (".tar.gz", ".tgz", ".mar", ".model"):
        if archive.lower().endswith(ending):
            return archive[: -len(ending)]
    return archive


def _refusal(name: str) -> str:
    if name == "config":
        return (
            "Parameter config of a load is not taken: a model's configuration is that of its archive "
            "(model-config.yaml). POST /models on the management address takes options beside it."
        )
    if name.startswith("file:"):
        return (
            f"Parameter {_shown(name)} of a load is not taken: a model's files are those of its archive. An archive is "
            "uploaded by PUT /archives/{name} on the management address."
        )
    return f"Parameter {_shown(name)} of a load is not known; a load takes none."


def _shown(value: object) -> str:
    """A client's word for a sentence; of another value the type."""
    return shown(value if isinstance(value, str) else type(value).__name__, _MOST_SHOWN)
