"""Which interpreter a model's workers run under: the one that its configuration names, if the operator allows it.

Paths are compared without following the interpreter's own link: `bin/python` of a virtual environment is a link to the
interpreter that made it, and stands for the environment only by the folder that it lies in.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import NamedTuple

from marserve.environments.interpreter_probe import PROBE_S, probe
from marserve.errors import InterpreterRefused
from marserve.files.nearest import nearest
from marserve.lineage import VARIABLE, end_families
from marserve.model_options import ModelOptions
from marserve.names import escaped
from marserve.pool.interpreter import Interpreter, Stamp, link_packages, stamp_files
from marserve.pool.launchers.leftovers import Leftovers
from marserve.settings.interpreters import AllowedInterpreter

log = logging.getLogger("marserve.environments")

# So much of a name or path is shown: a model's configuration may have many thousand characters of it.
_SHOWN_CHARACTERS = 300


class Interpreters:
    """The interpreters that a server allows. One is started, and looked at, for each version that names it.

    `environment` is that of workers. In `folder` lie links to our packages, which the interpreters find there. By a
    lineage of `leftovers` the processes are found that an interpreter leaves behind.
    """

    def __init__(
        self,
        allowed: Sequence[AllowedInterpreter] = (),
        environment: Mapping[str, str] | None = None,
        folder: Path | None = None,
        *,
        limit_s: float = PROBE_S,
        leftovers: Leftovers | None = None,
    ) -> None:
        self._allowed = tuple(allowed)
        self._environment = dict(os.environ if environment is None else environment)
        self._leftovers = leftovers or Leftovers()
        self._folder = folder
        self._limit_s = limit_s
        self._looks: dict[str, _Look] = {}
        self._lock = threading.Lock()

    def is_handlers_own(self, options: ModelOptions) -> bool:
        """Whether `environment` is a key that the model's own handler reads: no interpreter has a name here.

        Handlers for TorchServe may have one of that name.
        """
        return not self._allowed and options.interpreter_name is not None and options.interpreter_path is None

    def choose(self, options: ModelOptions) -> AllowedInterpreter | None:
        """The interpreter that a version's options name, None for the server's. Nothing is started.

        Raises InterpreterRefused, with a sentence about what is wrong and what to do.
        """
        try:
            return _allowed_of(options.interpreter_name, options.interpreter_path, self._allowed)
        except _Refused as refused:
            raise _refusal(options, str(refused)) from None

    def look_at(self, chosen: AllowedInterpreter, options: ModelOptions) -> Interpreter:
        """The chosen interpreter as it is now, for a version with these options. Blocks: it runs that interpreter.

        Raises InterpreterRefused, as `choose` does.
        """
        seen = self._shared_look(str(chosen.path))
        if isinstance(seen, str):
            raise _refusal(options, seen)
        assert self._folder is not None
        packages = str(link_packages(self._folder))
        return Interpreter(str(chosen.path), seen.version, packages, chosen.name, seen.stamps)

    def _shared_look(self, path: str) -> _Seen | str:
        """What a look finds, as `_look`; calls that come while one is under way share it.

        A look that hangs holds a thread for each call that waits for it, and workers of other models start in such
        threads. So after one that took its whole time there is no other one for as long.
        """
        with self._lock:
            look = self._looks.get(path)
            is_new = look is None or look.shared_until <= time.monotonic()
            if look is None or is_new:
                look = self._looks[path] = _Look()
        if is_new:
            begun = time.monotonic()
            try:
                look.found.set_result(self._look(path))
            except BaseException as error:
                look.found.set_exception(error)
            ended = time.monotonic()
            look.shared_until = ended + self._limit_s if ended - begun >= self._limit_s else ended
        return look.found.result()

    def _look(self, path: str) -> _Seen | str:
        """What the interpreter is; or a sentence about why workers cannot run under it."""
        # Before it is run, so that a change while it runs is found when a worker starts.
        stamps = stamp_files([path, str(Path(path).parent.parent / "pyvenv.cfg")])
        lineage = self._leftovers.child("interpreter")
        try:
            found = probe(path, {**self._environment, VARIABLE: lineage}, self._limit_s)
        finally:  # a script around an interpreter may have started more
            end_families({lineage: 0})
        if isinstance(found, str):
            return found
        if found.executable != path:  # of a script that starts an interpreter
            stamps = (*stamps, *stamp_files([found.executable]))
        log.info(
            "workers under Python %s (%s): msgspec %s, prefix %s", found.version, path, found.msgspec, found.prefix
        )
        return _Seen(found.version, stamps)


class _Seen(NamedTuple):
    """What a look at an interpreter found: its version, and the stamps of its files."""

    version: str
    stamps: tuple[Stamp, ...]


class _Look:
    """A look at an interpreter, which registrations share until a moment of the monotonic clock: at least its end."""

    def __init__(self) -> None:
        self.found: Future[_Seen | str] = Future()
        self.shared_until = math.inf


def _refusal(options: ModelOptions, sentence: str) -> InterpreterRefused:
    return InterpreterRefused(f"Model {options.model} cannot be loaded: {sentence}")


class _Refused(Exception):
    """No such interpreter can be used; the text is a sentence."""


def _allowed_of(name: str | None, path: str | None, allowed: Sequence[AllowedInterpreter]) -> AllowedInterpreter | None:
    """The allowed interpreter of that name or path; None if neither is given. Reads links of folders."""
    if name is None and path is None:
        return None
    shown_name, shown_path = _shown(name), _shown(path)
    if name is not None and path is not None:
        raise _Refused(
            f"its configuration has environment: {shown_name} and python: {shown_path}. They say the same in two ways; "
            "keep one."
        )
    if name is not None:
        named = {each.name: each for each in allowed if each.name}
        if name in named:
            return named[name]
        raise _Refused(
            f"it asks for the interpreter environment: {shown_name}, which {_is_not_there(name, list(named))}. To "
            f"allow it, write allowed_interpreters={_line(allowed, f'{shown_name}=/path/to/bin/python')} into "
            "config.properties."
        )
    assert path is not None
    if not os.path.isabs(path):
        raise _Refused(
            f"it asks for the interpreter python: {shown_path}, which is no absolute path. Write the path of one of "
            f"allowed_interpreters ({_listed(allowed)}), or environment: and its name."
        )
    place = _place_of(path)
    for each in allowed:
        if _place_of(str(each.path)) == place:
            return each
    raise _Refused(
        f"it asks for the interpreter python: {shown_path}, which "
        f"{_is_not_there(path, [str(each.path) for each in allowed])}. To allow it, write "
        f"allowed_interpreters={_line(allowed, shown_path)} into config.properties."
    )


def _place_of(path: str) -> str:
    """A path whose folder is without links; a link at its end is not followed. One that no file can have stays."""
    folder, name = os.path.split(path)
    try:
        return os.path.join(os.path.realpath(folder), name)
    except ValueError:  # a null character, or half a surrogate pair
        return path


def _shown(word: str | None) -> str:
    """A name or path as a refusal shows it."""
    text = escaped((word or "")[:_SHOWN_CHARACTERS])
    return text if word is None or len(word) <= _SHOWN_CHARACTERS else f"{text}..."


def _is_not_there(word: str, known: list[str]) -> str:
    near = nearest(word, known)
    return "is none of allowed_interpreters" + (f" (did you mean {near}?)" if near is not None else "")


def _listed(allowed: Sequence[AllowedInterpreter]) -> str:
    return ", ".join(map(str, allowed)) or "which is empty"


def _line(allowed: Sequence[AllowedInterpreter], more: str) -> str:
    return ",".join([*map(str, allowed), more])
