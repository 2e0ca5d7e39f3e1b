"""A model divided over ranks: which part each rank reads, and what is refused before it reads any.

The ranks are made one after the other in a group that sends nothing; real ones answer in `tests/end_to_end`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
import yaml  # noqa: E402
from safetensors.torch import save_file, save_model  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.tensor import DTensor  # noqa: E402
from torch.distributed.tensor.debug import CommDebugMode  # noqa: E402
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: E402

from marserve_handlers.errors import ModelNotLoadable  # noqa: E402
from marserve_handlers.sharding import parallel  # noqa: E402
from marserve_handlers.sharding.plan import divide, divided_dim  # noqa: E402
from support import divided  # noqa: E402
from support.checkpoints import as_workers_get_it, save_in_pieces  # noqa: E402

pytestmark = pytest.mark.torch
CPU = torch.device("cpu")
PLAN: dict[str, str] = yaml.safe_load(divided.PLAN)["plan"]


@contextlib.contextmanager
def rank_of(size: int, rank: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This process as a rank of a group whose collectives do nothing."""
    monkeypatch.setenv("WORLD_SIZE", str(size))
    dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def context_of(plan: dict[str, str], ranks: int = 2) -> Any:
    """What a worker's context says of its model."""
    return SimpleNamespace(parallel=({"tp": ranks}, plan), load_warnings=[], one_rank=None)


def archive_of(folder: Path, source: str, name: str = "model.py") -> str:
    """The folder of an unpacked archive with this model file."""
    (folder / "blocks.py").write_text(divided.BLOCKS)
    (folder / name).write_text(source)
    return str(folder)


def share_of(whole: Any, ranks: int) -> int:
    """The bytes of parameters that a rank is to hold."""
    modules = list(parallel.modules_of(whole))
    return divided.bytes_of_a_rank(modules, divide(modules, PLAN, ranks))


def held_in(parts: Sequence[Any], whole: Any) -> int:
    """The bytes of parameters that rank 0 holds. Fails unless the parts of all ranks make up the whole model."""
    modules = list(parallel.modules_of(whole))
    division = divide(modules, PLAN, len(parts))
    held = 0
    for module in modules:
        for leaf in module.shapes:
            mine = [getattr(part.get_submodule(module.name), leaf) for part in parts]
            local = [each.to_local() if isinstance(each, DTensor) else each for each in mine]
            dim = divided_dim(module.kind, division.styles.get(module.name, "replicate"), leaf)
            wanted = getattr(whole.get_submodule(module.name), leaf)
            assert torch.equal(torch.cat(local, dim) if dim is not None else local[1], wanted), (module.name, leaf)
            held += local[0].numel() * 4
    return held


@pytest.mark.parametrize("ending", ["pt", "safetensors"])
def test_the_parts_of_the_ranks_make_up_the_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: str) -> None:
    """Each number once over the ranks where a style divides it, and on every rank elsewhere."""
    whole = divided.build(divided.source())
    folder, path = archive_of(tmp_path, divided.source()), str(tmp_path / f"m.{ending}")
    state = whole.state_dict()
    save_file(state, path) if ending == "safetensors" else torch.save(state, path)
    parts = []
    for rank in range(2):
        context = context_of(PLAN)
        with rank_of(2, rank, monkeypatch):
            model = parallel.load_parallel(folder, "model.py", path, CPU, context)
        assert context.one_rank.ranks == 2
        assert context.load_warnings == []
        assert not model.training
        parts.append(model)

    assert held_in(parts, whole) == share_of(whole, 2)
    assert torch.equal(parts[1].angles, whole.angles)  # in no file: its class computes it
    assert torch.equal(parts[1].scale, whole.scale)


@pytest.mark.parametrize("saved_by", [0, 1, 2])
@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_fill_their_parts_from_a_checkpoint_saved_by_any_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, saved_by: int, ranks: int
) -> None:
    """Of safetensors files (here saved by none), and of pieces of one or two ranks."""
    whole = divided.build(divided.source())
    folder, state = archive_of(tmp_path, divided.source()), whole.state_dict()
    if saved_by:
        save_in_pieces(tmp_path / "weights", state, saved_by)
    else:
        (tmp_path / "weights").mkdir()
        for number, names in enumerate((list(state)[::2], list(state)[1::2])):
            save_file({name: state[name] for name in names}, tmp_path / "weights" / f"{number}.safetensors")
    parts, read = [], 0
    for rank in range(ranks):
        context = context_of(PLAN, ranks)
        context.checkpoint = as_workers_get_it(tmp_path / "weights")
        with rank_of(ranks, rank, monkeypatch):
            parts.append(parallel.load_parallel(folder, "model.py", None, CPU, context))
        assert context.has_taken_checkpoint
        read = context.checkpoint.size

    assert held_in(parts, whole) == share_of(whole, ranks)
    assert read == share_of(whole, ranks) + whole.scale.nbytes


