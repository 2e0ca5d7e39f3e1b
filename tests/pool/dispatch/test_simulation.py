"""Thousands of small worlds: no request lost, doubled, crossed or stuck in any of them."""

from __future__ import annotations

import os

from marserve.errors import WaitTooLong
from support.simulation import World

SEEDS = int(os.environ.get("MARSERVE_SIMULATION_SEEDS", "100"))


def test_no_request_is_lost_doubled_crossed_or_stuck() -> None:
    """Deaths, delays, cancels, deadlines and swaps in all orders; a failing seed can be played again by its number."""
    failures = {}
    answered = refused = failed = late = displaced = asked = died_of_asking = lost_sequences = steps = together = (
        overlapped
    ) = 0

    for seed in range(SEEDS):
        world = World(seed)
        world.run()
        if world.problems:
            failures[seed] = world.problems[:3]
        answered += sum(len(client.ends) == 1 for client in world.clients)
        refused += sum(client.refused is not None for client in world.clients)
        late += sum(isinstance(client.refused, WaitTooLong) for client in world.clients)
        displaced += world.displaced
        asked += world.asked
        died_of_asking += world.died_of_asking
        lost_sequences += world.lost_sequences
        together += world.read_together
        overlapped += world.sent_ahead_overlapping
        steps += sum(len(client.pieces) for client in world.clients if world.options.continuous_batching)
        failed += sum(any(isinstance(end, Exception) for end in client.ends) for client in world.clients)

    assert not failures, dict(list(failures.items())[:5])
    # The worlds are not idle ones: each kind of end occurs.
    assert answered > 10 * SEEDS
    assert refused > 0
    assert failed > 0
    assert late > 0
    assert displaced > 0
    assert asked > 0
    assert died_of_asking > 0
    assert lost_sequences > 0
    assert steps > 0
    assert together > 0
    assert overlapped > 0


def test_the_simulation_finds_an_answer_given_to_the_wrong_client() -> None:
    """A fault put in by hand is seen: a test that cannot fail shows nothing."""
    seen = []

    for seed in range(20):
        world = World(seed)
        finished = world.dispatcher.finished
        world.dispatcher.finished = (  # type: ignore[method-assign]
            lambda key, number, run_s, results, bodies, now, finished=finished: finished(
                key, number, run_s, results, bodies[::-1], now
            )
        )
        world.run()
        seen += [problem for problem in world.problems if "was given the answer of" in problem]

    assert seen
