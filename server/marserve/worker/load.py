"""From an archive's folder to a handler that is ready: finds it, builds its context, initialises it.

The rules are the contract's §8.3: which module, which function or class, in which order. Runs in a worker, or once in
a template; never in the server process.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, cast

import msgspec

import marserve_handlers
from marserve import __version__
from marserve.documents import unpack
from marserve.messages import Load
from marserve_handlers.context import Checkpoint, Context
from marserve_handlers.envelopes import find_envelope
from marserve_handlers.errors import ModelNotLoadable, add_note
from marserve_handlers.metrics import MetricsCache
from marserve_handlers.support.builtin import BUILT_IN, NAMED_AS_LIBRARIES, find_built_in

if TYPE_CHECKING:
    from marserve_handlers.declared.decorator import Definition
    from marserve_handlers.support.overlapping.seam import Overlap

Handle = Callable[[list[dict[str, Any]], Context], Any]
LengthOf = Callable[[dict[str, Any]], Any]
Compare = Callable[[Any, Any], Any]
IsWell = Callable[[], Any]

_TS_COMPAT = Path(marserve_handlers.__file__ or "").parent / "ts_compat"


class LoadedModel:
    """A handler that is ready: `handle(rows, context)`, and the one context that lives as long as the worker.

    `length_of(row)` says how long an item is, `compare(primary, shadow)` whether two answers to one request are alike;
    None if the author has not written it. `declaration` is the JSON of what the model declares, empty for nothing.
    `health()` says whether the worker is well; None where it is not asked for, too. `overlap` is where its `preprocess`
    can be called beside the batch that computes, None where it cannot, or need not.
    """

    def __init__(
        self,
        handle: Handle,
        context: Context,
        load: Load,
        length_of: LengthOf | None = None,
        compare: Compare | None = None,
        declaration: bytes = b"",
        health: IsWell | None = None,
        overlap: Overlap | None = None,
    ) -> None:
        self.overlap = overlap
        self.compare = compare
        self.declaration = declaration
        self.health = health
        self.handle = handle
        self.length_of = length_of
        self.has_failed_length = False
        self.context = context
        self.load = load

    def calling(self, handle: Handle) -> LoadedModel:
        """The same model with another function in the place of `handle`."""
        more = self.length_of, self.compare, self.declaration, self.health, self.overlap
        return LoadedModel(handle, self.context, self.load, *more)


def enter_model_folder(load: Load) -> None:
    """Make this process the model's: its folder as working directory, its code first on the path, its environment.

    The order on the path is TorchServe's: the handler's folder, the inherited `PYTHONPATH`, the archive, the stand-in
    for `ts`, the model's own packages, then everything installed. Programs that the handler starts get the same as
    their `PYTHONPATH`.
    """
    inherited = [os.path.abspath(path) for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    os.chdir(load.model_dir)
    os.environ.update(load.environment)
    own = [load.model_dir, str(_TS_COMPAT), *([load.packages] if load.packages else [])]
    ahead = [path for path in (*load.import_paths, *inherited) if path not in own]
    wanted = list(dict.fromkeys([*ahead, *own]))
    os.environ["PYTHONPATH"] = os.pathsep.join(wanted)
    sys.path[:] = [*wanted, *(path for path in sys.path if path not in wanted and path != "")]
    importlib.invalidate_caches()


def make_context(load: Load) -> Context:
    """The context of the model, as it is before its handler is loaded."""
    metrics = MetricsCache(load.metrics_file, model_name=load.model)
    if load.metrics_file is not None:
        metrics.initialize_cache()
    kind = Context
    if load.overlaps:
        from marserve_handlers.support.overlapping.seam import OverlapContext as kind  # here: few models ask for it
    context = kind(
        load.model,
        load.model_dir,
        unpack(load.manifest),
        load.batch_size,
        load.gpu_id,
        __version__,
        limit_max_image_pixels=load.limit_max_image_pixels,
        metrics=metrics,
        model_yaml_config=unpack(load.model_config) if load.model_config is not None else {},
    )
    context.parallel = load.parallel
    context.allowed_batch_sizes = tuple(load.allowed_batch_sizes)
    context.threads, context.inter_threads = load.threads, load.inter_threads
    context.must_use_device = load.must_use_device
    context.is_trusted = load.is_trusted
    context.build_folder = load.build
    context.open_model = _open_model
    if load.checkpoint is not None:
        folder = os.path.join(load.model_dir, load.checkpoint.folder)
        context.checkpoint = Checkpoint(folder, load.checkpoint.may_map, load.checkpoint.layout)
    return context


def _open_model(context: Context) -> Any:
    """The archive's model, as a base handler loads it."""
    from marserve_handlers.base import BaseHandler  # here: few handlers ask for it

    class Loader(BaseHandler):
        """Loads, and answers nothing."""

    loader = Loader()
    loader.initialize(context)
    return loader.model


