"""What a plan of `parallel` comes to, and what is wrong with one, from names and shapes alone."""

from __future__ import annotations

import pytest

from marserve import option_values
from marserve_handlers.sharding.plan import (
    EMBEDDING,
    LINEAR,
    STYLES,
    BadPlan,
    Module,
    divide,
    divided_dim,
    matches,
)


def linear(name: str, inputs: int, outputs: int) -> Module:
    """A `Linear` with a bias."""
    return Module(name, LINEAR, {"weight": (outputs, inputs), "bias": (outputs,)})


def norm(name: str, width: int) -> Module:
    """A layer norm."""
    return Module(name, "LayerNorm", {"weight": (width,), "bias": (width,)})


def transformer(layers: int = 2, width: int = 8) -> list[Module]:
    """The modules of an encoder, as torch names them."""
    found = [Module("", "Encoder"), Module("embed", EMBEDDING, {"weight": (10, width)}), Module("layers", "ModuleList")]
    for at in range(layers):
        own = f"layers.{at}"
        found += [Module(own, "Layer"), Module(f"{own}.attn", "Attention"), norm(f"{own}.norm", width)]
        found += [linear(f"{own}.attn.{name}", width, width) for name in ("q", "k", "v", "o")]
        found += [Module(f"{own}.mlp", "MLP"), linear(f"{own}.mlp.up", width, 4 * width)]
        found += [linear(f"{own}.mlp.down", 4 * width, width)]
    return [*found, linear("head", width, 10)]


ATTENTION = {"layers.*.attn.[qkv]": "colwise", "layers.*.attn.o": "rowwise"}
MLP = {"layers.*.mlp.up": "colwise", "layers.*.mlp.down": "rowwise"}
REST = {"embed": "replicate", "head": "replicate"}


def fault(plan: dict[str, str], modules: list[Module] | None = None, ranks: int = 2) -> str:
    """What is wrong with the plan."""
    with pytest.raises(BadPlan) as refused:
        divide(modules or transformer(), plan, ranks)
    return str(refused.value)


def test_patterns_name_modules_part_by_part() -> None:
    """A * stays inside of its part, as in torch."""
    assert matches("layers.*.up", "layers.0.up")
    assert matches("layers.[01].u*", "layers.1.up")
    assert not matches("layers.*", "layers.0.up")
    assert not matches("*.up", "layers.0.up")
    assert not matches("layers.*.up", "layers.0.Up")


def test_the_styles_are_those_that_the_server_takes() -> None:
    """The server imports nothing of the handlers."""
    assert STYLES == option_values.PARALLEL_STYLES


def test_a_whole_plan_gives_each_module_its_style() -> None:
    """Without remarks where it says of everything what is to become of it."""
    division = divide(transformer(), ATTENTION | MLP | REST, 2)

    assert division.remarks == ()
    assert len(division.styles) == 2 * 6
    assert division.styles["layers.1.attn.k"] == "colwise"
    assert division.styles["layers.0.mlp.down"] == "rowwise"


@pytest.mark.parametrize(
    ("kind", "style", "weight", "bias"),
    [
        (LINEAR, "colwise", 0, 0),
        (LINEAR, "colwise_rep", 0, 0),
        (LINEAR, "rowwise", 1, None),
        (LINEAR, "rowwise_rep", 1, None),
        (LINEAR, "replicate", None, None),
        (EMBEDDING, "colwise_rep", 1, None),
        (EMBEDDING, "rowwise", 0, None),
        ("LayerNorm", "replicate", None, None),
    ],
)
def test_styles_divide_these_dimensions(kind: str, style: str, weight: int | None, bias: int | None) -> None:
    """As torch's do (`test_parallel.py` has the same of its tensors)."""
    assert (divided_dim(kind, style, "weight"), divided_dim(kind, style, "bias")) == (weight, bias)


def test_a_pattern_without_a_match_is_named_with_the_nearest() -> None:
    """torch only warns."""
    assert fault(ATTENTION | {"layers.*.mpl.up": "colwise"}) == (
        "layers.*.mpl.up matches no module: the nearest is layers.*.mlp.up"
    )
    assert fault(ATTENTION | {"layers.*.attn.q.weight": "colwise"}) == (
        "layers.*.attn.q.weight matches no module: the nearest is layers.*.attn.q"
    )
    assert fault(ATTENTION | {"encoder": "colwise"}).startswith("encoder matches no module")


def test_a_module_with_two_styles_is_named_with_both_patterns() -> None:
    """Even where both say the same: torch would divide it twice."""
    assert fault(ATTENTION | {"layers.0.attn.q": "colwise"}) == (
        "layers.0.attn.q is matched by layers.*.attn.[qkv] and by layers.0.attn.q, and can have one style"
    )


