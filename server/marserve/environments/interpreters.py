"""Which interpreter a model's workers run under: the one that its configuration names, if the operator allows it.

Paths are compared without following the interpreter's own link: `bin/python` of a virtual environment is a link to the
interpreter that made it, and stands for the environment only by the folder that it lies in.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from marserve.environments.interpreter_probe import PROBE_S, probe
from marserve.errors import InterpreterRefused
from marserve.files.nearest import nearest
from marserve.lineage import VARIABLE, end_families
from marserve.model_options import ModelOptions
from marserve.names import escaped
from marserve.pool.interpreter import Interpreter, link_packages, stamp_files
from marserve.pool.launchers.leftovers import Leftovers
from marserve.settings.interpreters import AllowedInterpreter

log = logging.getLogger("marserve.environments")

# So much of a name or path is shown: a model's configuration may have many thousand characters of it.
_SHOWN_CHARACTERS = 300


class Interpreters:
    """The interpreters that a server allows. Each is started, and looked at, once for each version that names it.

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

    def is_handlers_own(self, options: ModelOptions) -> bool:
        """Whether `environment` is a key that the model's own handler reads: no interpreter has a name here.

        Handlers for TorchServe may have one of that name.
        """
        return not self._allowed and options.interpreter_name is not None and options.interpreter_path is None

    def find(self, options: ModelOptions) -> Interpreter | None:
        """The interpreter that a version's options name, None for the server's. Blocks: it runs that interpreter.

        Raises InterpreterRefused, with a sentence about what is wrong and what to do.
        """
        try:
            allowed = choose(options.interpreter_name, options.interpreter_path, self._allowed)
            if allowed is None:
                return None
            return self._look_at(allowed)
        except _Refused as refused:
            raise InterpreterRefused(f"Model {options.model} cannot be loaded: {refused}") from None

    def _look_at(self, allowed: AllowedInterpreter) -> Interpreter:
        path = str(allowed.path)
        stamps = stamp_files([path, str(allowed.path.parent.parent / "pyvenv.cfg")])
        lineage = self._leftovers.child("interpreter")
        try:
            found = probe(path, {**self._environment, VARIABLE: lineage}, self._limit_s)
        finally:  # a script around an interpreter may have started more
            end_families({lineage: 0})
        if isinstance(found, str):
            raise _Refused(found)
        if found.executable != path:  # of a script that starts an interpreter
            stamps = (*stamps, *stamp_files([found.executable]))
        assert self._folder is not None
        interpreter = Interpreter(path, found.version, str(link_packages(self._folder)), allowed.name, stamps)
        log.info("workers under %s: msgspec %s, prefix %s", interpreter.shown, found.msgspec, found.prefix)
        return interpreter


class _Refused(Exception):
    """No such interpreter can be used; the text is a sentence."""


def choose(name: str | None, path: str | None, allowed: Sequence[AllowedInterpreter]) -> AllowedInterpreter | None:
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
    place = place_of(path)
    for each in allowed:
        if place_of(str(each.path)) == place:
            return each
    raise _Refused(
        f"it asks for the interpreter python: {shown_path}, which "
        f"{_is_not_there(path, [str(each.path) for each in allowed])}. To allow it, write "
        f"allowed_interpreters={_line(allowed, shown_path)} into config.properties."
    )


def place_of(path: str) -> str:
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
