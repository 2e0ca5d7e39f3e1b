"""What docs/parallel.md shows of a plan is so: its model, its configuration, and the sentences of refusals."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import yaml  # noqa: E402

from marserve.model_options import read_value  # noqa: E402
from marserve.option_values import PARALLEL_STYLES  # noqa: E402
from marserve_handlers.sharding.parallel import modules_of  # noqa: E402
from marserve_handlers.sharding.plan import BadPlan, Module, divide  # noqa: E402

pytestmark = pytest.mark.torch
PAGE = (Path(__file__).parents[3] / "docs" / "parallel.md").read_text()


def shown(name: str) -> str:
    """The file of that name on the page."""
    found = re.search(rf"^    # {re.escape(name)}\n((?:    .*\n|\n(?=    ))*)", PAGE, re.MULTILINE)
    assert found, name
    return textwrap.dedent(found[1].split("    # model-config.yaml")[0])


def tower() -> list[Module]:
    """The modules of the page's model."""
    names: dict[str, Any] = {}
    exec(shown("tower.py"), names)
    with torch.device("meta"):
        return list(modules_of(names["Tower"]()))


def test_the_pages_plan_fits_its_model() -> None:
    """Without a remark; and what it says where `replicate` is left out."""
    parallel: Any = read_value("parallel", yaml.safe_load(shown("model-config.yaml"))["parallel"])
    plan = dict(parallel.plan)

    assert divide(tower(), plan, parallel.ranks).remarks == ()
    del plan["head"]
    assert divide(tower(), plan, parallel.ranks).remarks[0] in PAGE


@pytest.mark.parametrize(
    ("plan", "ranks"),
    [
        ({"layers.*.up": "colwise", "layers.*.dwn": "rowwise"}, 2),
        ({"layers.*.up": "colwise", "layers.*.down": "rowwise"}, 3),
        ({"layers.*.up": "colwise"}, 2),
        ({"layers.*.norm": "colwise"}, 2),
        ({"layers.*.up": "colwise", "layers.0.up": "colwise"}, 2),
    ],
)
def test_refusals_are_worded_as_on_the_page(plan: dict[str, str], ranks: int) -> None:
    """The page cuts long ones off."""
    with pytest.raises(BadPlan) as refused:
        divide(tower(), plan, ranks)

    first = str(refused.value).split("; ")[0]
    assert f"`{first}`" in PAGE or f"`{first.split(': ')[0]}: …`" in PAGE


def test_the_page_has_every_style() -> None:
    """One row each."""
    assert re.findall(r"^\| `(\w+)` \| [`a]", PAGE, re.MULTILINE) == list(PARALLEL_STYLES)
