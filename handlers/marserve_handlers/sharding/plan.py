"""What a plan of `parallel` does to a model, from the names, kinds and shapes of its modules alone. Pure.

A pattern names modules as torch's `parallelize_module` reads it: as many parts as the name has, `*` for any text inside
of a part. torch itself only warns of a pattern that matches nothing, and of most other mistakes it says something at
the first call, in words of tensors; here they are found before anything is loaded.

The styles are torch's: `colwise` divides what a module gives, `rowwise` what it takes, so a colwise module is followed
by a rowwise one, which adds up the parts. `colwise_rep` gathers its output on every rank, `rowwise_rep` takes a whole
input; `replicate` says that a module, with all below it, is meant to be whole on every rank.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from math import prod
from typing import NamedTuple

STYLES = ("colwise", "rowwise", "colwise_rep", "rowwise_rep", "replicate")
LINEAR, EMBEDDING = "Linear", "Embedding"
# The dimension that a style divides, by the sort of module, then the name of the parameter; all others are whole.
_DIVIDED: Mapping[tuple[str, str], Mapping[str, int]] = {
    ("colwise", LINEAR): {"weight": 0, "bias": 0},
    ("rowwise", LINEAR): {"weight": 1},
    ("colwise", EMBEDDING): {"weight": 1},
    ("rowwise", EMBEDDING): {"weight": 0},
}
_WIDTHS = {("colwise", LINEAR): "out_features", ("rowwise", LINEAR): "in_features"} | {
    ("colwise", EMBEDDING): "embedding_dim",
    ("rowwise", EMBEDDING): "num_embeddings",
}
_MOST_NAMED = 5


class BadPlan(ValueError):
    """The plan does not fit the model: the message says what is wrong with it, all of it."""


class Module(NamedTuple):
    """A module: its name, the name of its class, and the shapes of the parameters that are its own.

    `kind` is `Linear` or `Embedding` for classes derived from these, too. `bytes_each` is the size of a number.
    """

    name: str
    kind: str
    shapes: Mapping[str, tuple[int, ...]] = {}
    bytes_each: int = 4


@dataclass(frozen=True, slots=True)
class Division:
    """What a plan comes to: the styles of modules by their whole names, and sentences for the operator."""

    ranks: int
    styles: Mapping[str, str] = field(default_factory=dict)
    remarks: tuple[str, ...] = ()


def matches(pattern: str, name: str) -> bool:
    """Whether the pattern names the module: part by part, as torch does."""
    parts, wanted = name.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(map(fnmatchcase, parts, wanted))


def divide(modules: Sequence[Module], plan: Mapping[str, str], ranks: int) -> Division:
    """What the plan does to a model of these modules on so many ranks. Raises BadPlan with all that is wrong."""
    styles, faults = _styles_of(modules, plan)
    by_name = {module.name: module for module in modules}
    divided = {name: style for name, style in styles.items() if style != "replicate"}
    faults += _once_for_layers((name, _fault_of_width(by_name[name], style, ranks)) for name, style in divided.items())
    if not faults:
        fitting = {name: style for name, style in divided.items() if by_name[name].kind in (LINEAR, EMBEDDING)}
        faults += _once_for_layers(_halves(fitting, by_name))
        if not divided:
            faults.append("it divides nothing: every module that it names is replicated")
    if faults:
        more = f"; and {len(faults) - _MOST_NAMED} more" if len(faults) > _MOST_NAMED else ""
        raise BadPlan("; ".join(faults[:_MOST_NAMED]) + more)
    return Division(ranks, divided, tuple(_remarks(modules, styles, ranks)))


def divided_dim(kind: str, style: str, parameter: str) -> int | None:
    """The dimension of a module's parameter that is divided over the ranks; None for one that each has whole."""
    return _DIVIDED.get((style.removesuffix("_rep"), kind), {}).get(parameter)


def _styles_of(modules: Sequence[Module], plan: Mapping[str, str]) -> tuple[dict[str, str], list[str]]:
    """The styles by whole names, and what is wrong with the patterns."""
    names = [module.name for module in modules if module.name]
    taken: dict[str, str] = {}
    faults = []
    for pattern in plan:
        found = [name for name in names if matches(pattern, name)]
        if not found:
            faults.append(f"{pattern} matches no module{_nearest(pattern, names)}")
        twice = [name for name in found if name in taken]
        if twice:
            faults.append(f"{twice[0]} is matched by {taken[twice[0]]} and by {pattern}, and can have one style")
        taken.update((name, pattern) for name in found if name not in taken)
    return {name: plan[pattern] for name, pattern in taken.items()}, faults