FLAT = """
from torch import nn

class Flat(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
"""


@pytest.mark.parametrize(
    ("source", "plan", "inputs", "wanted"),
    [
        (FLAT, {"0": "colwise", "2": "rowwise"}, torch.ones(3, 4), {"all_reduce": 1}),
        (FLAT, {"0": "colwise", "2": "rowwise"}, torch.ones(1, 4), {"all_reduce": 1}),
        (FLAT, {"0": "colwise", "2": "rowwise"}, torch.ones(3, 2, 4), {"all_reduce": 1}),
        (FLAT, {"0": "colwise_rep"}, torch.ones(3, 4), {"all_gather_into_tensor": 1}),
        (FLAT, {"0": "rowwise_rep"}, torch.ones(3, 4), {"all_reduce": 1}),
        (divided.source(), PLAN, torch.ones(3, 5), {"all_reduce": 5, "all_gather_into_tensor": 1}),
    ],
)
def test_ranks_exchange_what_is_computed_and_never_weights(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    source: str,
    plan: dict[str, str],
    inputs: torch.Tensor,
    wanted: dict[str, int],
) -> None:
    """In inference mode torch would gather the weights of a linear layer with a bias, at each call."""
    folder = archive_of(tmp_path, source, f"exchange_{len(source)}.py")
    with rank_of(2, 0, monkeypatch):
        model = parallel.load_parallel(folder, f"exchange_{len(source)}.py", None, CPU, context_of(plan))
        with CommDebugMode() as exchanged, torch.inference_mode():
            (model(inputs) + 0).tolist()  # waits for all that was begun

    assert {name.__name__: count for name, count in exchanged.get_comm_counts().items()} == wanted


def test_the_plan_is_judged_before_anything_is_read(tmp_path: Path) -> None:
    """There is no file of weights here, and no other rank."""
    folder = archive_of(tmp_path, divided.source())
    plan = PLAN | {"layers.*.att.q": "colwise"}

    with pytest.raises(ModelNotLoadable) as refused:
        parallel.load_parallel(folder, "model.py", str(tmp_path / "none.pt"), CPU, context_of(plan))
    assert str(refused.value) == (
        "The plan of parallel does not fit the model: layers.*.att.q matches no module: the nearest is layers.*.attn.q."
    )
    with pytest.raises(ModelNotLoadable, match=r"serialized file none\.pt is missing"):
        parallel.load_parallel(folder, "model.py", str(tmp_path / "none.pt"), CPU, context_of(PLAN))


def test_outside_of_a_group_of_that_size_it_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a handler runs without a server."""
    folder = archive_of(tmp_path, divided.source())
    monkeypatch.delenv("WORLD_SIZE", raising=False)

    with pytest.raises(ModelNotLoadable, match=r"mesh {'tp': 2}, and this process is one of no ranks"):
        parallel.load_parallel(folder, "model.py", None, CPU, context_of(PLAN))


def test_weights_that_do_not_fit_are_named(tmp_path: Path) -> None:
    """Missing, superfluous, and of another shape, all at once."""
    folder, path = archive_of(tmp_path, divided.source()), str(tmp_path / "m.pt")
    state = divided.build(divided.source()).state_dict()
    del state["head.bias"]
    state["more"] = torch.zeros(1)
    state["scale"] = torch.zeros(3)
    torch.save(state, path)

    with pytest.raises(ModelNotLoadable) as refused:
        parallel.load_parallel(folder, "model.py", path, CPU, context_of(PLAN))
    assert str(refused.value) == (
        "The weights of m.pt cannot be loaded: it does not fit Encoder: it lacks head.bias; it holds more, which the "
        "model does not have; scale has the shape [3] in it and [32] in the model."
    )


@pytest.mark.parametrize(
    ("saved", "what"),
    [({"epoch": 3}, "epoch is of type int"), ([1], "it is of type list"), (torch.ones(2), "it is of type Tensor")],
)
def test_a_file_without_a_state_dict_is_named(tmp_path: Path, saved: object, what: str) -> None:
    """As where a whole training was saved."""
    folder, path = archive_of(tmp_path, divided.source()), str(tmp_path / "m.pt")
    torch.save(saved, path)

    with pytest.raises(
        ModelNotLoadable, match=rf"m\.pt cannot be loaded: they are no state dict, for {what}: save what"
    ):
        parallel.load_parallel(folder, "model.py", path, CPU, context_of(PLAN))


def test_a_file_that_is_none_is_named(tmp_path: Path) -> None:
    """In both formats."""
    folder = archive_of(tmp_path, divided.source())
    for name in ("m.pt", "n.safetensors"):
        (tmp_path / name).write_bytes(b"nothing of that sort")
        with pytest.raises(ModelNotLoadable, match=name):
            parallel.load_parallel(folder, "model.py", str(tmp_path / name), CPU, context_of(PLAN))


TIED = """
from torch import nn