def test_a_width_that_does_not_divide_is_named_once_for_all_layers() -> None:
    """With the width and the number of ranks."""
    assert fault(ATTENTION, transformer(width=7)) == (
        "layers.*.attn.q has out_features 7, which 2 ranks cannot share evenly; "
        "layers.*.attn.k has out_features 7, which 2 ranks cannot share evenly; "
        "layers.*.attn.v has out_features 7, which 2 ranks cannot share evenly; "
        "layers.*.attn.o has in_features 7, which 2 ranks cannot share evenly"
    )
    assert fault(ATTENTION | {"embed": "rowwise"}, ranks=4) == (
        "embed has num_embeddings 10, which 4 ranks cannot share evenly"
    )


def test_what_is_neither_linear_nor_an_embedding_is_named() -> None:
    """A container, too: torch divides only these."""
    assert fault(ATTENTION | {"layers.*.norm": "colwise", "layers.*.mlp": "rowwise"}) == (
        "layers.*.norm is a LayerNorm, and colwise divides Linear and Embedding alone: name the ones in it; "
        "layers.*.mlp is a MLP, and rowwise divides Linear and Embedding alone: name the ones in it"
    )


@pytest.mark.parametrize(
    ("plan", "name", "advice"),
    [
        ({"layers.*.mlp.up": "colwise"}, "layers.*.mlp.up is colwise", "plan the module that reads it as rowwise"),
        ({"layers.*.mlp.down": "rowwise"}, "layers.*.mlp.down is rowwise", "plan the module before it as colwise"),
        (ATTENTION | {"layers.*.mlp.up": "colwise"}, "layers.*.mlp.up is colwise", "nothing beside it takes up"),
        (ATTENTION | {"layers.*.mlp.down": "rowwise"}, "layers.*.mlp.down is rowwise", "nothing beside it gives it"),
        (ATTENTION | {"head": "colwise"}, "head is colwise", "or use colwise_rep, which gathers what it gives"),
        (ATTENTION | {"head": "rowwise"}, "head is rowwise", "or use rowwise_rep, which takes a whole input"),
        (ATTENTION | {"embed": "colwise"}, "embed is colwise", "or use colwise_rep"),
    ],
)
def test_half_a_pair_is_named(plan: dict[str, str], name: str, advice: str) -> None:
    """What one gives in parts another must take up in parts: torch says so at the first call at best."""
    said = fault(plan)

    assert said.startswith(name)
    assert advice in said


@pytest.mark.parametrize(
    ("names", "plan"),
    [
        (("up", "down"), {"up": "colwise", "down": "rowwise"}),
        (("0", "2"), {"0": "colwise", "2": "rowwise"}),
        (("net.0", "net.2"), {"net.0": "colwise", "net.2": "rowwise"}),
        (("layers.0.q", "layers.0.o"), {"layers.*.q": "colwise", "layers.*.o": "rowwise"}),
        (
            ("layer.0.attention.self.query", "layer.0.attention.output.dense"),
            {"layer.*.attention.self.query": "colwise", "layer.*.attention.output.dense": "rowwise"},
        ),
        (("head", "embed"), {"head": "colwise_rep", "embed": "rowwise_rep"}),
        (
            ("layers.0.mlp.experts.up", "layers.0.mlp.shared", "layers.0.mlp.down"),
            {"layers.*.mlp.experts.up": "colwise", "layers.*.mlp.shared": "colwise", "layers.*.mlp.down": "rowwise"},
        ),
        (
            ("layers.0.q", "layers.0.o", "layers.0.out.dense"),
            {"layers.*.q": "colwise", "layers.*.o": "rowwise", "layers.*.out.dense": "rowwise"},
        ),
    ],
)
def test_pairs_are_found_in_one_module_and_in_one_layer(names: tuple[str, ...], plan: dict[str, str]) -> None:
    """As models of several libraries name them."""
    assert set(divide([linear(name, 8, 8) for name in names], plan, 2).styles) == set(names)


def test_parameters_that_no_pattern_covers_are_a_remark() -> None:
    """Matrices alone, the largest first, with what each rank holds of them; norms and biases are whole anyway."""
    (remark,) = divide(transformer(), ATTENTION, 2).remarks

    assert remark == (
        "parallel names no style for layers.*.mlp.up.weight, layers.*.mlp.down.weight, embed.weight, head.weight: each "
        "of the 2 ranks holds 4.6 KiB of them whole. If that is meant, replicate in its plan says so"
    )
    assert divide(transformer(), ATTENTION | {"layers.*.mlp": "replicate"} | REST, 2).remarks == ()
    assert divide(transformer(), ATTENTION, 1).remarks == ()


def test_a_plan_that_divides_nothing_is_refused() -> None:
    """Ranks would each compute the whole model."""
    assert fault({"layers.*": "replicate"}) == "it divides nothing: every module that it names is replicated"


def test_all_that_is_wrong_is_said_at_once_and_not_without_end() -> None:
    """Five, and how many more."""
    plan = {f"none{at}.x": "colwise" for at in range(8)}

    assert fault(plan).count("matches no module") == 5
    assert fault(plan).endswith("; and 3 more")