def _nearest(pattern: str, names: Sequence[str]) -> str:
    known = dict.fromkeys([*map(_for_all_layers, names), *names])
    near = difflib.get_close_matches(pattern, known, n=1, cutoff=0.5)
    return f": the nearest is {near[0]}" if near else ""


def _for_all_layers(name: str) -> str:
    """The name with a * in place of each number."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", name)


def _fault_of_width(module: Module, style: str, ranks: int) -> str:
    """Why the module cannot have this style on so many ranks; empty where it can."""
    if module.kind not in (LINEAR, EMBEDDING):
        return f"is a {module.kind}, and {style} divides Linear and Embedding alone: name the ones in it"
    basis = style.removesuffix("_rep")
    dim = divided_dim(module.kind, style, "weight")
    shape = module.shapes.get("weight", ())
    if dim is None or len(shape) <= dim:
        return f"has no weight of its own that {style} could divide"
    if shape[dim] % ranks:
        return f"has {_WIDTHS[basis, module.kind]} {shape[dim]}, which {ranks} ranks cannot share evenly"
    return ""


def _halves(styles: Mapping[str, str], modules: Mapping[str, Module]) -> Iterator[tuple[str, str]]:
    """The names of colwise modules that no rowwise one follows, and the reverse, as far as names show it.

    Partners lie in one module, or one of them in a module inside of the other's, or else in one layer, where the
    partner has none in its own module. What names do not show samples do.
    """
    givers = [name for name, style in styles.items() if style == "colwise"]
    takers = [name for name, style in styles.items() if style == "rowwise" and modules[name].kind == LINEAR]
    for own, others, words in (
        (givers, takers, "is colwise, and nothing beside it takes up its part: plan the module that reads it as "
         "rowwise, or use colwise_rep, which gathers what it gives"),
        (takers, givers, "is rowwise, and nothing beside it gives it parts: plan the module before it as colwise, or "
         "use rowwise_rep, which takes a whole input"),
    ):  # fmt: skip
        beside = {_parent(name) for name in others}
        around = {above for parent in beside for above in _above(parent)}
        busy = {_parent(name) for name in own}
        free = {layer for name in others if _parent(name) not in busy for layer in _layers(name)}
        for name in own:
            parent = _parent(name)
            is_near = parent in beside or parent in around or not beside.isdisjoint(_above(parent))
            if not is_near and free.isdisjoint(_layers(name)):
                yield name, words


def _parent(name: str) -> str:
    return name.rpartition(".")[0]


def _above(name: str) -> list[str]:
    """The modules that hold this one, except the model itself."""
    parts = name.split(".")
    return [".".join(parts[:at]) for at in range(1, len(parts))]


def _layers(name: str) -> list[str]:
    """The numbered modules that hold this one; the model itself, as "", where there are none."""
    parts = name.split(".")
    return [".".join(parts[:at]) for at in range(1, len(parts)) if parts[at - 1].isdigit()] or [""]


def _once_for_layers(faults: Iterable[tuple[str, str]]) -> list[str]:
    """Each fault once, for all layers that have it."""
    return list(dict.fromkeys(f"{_for_all_layers(name)} {fault}" for name, fault in faults if fault))


def _remarks(modules: Sequence[Module], styles: Mapping[str, str], ranks: int) -> Iterator[str]:
    """A sentence about matrices that the plan does not name. Norms and biases are whole on every rank anyway."""
    if ranks == 1:
        return
    meant = [name for name, style in styles.items() if style == "replicate"]
    whole: dict[str, int] = {}
    for module in modules:
        is_meant = any(module.name == name or module.name.startswith(f"{name}.") for name in meant)
        for name, shape in module.shapes.items():
            if len(shape) > 1 and module.name not in styles and not is_meant:
                known = _for_all_layers(f"{module.name}.{name}" if module.name else name)
                whole[known] = whole.get(known, 0) + prod(shape) * module.bytes_each
    if whole:
        largest = sorted(whole, key=lambda name: -whole[name])
        more = f" and {len(largest) - _MOST_NAMED} more" if len(largest) > _MOST_NAMED else ""
        yield (
            f"parallel names no style for {', '.join(largest[:_MOST_NAMED])}{more}: each of the {ranks} ranks holds "
            f"{_shown_bytes(sum(whole.values()))} of them whole. If that is meant, replicate in its plan says so"
        )


def _shown_bytes(size: int) -> str:
    return f"{size / (1 << 20):.1f} MiB" if size >= 1 << 20 else f"{size / 1024:.1f} KiB"