class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.up, self.down = nn.Linear(4, 6), nn.Linear(6, 4)
        self.head = nn.Linear(4, 8, bias=False)
        self.head.weight = self.embed.weight
"""


def test_tied_weights_stay_tied_where_they_are_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of safetensors has them under one name, whichever; a divided one is read by that name, too."""
    names: dict[str, Any] = {}
    exec(TIED, names)
    whole, path = names["Tied"](), str(tmp_path / "m.safetensors")
    save_model(whole, path)
    folder = archive_of(tmp_path, TIED, "tied.py")
    pair = {"up": "colwise", "down": "rowwise"}
    found = []
    for plan in (pair, pair | {"head": "colwise_rep"}):
        with rank_of(2, 1, monkeypatch):
            found.append(parallel.load_parallel(folder, "tied.py", path, CPU, context_of(plan)))

    assert found[0].head.weight is found[0].embed.weight
    assert torch.equal(found[0].head.weight, whole.embed.weight)
    assert torch.equal(found[1].head.weight.to_local(), whole.embed.weight[4:])
    assert torch.equal(found[1].embed.weight, whole.embed.weight)


def test_tied_weights_that_disagree_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in one process; by the rank whose share of the rows differs."""
    names: dict[str, Any] = {}
    exec(TIED, names)
    state = {name: tensor.clone() for name, tensor in names["Tied"]().state_dict().items()}
    folder, pair = archive_of(tmp_path, TIED, "tied.py"), {"up": "colwise", "down": "rowwise"}
    for row, refused in ((None, []), (2, [0]), (7, [1])):
        path = str(tmp_path / f"{row}.safetensors")
        changed = state["head.weight"].clone()
        if row is not None:
            changed[row, 1] += 1
        save_file(state | {"head.weight": changed}, path)
        for rank in (0, 1):
            with rank_of(2, rank, monkeypatch):
                told = pytest.raises(ModelNotLoadable, match=r"head.weight and embed.weight are one tensor")
                with told if rank in refused else contextlib.nullcontext():
                    parallel.load_parallel(folder, "tied.py", path, CPU, context_of(pair))


NUMBERS = """
import torch
from torch import nn

class Numbers(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 6), nn.Linear(6, 4)
        torch.manual_seed(3)
        nn.init.normal_(self.up.weight)
        self.largest = {largest}
"""


def test_a_class_that_needs_the_numbers_of_its_parameters_gets_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then the whole model is in memory while it is built; without a file its numbers are the weights."""
    folder = archive_of(tmp_path, NUMBERS.format(largest="self.up.weight.max().item()"), "numbers_.py")
    with rank_of(2, 1, monkeypatch):
        model: Any = parallel.load_parallel(
            folder, "numbers_.py", None, CPU, context_of({"up": "colwise", "down": "rowwise"})
        )
    torch.manual_seed(3)
    wanted = torch.empty(6, 4).normal_()

    assert torch.equal(model.up.weight.to_local(), wanted[3:])
    assert model.largest == wanted.max().item()
    assert nn.Module.register_parameter.__name__ == "register_parameter"


def test_what_is_left_whole_is_a_warning_of_the_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The operator sees what memory it costs."""
    folder = archive_of(tmp_path, divided.source())
    context = context_of({name: style for name, style in PLAN.items() if name != "embed"})
    with rank_of(2, 0, monkeypatch):
        parallel.load_parallel(folder, "model.py", None, CPU, context)

    assert len(context.load_warnings) == 1
    assert context.load_warnings[0].startswith("parallel names no style for embed.weight: each of the 2 ranks holds 8")