def load_model(load: Load) -> LoadedModel:
    """Import and initialise the handler. Raises whatever the author's code raises.

    ModuleNotFoundError: neither the archive nor marserve has the handler; ValueError: the module names none clearly;
    ModelNotLoadable: it cannot keep to the sizes of batches that are allowed, or leaves the checkpoint where it is.
    """
    context = make_context(load)
    # Few calls deep, here and below: of an end in the author's code its own lines are to be among the last twenty.
    model = _open_handler(context, load)
    if load.overlaps:
        from marserve_handlers.support.overlapping.seam import open_overlap  # here: few models ask for it

        model.overlap = open_overlap(getattr(model.handle, "__self__", None), context, load.envelope)
    if load.allowed_batch_sizes and not model.context.keeps_to_sizes:
        raise ModelNotLoadable(
            f"allowedBatchSizes is {load.allowed_batch_sizes}, and this handler calls its model by itself: one that "
            "extends BaseHandler, calls context.load_model(), or declares tensors with a batch axis can be given "
            "batches of these sizes. Leave the key out, or fill batches up in the handler, by "
            "context.allowed_batch_sizes, and set context.keeps_to_sizes."
        )
    if load.checkpoint is not None and not model.context.has_taken_checkpoint:
        raise ModelNotLoadable(
            f"checkpoint is {load.checkpoint.folder}, and this handler has loaded no weights of it: one that extends "
            "BaseHandler or calls context.load_model() does. Leave the key out, or load what lies in "
            "context.checkpoint.folder in the handler, and set context.has_taken_checkpoint."
        )
    return model


def _open_handler(context: Context, load: Load) -> LoadedModel:
    word, _, function_name = load.handler.partition(":")
    found = import_handler(word)
    module: ModuleType | None = None
    if isinstance(found, ModuleType):
        module = found
        definition = find_definition(found, function_name)
        if definition is not None:
            return open_definition(definition, context, load)
        _check_declaration(load, b"")
        entry: Any = getattr(found, function_name or "handle", None)
        if "litserve" in sys.modules and (api := _find_lit_api(found, function_name)) is not None:
            return _open_lit_api(api, found, context, load)
        if callable(entry) and not inspect.isclass(entry):
            return open_function(entry, context, load, module)
        found = cast("type[Any]", entry) if inspect.isclass(entry) else _find_class(found)
    return open_class(found, context, load, module)


def open_function(
    entry: Callable[..., Any], context: Context, load: Load, module: ModuleType | None = None
) -> LoadedModel:
    """Load a handler that is a function, by a call without data."""
    try:
        begun = entry(None, context)
        if inspect.iscoroutine(begun):
            begun.close()  # as TorchServe, which never awaits it
    except Exception as error:
        name = f"{getattr(entry, '__module__', '?')}.{getattr(entry, '__name__', '?')}"
        add_note(
            error,
            f"{name} was called with data=None, once, to load the model, as TorchServe does: a handler that is a "
            "function must return at once when data is None.",
        )
        raise
    handle = _in_envelope(entry, load.envelope)
    health = _health_of(load, module)
    return LoadedModel(handle, context, load, _length_of(module), _compare_of(module), health=health)


def open_class(cls: type[Any], context: Context, load: Load, module: ModuleType | None = None) -> LoadedModel:
    """Make and initialise the object of a handler that is a class."""
    service = cls()
    if not callable(getattr(service, "handle", None)):
        raise ValueError(f"the handler class {type(service).__name__} has no method handle(data, context)")
    initialize = getattr(service, "initialize", None)
    if initialize is not None:
        initialize(context)
    handle = _in_envelope(service.handle, load.envelope, getattr(service, "reads_open_inference", False) is True)
    compare = _compare_of(service) or _compare_of(module)
    declaration = getattr(service, "declaration", b"")  # of our base handler; an author's own may be anything
    if type(declaration) is not bytes:
        declaration = b""
    length_of, health = _length_of(service) or _length_of(module), _health_of(load, service, module)
    return LoadedModel(handle, context, load, length_of, compare, declaration, health)


def find_definition(module: object, name: str) -> Definition | None:
    """What `@model` marks in the handler's module, of that name or the only one; None for TorchServe's shape."""
    if "marserve_handlers.declared.decorator" not in sys.modules:  # it was not imported, so nothing is marked
        return None
    # here, and below: a handler of TorchServe's shape imports nothing of it
    from marserve_handlers.declared.decorator import definition_of, only_definition

    return definition_of(getattr(module, name, None)) if name else only_definition(module)


def open_definition(definition: Definition, context: Context, load: Load) -> LoadedModel:
    """Load a declared model. Its rows are raw: it decodes bodies by what it declares, so envelopes are not used."""
    # here: for declared handlers alone
    from marserve_handlers.declared.opening import open_declared

    opened = open_declared(definition, context, most_rows=load.batch_size, max_rows=load.max_rows)
    _check_declaration(load, opened.declaration)
    if load.envelope:
        context.load_warnings.append(f"the envelope {load.envelope} is not used: the handler declares its input")
    handle = opened.handle if not load.is_concurrent or opened.handle_async is None else opened.handle_async
    load = msgspec.structs.replace(load, decode_input=False)
    module = sys.modules.get(definition.target.__module__)
    health = _health_of(load, module if opened.instance is None else opened.instance)
    return LoadedModel(handle, context, load, None, _compare_of(opened.instance), opened.declaration, health)


