"""`certificate.py`: when batches are allowed, and what checking in service may cost."""

from __future__ import annotations

import random

import msgspec
import pytest

from marserve.messages import Checked
from marserve.pool.checks.certificate import Certificate, InService
from marserve.pool.dispatch.lengths.allowance import Allowance

DIFFERENCE = ("together (4)", 1, "score", "2", "1")


def checked(*, found: int = 0, compared: int = 12, sizes: tuple[int, ...] = (1, 4), seconds: float = 0.5) -> Checked:
    """What a worker says of a check."""
    return Checked(1, seconds, 3, list(sizes), 10, compared, found, [DIFFERENCE] if found else [], [])


@pytest.mark.parametrize(("absolute", "is_told"), [(0.5, True), (float("nan"), False)])
def test_the_bound_of_a_check_is_described(absolute: float, is_told: bool) -> None:
    """Numbers that no JSON has are left out, whatever a worker says."""
    bound = msgspec.structs.replace(checked(), relative=0.1, absolute=absolute, basis="bfloat16 on cuda")
    certificate = Certificate("refuse", has_samples=True)
    certificate.take(bound, 8, at=0.0)

    told = {"relative": 0.1, "absolute": absolute, "basis": "bfloat16 on cuda"}
    assert certificate.describe(8).get("tolerance") == (told if is_told else None)


def test_batches_are_refused_until_the_samples_were_checked() -> None:
    """And allowed from then on."""
    certificate = Certificate("refuse", has_samples=True)
    assert certificate.batch_limit(8) == 1
    assert certificate.needs_check(8)

    assert certificate.take(checked(), 8, at=0.0)

    assert certificate.batch_limit(8) == 8
    assert not certificate.needs_check(8)


def test_a_difference_refuses_batches_and_is_shown() -> None:
    """In describe, with item, place and both values."""
    certificate = Certificate("refuse", has_samples=True)

    assert not certificate.take(checked(found=3), 8, at=1_700_000_000.0)

    assert certificate.batch_limit(8) == 1
    assert not certificate.needs_check(8)
    described = certificate.describe(8)
    assert described["certificate"] == "failed"
    assert described["largestBatch"] == 1
    assert (
        described["reason"]
        == "batches are not answered as single requests: together (4): item 1 at score was 2, alone it was 1"
    )
    assert described["differences"] == [{"run": "together (4)", "item": 1, "path": "score", "seen": "2", "wanted": "1"}]
    assert described["checkedAt"] == "2023-11-14T22:13:20.000Z"


def test_nothing_compared_is_nothing_shown() -> None:
    """Every sample failed, say: batches stay refused."""
    certificate = Certificate("refuse", has_samples=True)

    assert not certificate.take(checked(compared=0), 8, at=0.0)

    assert certificate.batch_limit(8) == 1
    assert "nothing could be compared" in certificate.reason


@pytest.mark.parametrize("policy", ["warn", "off"])
def test_other_policies_allow_batches_whatever_is_found(policy: str) -> None:
    """They only tell."""
    certificate = Certificate(policy, has_samples=True)  # type: ignore[arg-type]
    assert certificate.batch_limit(8) == 8

    certificate.take(checked(found=1), 8, at=0.0)

    assert certificate.batch_limit(8) == 8
    assert certificate.describe(8)["certificate"] == "failed"


def test_only_warn_and_refuse_check_by_themselves() -> None:
    """And nobody does without samples or batches."""
    assert Certificate("warn", has_samples=True).needs_check(2)
    assert not Certificate("off", has_samples=True).needs_check(2)
    assert not Certificate("refuse", has_samples=False).needs_check(2)
    assert not Certificate("refuse", has_samples=True).needs_check(1)


