"""Where the next worker of a slot goes while devices are lost."""

from __future__ import annotations

import pytest

from marserve.memory.device_moves import Site, choose_site
from marserve.memory.eviction import Devices

LOST = {"is_sound": False, "is_settled": False}


@pytest.mark.parametrize(
    ("present", "home", "sites", "chosen"),
    [
        pytest.param((0,), (0,), [Site((0,)), Site((1,))], (0,), id="at home, and sound"),
        pytest.param((0,), (0,), [Site((0,), is_settled=False, fits=False), Site((1,))], (0,), id="its own is its own"),
        pytest.param((0,), (0,), [Site((0,), **LOST), Site((1,)), Site((2,))], (1,), id="the first of equal ones"),
        pytest.param((0,), (0,), [Site((0,), **LOST), Site((1,), workers=2), Site((2,), workers=1)], (2,), id="fewest"),
        pytest.param((0,), (0,), [Site((0,), **LOST), Site((1,), fits=False), Site((2,), workers=9)], (2,), id="fits"),
        pytest.param((0,), (0,), [Site((0,), **LOST), Site((1,), fits=False)], (1,), id="full is better than lost"),
        pytest.param((0,), (0,), [Site((0,), **LOST), Site((1,), **LOST)], None, id="all are lost"),
        pytest.param((1,), (0,), [Site((0,)), Site((1,))], (0,), id="back home"),
        pytest.param((1,), (0,), [Site((0,), is_settled=False), Site((1,))], (1,), id="not home yet"),
        pytest.param((1,), (0,), [Site((0,), fits=False), Site((1,))], (1,), id="no room at home"),
        pytest.param((1,), (0,), [Site((0,), is_settled=False), Site((1,), **LOST)], (0,), id="home at once"),
        pytest.param((0, 1), (0, 1), [Site((0, 1), **LOST)], None, id="no other group is free"),
        pytest.param((0, 1), (0, 1), [Site((0, 1), **LOST), Site((4, 5))], (4, 5), id="another group is free"),
    ],
)
def test_a_worker_goes_where_it_can(present: Devices, home: Devices, sites: list[Site], chosen: Devices | None) -> None:
    """Home first, then where it is, then elsewhere; it waits where all are lost."""
    assert choose_site(present, home, sites) == chosen