def _check_declaration(load: Load, declared: bytes) -> None:
    """Raise DeclarationError if the archive declares something else than the handler, with both."""
    if not load.declaration or load.declaration == declared:
        return
    # here: few archives have a declaration
    from marserve_handlers.declared.declaration import check_same

    check_same(load.declaration, declared, load.handler)


def _find_lit_api(module: ModuleType, name: str) -> type[Any] | None:
    """The class of LitServe's LitAPI that the handler's word names; None for anything else."""
    # here: for files of LitServe alone
    from marserve_handlers.lit_api import is_lit_api

    found: Any = getattr(module, name, None)
    return found if is_lit_api(found) else None


def _open_lit_api(api: type[Any], module: ModuleType, context: Context, load: Load) -> LoadedModel:
    """Load a file of LitServe. Its bodies are read as LitServe does."""
    # here, and the next one: for files of LitServe alone
    from marserve.archive.writing.python_source import read_python
    from marserve_handlers.lit_api import LitApiHandler

    said = read_python(Path(module.__file__ or "").read_bytes(), load.handler).lit_options
    handler = LitApiHandler(api, said.arguments, said.api, said.server)
    handler.initialize(context)
    handle = handler.handle_async if load.is_concurrent and handler.is_async else handler.handle
    health = _health_of(load, handler.api)
    return LoadedModel(handle, context, msgspec.structs.replace(load, decode_input=False), health=health)


def _in_envelope(handle: Handle, word: str | None, reads_open_inference: bool = False) -> Handle:
    """`handle`, wrapped by the envelope of that word if there is one. `initialize` is never wrapped.

    A handler that reads requests of the Open Inference Protocol itself gets them past the protocol's own envelope.
    """
    if not word:
        return handle
    envelope = find_envelope(word)(handle)
    if reads_open_inference and word == "kservev2":
        envelope.passes_protocol = True
    is_async = inspect.iscoroutinefunction(handle)
    wrapped: Handle = getattr(envelope, "handle_async", envelope.handle) if is_async else envelope.handle
    return wrapped


def _length_of(owner: object) -> LengthOf | None:
    """The `length_of` of a handler's object, or of its module."""
    length_of = getattr(owner, "length_of", None)
    return length_of if callable(length_of) else None


def _health_of(load: Load, *owners: object) -> IsWell | None:
    """The `health` of a handler's object, else of its module. None unless asked for: it may mean something else."""
    if not load.checks_health:
        return None
    found = (getattr(owner, "health", None) for owner in owners)
    return next((health for health in found if callable(health)), None)


def _compare_of(owner: object) -> Compare | None:
    """The `compare` of a handler's object, or of its module."""
    compare = getattr(owner, "compare", None)
    return compare if callable(compare) else None


def import_handler(word: str) -> ModuleType | type[Any]:
    """The handler's module, or the class of one of our own handlers."""
    name = word.removesuffix(".py").replace("\\", "/").rsplit("/", 1)[-1]
    if name in NAMED_AS_LIBRARIES and not _is_one_file(name):
        return cast("type[Any]", find_built_in(name))
    try:
        found = importlib.import_module(name)
        _refuse_pythons_own(found)
        return found
    except ModuleNotFoundError as error:
        # Only if the handler's own module is missing: the author must see it if a module that *it* imports is.
        if error.name != name and not name.startswith(f"{error.name}."):
            raise
    built_in = find_built_in(name)
    if built_in is None:
        raise ModuleNotFoundError(
            f"the archive holds no module {name!r}, and it is not one of the built-in handlers: {', '.join(BUILT_IN)}",
            name=name,
        )
    return built_in


def _is_one_file(name: str) -> bool:
    """Whether the module of that name is a file, as an author's handler is, and not the package of a library."""
    spec = importlib.util.find_spec(name)
    return spec is not None and os.path.basename(spec.origin or "") == f"{name}.py"


def _refuse_pythons_own(module: ModuleType) -> None:
    """Raise ImportError for a module of Python's standard library: it hides the archive's module of that name."""
    name = module.__name__.partition(".")[0]
    if name not in sys.stdlib_module_names:
        return
    file = getattr(module, "__file__", None)
    library = os.path.realpath(os.path.dirname(os.__file__)) + os.sep
    if file is None or (os.path.realpath(file).startswith(library) and "site-packages" not in file):
        raise ImportError(
            f"the handler {name}.py has the name of a module that Python itself brings, and Python's was imported in "
            f"its place: rename the file, to {name}_handler.py say, and archive the model anew",
            name=name,
        )


def _find_class(module: ModuleType) -> type[Any]:
    classes = [
        member for _, member in inspect.getmembers(module, inspect.isclass) if member.__module__ == module.__name__
    ]
    if len(classes) != 1:
        names = ", ".join(cls.__name__ for cls in classes) or "none"
        raise ValueError(
            "Expected only one class in custom service code or a function entry point; "
            f"{module.__name__} defines {names}"
        )
    return classes[0]
