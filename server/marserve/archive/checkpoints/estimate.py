"""How much memory the weights of a checkpoint take, on each rank of a plan, by their headers. Pure.

A plan divides modules; a name in a checkpoint is a module's with the parameter behind it. What a `colwise` module has
is divided, of a `rowwise` one its weight. The bytes of a weight are divided alike along each dimension, so that the
class of the module, which no header says, makes no difference.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from marserve.archive.checkpoints.contents import Saved, first_of

_DIVIDED: Mapping[str, tuple[str, ...]] = {"colwise": ("weight", "bias"), "rowwise": ("weight",)}


@dataclass(frozen=True, slots=True)
class Estimate:
    """Bytes on each of the `ranks`: its share of what is `divided`, and what is `whole` on every one.

    `total` are those of all tensors once. `problems` are sentences about a plan that does not fit.
    """

    ranks: int
    divided: int
    whole: int
    total: int
    problems: tuple[str, ...] = ()

    @property
    def a_rank(self) -> int:
        """The bytes of weights that one rank holds."""
        return self.divided + self.whole


def estimate(tensors: Mapping[str, Saved], shares: Mapping[str, int], ranks: int = 1) -> Estimate:
    """What each rank holds if `shares` says over how many ranks a name is divided; others are whole on each."""
    divided = sum(saved.bytes // shares[name] for name, saved in tensors.items() if shares.get(name, 1) > 1)
    whole = sum(saved.bytes for name, saved in tensors.items() if shares.get(name, 1) == 1)
    return Estimate(ranks, divided, whole, sum(saved.bytes for saved in tensors.values()))


def shares_of(
    tensors: Mapping[str, Saved], plan: Mapping[str, str], ranks: int
) -> tuple[dict[str, int], tuple[str, ...]]:
    """Over how many ranks each name is divided by the plan of `parallel`, and what is wrong with the plan."""
    shares: dict[str, int] = {}
    problems = []
    for pattern, style in plan.items():
        found = [name for name in tensors if _matches(pattern, name.rpartition(".")[0])]
        if not found and not _names_more(pattern, tensors):
            problems.append(f"{pattern} matches no module whose weights are there")
        for name in found:
            if name.rpartition(".")[2] in _DIVIDED.get(style.removesuffix("_rep"), ()):
                shares[name] = ranks
    if odd := [name for name in shares if all(size % ranks for size in tensors[name].shape)]:
        problems.append(f"{first_of(odd)}: no dimension that {ranks} ranks can share evenly")
    return shares, tuple(problems)


def _matches(pattern: str, module: str) -> bool:
    parts, wanted = module.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(map(fnmatchcase, parts, wanted))


def _names_more(pattern: str, tensors: Iterable[str]) -> bool:
    """Whether it names a module that has others in it, as `replicate` may."""
    depth = pattern.count(".") + 1
    return any(_matches(pattern, ".".join(name.split(".")[:depth])) for name in tensors)