def test_a_larger_batch_than_was_tried_needs_a_check_of_its_own() -> None:
    """Until then batches stay at what was tried."""
    certificate = Certificate("refuse", has_samples=True)
    certificate.take(checked(), 4, at=0.0)

    assert certificate.needs_check(16)
    assert certificate.batch_limit(16) == 4

    certificate.take(checked(sizes=(1, 16)), 16, at=0.0)
    assert certificate.batch_limit(16) == 16
    assert certificate.batch_limit(4) == 4


def test_beyond_the_largest_size_that_is_tried_no_further_check_is_made() -> None:
    """The worker makes no larger ones."""
    certificate = Certificate("refuse", has_samples=True)

    certificate.take(checked(sizes=(1, 64)), 64, at=0.0)

    assert certificate.batch_limit(1000) == 1000


def test_a_later_check_can_win_the_certificate_back() -> None:
    """After the samples, or the tolerance, were mended."""
    certificate = Certificate("refuse", has_samples=True)
    certificate.take(checked(found=1), 4, at=0.0)

    certificate.take(checked(), 4, at=0.0)

    assert certificate.batch_limit(4) == 4
    assert "reason" not in certificate.describe(4)


def test_a_check_that_fails_on_demand_counts_without_samples_too() -> None:
    """What was shown is known."""
    certificate = Certificate("refuse", has_samples=False)
    assert certificate.batch_limit(4) == 4

    certificate.take(checked(found=1), 4, at=0.0)

    assert certificate.batch_limit(4) == 1


def test_a_check_that_ends_a_worker_is_tried_once_more() -> None:
    """Twice is an outcome."""
    certificate = Certificate("refuse", has_samples=True)

    assert certificate.lose("killed")
    assert certificate.state == "not checked"
    assert not certificate.lose("exit")

    assert certificate.state == "failed"
    assert certificate.batch_limit(4) == 1
    assert certificate.reason == "2 workers ended during the check, the last one: exit"


def test_checks_in_service_are_counted() -> None:
    """With the latest differences in words, of which a few are kept."""
    in_service = InService()

    assert not in_service.take(checked())
    for _ in range(9):
        assert in_service.take(checked(found=1))

    described = in_service.describe()
    assert (described["batches"], described["differingBatches"], described["items"]) == (10, 9, 100)
    assert len(described["lastDifferences"]) == 5


def test_nothing_is_bought_before_something_was_earned() -> None:
    """And nothing that is free."""
    allowance = Allowance(share=0.01)
    assert not allowance.affords(0.001)

    allowance.earn(1.0)

    assert allowance.affords(0.01)
    assert not allowance.affords(0.011)
    assert not allowance.affords(0.0)


def test_a_debt_is_paid_off_first() -> None:
    """What took longer than was thought delays the next one."""
    allowance = Allowance(share=0.01)
    allowance.earn(1.0)
    allowance.spend(0.05)

    allowance.earn(4.0)
    assert not allowance.affords(0.001)

    allowance.earn(1.0)
    assert allowance.affords(0.009)


def test_a_long_rest_saves_up_only_so_much() -> None:
    """The purse has a bottom and a top."""
    allowance = Allowance(share=0.01, most_s=2.0)

    allowance.earn(1e6)

    assert allowance.left_s == 2.0


@pytest.mark.parametrize("seed", range(20))
def test_no_more_than_a_hundredth_of_busy_seconds_is_ever_spent(seed: int) -> None:
    """Whatever batches cost, and however wrong the guesses are; only the end of one run may lie above."""
    dice = random.Random(seed)
    allowance = Allowance(share=0.01)
    busy_s = spent_s = longest_s = 0.0

    for _ in range(20_000):
        run_s = dice.expovariate(20.0)
        busy_s += run_s
        allowance.earn(run_s)
        expected_s = run_s * dice.uniform(0.2, 3.0)
        if allowance.affords(expected_s):
            took_s = expected_s * dice.uniform(0.1, 10.0)
            allowance.spend(took_s)
            spent_s += took_s
            longest_s = max(longest_s, took_s)
        assert spent_s <= 0.01 * busy_s + longest_s

    assert spent_s > 0.005 * busy_s
