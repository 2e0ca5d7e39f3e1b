"""Tests for the choice of the version that answers: names, weights, sticky keys."""

from __future__ import annotations

import json
import math
import random
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from marserve.errors import BadInput, VersionNotFound
from marserve.registry.catalogue.traffic import (
    LARGEST_WEIGHT,
    Role,
    Rule,
    Sticky,
    Traffic,
    check_label,
    choose_version,
    read_role,
    read_traffic,
)

REQUESTS = 10_000


def anybody(version: str) -> bool:
    """Every version can answer."""
    return True


def all_but(*versions: str) -> Callable[[str], bool]:
    """Every version but these can answer."""
    return lambda version: version not in versions


def rule(weights: dict[str, float], sticky: Sticky | None = None, *, model: str = "m", seed: int = 1) -> Rule:
    """Weights in force."""
    return Rule(model, Traffic(weights, sticky), seed)


def unsticky(rule: Rule, count: int = REQUESTS, can_answer: Callable[[str], bool] = anybody) -> Counter[str]:
    """Which versions so many requests without a key get."""
    chosen = [rule.choose((), can_answer) for _ in range(count)]
    assert all(choice is not None and choice[1] == "weight" for choice in chosen)
    return Counter(choice[0] for choice in chosen if choice is not None)


def by_user(rule: Rule, users: Iterable[int], can_answer: Callable[[str], bool] = anybody) -> dict[int, str]:
    """Which version each user gets."""
    told = {}
    for user in users:
        choice = rule.choose([(b"X-User", b"user-%d" % user)], can_answer)
        assert choice is not None
        assert choice[1] == "sticky"
        told[user] = choice[0]
    return told


def is_share(count: int, share: float, of: int = REQUESTS) -> bool:
    """Whether a count is within three standard deviations of its share; one request is no fraction of one."""
    return abs(count - share * of) < 3 * math.sqrt(of * share * (1 - share)) + 1


# ---------------------------------------------------------------------------------------------- names


def test_a_request_that_names_no_version_gets_the_default_one() -> None:
    """The default is used whatever its place among the versions."""
    versions = {"1.0": "old", "2.0": "new"}

    assert choose_version("m", versions, "2.0", None) == "new"


def test_a_request_gets_the_version_it_names() -> None:
    """A name wins over the default."""
    versions = {"1.0": "old", "2.0": "new"}

    assert choose_version("m", versions, "2.0", "1.0") == "old"


@pytest.mark.parametrize("named", ["3.0", "", "1"])
def test_a_version_that_is_not_there_is_never_replaced_by_another(named: str) -> None:
    """Even an empty name is a name."""
    with pytest.raises(VersionNotFound) as raised:
        choose_version("m", {"1.0": "old"}, "1.0", named)

    assert raised.value.message == f"Model version: {named} does not exist for model: m"


# ---------------------------------------------------------------------------------------------- shares


@pytest.mark.parametrize("seed", range(20))
def test_shares_hold_whatever_the_weights(seed: int) -> None:
    """10,000 requests without a key: each version gets its share within three standard deviations."""
    chance = random.Random(seed)
    weights = {f"{number}.0": chance.choice([0.001, 1, 7, 20, 100, 999.5]) for number in range(chance.randint(1, 8))}
    total = sum(weights.values())

    counts = unsticky(rule(weights, seed=chance.getrandbits(64)))

    assert all(is_share(counts[name], weight / total) for name, weight in weights.items()), (weights, counts)


@pytest.mark.parametrize("seed", range(20))
def test_of_a_thousand_requests_in_a_row_no_version_is_four_off_its_share(seed: int) -> None:
    """Nor of any fewer, wherever the sequence begins: the golden ratio's multiples are at most 3.7 off in any part."""
    chance = random.Random(seed)
    share = chance.choice([0.5, chance.random()])
    weighted = rule({"1.0": share, "2.0": 1 - share}, seed=chance.getrandbits(64))
    counted = 0

    for count in range(1, 1001):
        choice = weighted.choose((), anybody)
        counted += choice is not None and choice[0] == "1.0"
        assert abs(counted - share * count) < 4


@pytest.mark.parametrize("period", [2, 3, 5, 8, 10, 13])
def test_no_pattern_of_clients_gets_a_version_for_itself(period: int) -> None:
    """Of clients that take turns each has the same shares: turns by turns would give one of them all of a version."""
    weighted = rule({"1.0": 50, "2.0": 50})
    seen: dict[int, Counter[str]] = {client: Counter() for client in range(period)}

    for number in range(REQUESTS):
        choice = weighted.choose((), anybody)
        assert choice is not None
        seen[number % period][choice[0]] += 1

    assert all(is_share(counts["2.0"], 0.5, counts.total()) for counts in seen.values()), seen


def test_a_small_share_comes_soon_and_evenly() -> None:
    """A canary of one percent is asked in every few hundred requests, not after luck."""
    weighted = rule({"1.0": 99, "2.0": 1})
    gaps, last = [], 0
    for number in range(REQUESTS):
        choice = weighted.choose((), anybody)
        if choice is not None and choice[0] == "2.0":
            gaps.append(number - last)
            last = number

    assert len(gaps) >= 98
    assert max(gaps) < 300


def test_a_weight_of_zero_gets_nothing() -> None:
    """With and without a key."""
    weighted = rule({"1.0": 1, "2.0": 0}, Sticky(header="X-User"))

    assert unsticky(weighted) == {"1.0": REQUESTS}
    assert set(by_user(weighted, range(1000)).values()) == {"1.0"}


@pytest.mark.parametrize("seed", [*range(3), *(pytest.param(seed, marks=pytest.mark.long) for seed in range(3, 20))])
def test_the_share_of_a_version_that_cannot_answer_goes_to_the_others_by_their_weights(seed: int) -> None:
    """No request goes to it, and none is lost."""
    weighted = rule(
        {"1.0": 60, "2.0": 30, "3.0": 10}, Sticky(header="X-User"), seed=random.Random(seed).getrandbits(64)
    )

    counts = unsticky(weighted, can_answer=all_but("1.0"))
    users = Counter(by_user(weighted, range(REQUESTS), all_but("1.0")).values())

    for told in (counts, users):
        assert told["1.0"] == 0
        assert is_share(told["2.0"], 0.75), told
    assert weighted.shares(all_but("1.0")) == {"2.0": 0.75, "3.0": 0.25}
    assert weighted.pending(all_but("1.0")) == ["1.0"]


def test_nobody_is_chosen_when_nobody_can_answer() -> None:
    """What then happens is the caller's to say."""
    weighted = rule({"1.0": 60, "2.0": 40}, Sticky(header="X-User"))

    assert weighted.choose((), all_but("1.0", "2.0")) is None
    assert weighted.choose([(b"x-user", b"ada")], all_but("1.0", "2.0")) is None
    assert weighted.shares(all_but("1.0", "2.0")) == {}


# ---------------------------------------------------------------------------------------------- sticky keys


@pytest.mark.parametrize("seed", range(5))
def test_keys_are_shared_out_by_the_weights(seed: int) -> None:
    """10,000 users: each version has its share of them within three standard deviations."""
    weighted = rule({"1.0": 80, "2.0": 20}, Sticky(header="X-User", salt=str(seed)))

    users = Counter(by_user(weighted, range(REQUESTS)).values())

    assert is_share(users["2.0"], 0.2), users


def test_the_same_key_has_the_same_version_always_and_on_every_server() -> None:
    """The choice depends on the model, the key, the salt and the weights: on no process, seed or order."""
    sticky = Sticky(header="X-User")
    here = by_user(rule({"1.0": 50, "2.0": 50}, sticky, seed=1), range(1000))
    there = by_user(rule({"2.0": 50, "1.0": 50}, sticky, seed=99), reversed(range(1000)))

    assert here == there
    # Written down, so that a new release does not move everybody.
    assert "".join(here[user][0] for user in range(12)) == "212112222211"


def test_another_salt_or_another_model_is_another_draw() -> None:
    """Who is in one experiment says nothing of who is in the next."""
    weights: dict[str, float] = {"1.0": 50, "2.0": 50}
    one = by_user(rule(weights, Sticky(header="X-User")), range(2000))
    salted = by_user(rule(weights, Sticky(header="X-User", salt="next")), range(2000))
    other = by_user(rule(weights, Sticky(header="X-User"), model="n"), range(2000))

    for told in (salted, other):
        assert is_share(sum(one[user] == told[user] for user in one), 0.5, 2000)


@pytest.mark.parametrize("seed", range(20))
def test_a_higher_weight_moves_keys_to_its_version_and_no_others(seed: int) -> None:
    """Whoever moves goes to the version that was raised, and as many move as its share grows."""
    chance = random.Random(seed)
    weights = {f"{number}.0": float(chance.randint(1, 100)) for number in range(chance.randint(2, 6))}
    raised = chance.choice(list(weights))
    more = {**weights, raised: weights[raised] * chance.choice([1.05, 2, 10])}
    sticky = Sticky(header="X-User")

    before = by_user(rule(weights, sticky), range(2000))
    after = by_user(rule(more, sticky), range(2000))

    moved = [user for user in before if before[user] != after[user]]
    assert all(after[user] == raised for user in moved)
    grown = more[raised] / sum(more.values()) - weights[raised] / sum(weights.values())
    assert is_share(len(moved), grown, 2000), (len(moved), grown)


def test_a_version_that_dies_moves_its_own_keys_alone_and_they_come_back() -> None:
    """Nobody else notices."""
    weighted = rule({"1.0": 40, "2.0": 40, "3.0": 20}, Sticky(header="X-User"))

    before = by_user(weighted, range(2000))
    without = by_user(weighted, range(2000), all_but("3.0"))
    after = by_user(weighted, range(2000))

    assert all(without[user] == before[user] for user in before if before[user] != "3.0")
    assert after == before


@pytest.mark.parametrize(
    ("sticky", "headers"),
    [
        (Sticky(header="X-User"), [(b"Accept", b"*/*"), (b"x-USER", b" ada "), (b"X-User", b"bob")]),
        (Sticky(cookie="sid"), [(b"Cookie", b"theme=dark; sid=ada; sid=bob"), (b"Host", b"h")]),
        (Sticky(cookie="sid"), [(b"cookie", b"theme=dark"), (b"Cookie", b"sid=ada")]),
    ],
)
def test_a_key_is_the_first_of_its_name(sticky: Sticky, headers: list[tuple[bytes, bytes]]) -> None:
    """Names of headers are the same in any case, those of cookies are not."""
    weighted = rule({f"{number}": 1 for number in range(50)}, sticky)
    ada = rule({f"{number}": 1 for number in range(50)}, Sticky(header="k")).choose([(b"k", b"ada")], anybody)

    assert weighted.choose(headers, anybody) == ada


@pytest.mark.parametrize(
    "headers", [[], [(b"X-User", b"")], [(b"X-User", b"  ")], [(b"X-User2", b"ada")], [(b"Cookie", b"X-User=ada")]]
)
def test_a_request_without_its_key_goes_by_the_weights(headers: list[tuple[bytes, bytes]]) -> None:
    """An empty key is none: everybody who sends none would have one version else."""
    choice = rule({"1.0": 1, "2.0": 1}, Sticky(header="X-User")).choose(headers, anybody)

    assert choice is not None
    assert choice[1] == "weight"


def test_a_sequence_stays_where_it_is() -> None:
    """Where versions have sequences, a request without another key has its sequence for its key."""
    weighted = Rule("m", Traffic({"1.0": 50, "2.0": 50}), 7, "ts_request_sequence_id")

    for sequence in range(50):
        header = [(b"ts_request_sequence_id", b"%d" % sequence)]
        assert len({weighted.choose(header, anybody) for _ in range(20)}) == 1


# ---------------------------------------------------------------------------------------------- reading


@pytest.mark.parametrize(
    "document",
    [
        {"weights": {"1.0": 80, "2.0": 20}},
        {"weights": {"1.0": 0.5, "2.0": 0}, "sticky": {"header": "X-User"}},
        {"weights": {"1.0": 1}, "sticky": {"cookie": "sid", "salt": "spring"}},
    ],
)
def test_what_is_put_is_what_is_told(document: dict[str, Any]) -> None:
    """The shape is the same both ways."""
    assert read_traffic(document).document() == document
    assert read_traffic({**document, "pending": ["2.0"], "isDefault": False}).document() == document


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("[]", "The traffic of a model is []"),
        ("{}", "weights is None; it must name versions"),
        ('{"weights": {}}', "weights is {}; it must name versions"),
        ('{"weights": [1]}', "weights is [1]; it must name versions"),
        ('{"weight": {"1.0": 1}}', "'weight' is no key of the traffic of a model. Did you mean weights?"),
        ('{"weights": {"1.0": 1}, "shadow": 1}', "'shadow' is no key of the traffic of a model. Known are weights"),
        ('{"weights": {"1.0": 0, "2.0": 0}}', "The weights are all 0"),
        ('{"weights": {"1.0": -1, "2.0": 2}}', "The weight of version 1.0 is -1; it must be a number from 0 to"),
        ('{"weights": {"1.0": NaN}}', "The weight of version 1.0 is nan"),
        ('{"weights": {"1.0": Infinity}}', "The weight of version 1.0 is inf"),
        ('{"weights": {"1.0": true}}', "The weight of version 1.0 is True"),
        ('{"weights": {"1.0": "80"}}', "The weight of version 1.0 is '80'"),
        ('{"weights": {"1.0": null}}', "The weight of version 1.0 is None"),
        ('{"weights": {"1.0": 1e300}}', "The weight of version 1.0 is 1e+300"),
        ('{"weights": {"1.0": 1}, "sticky": "X-User"}', "sticky is 'X-User'; it must be such as"),
        ('{"weights": {"1.0": 1}, "sticky": {}}', "sticky must name either a header or a cookie"),
        ('{"weights": {"1.0": 1}, "sticky": {"header": "a", "cookie": "b"}}', "sticky must name either a header or"),
        ('{"weights": {"1.0": 1}, "sticky": {"headers": "a"}}', "'headers' is no key of sticky. Did you mean header?"),
        ('{"weights": {"1.0": 1}, "sticky": {"header": "X User"}}', "sticky.header is 'X User'; it must be a name"),
        ('{"weights": {"1.0": 1}, "sticky": {"cookie": ""}}', "sticky.cookie is ''; it must be a name"),
        ('{"weights": {"1.0": 1}, "sticky": {"header": "a", "salt": 7}}', "sticky.salt is 7; it must be a text"),
    ],
)
def test_what_cannot_be_meant_is_refused_with_a_sentence(text: str, sentence: str) -> None:
    """The sentence says what was wrong, the value seen, and what would be right."""
    with pytest.raises(BadInput) as raised:
        read_traffic(json.loads(text))

    assert raised.value.message.startswith(sentence)


def test_the_largest_weights_still_add_up() -> None:
    """Nothing overflows."""
    counts = unsticky(rule({str(number): LARGEST_WEIGHT for number in range(4)}))

    assert all(is_share(count, 0.25) for count in counts.values())


@pytest.mark.parametrize("label", ["stable", "canary", "_x", "release-2024.05", "A"])
def test_a_name_can_be_a_label(label: str) -> None:
    """Words."""
    check_label(label)


@pytest.mark.parametrize("label", ["", "1.0", "all", "-x", "a b", "a/b", "ä", "x" * 64])
def test_a_number_or_a_path_cannot_be_a_label(label: str) -> None:
    """What looks like a version, a path, or means all of them."""
    with pytest.raises(BadInput, match="cannot be a label"):
        check_label(label)


@pytest.mark.parametrize(
    "role", [Role(), Role(20, Sticky(header="X-User"), ("canary",)), Role(0), Role(labels=("a", "b"))]
)
def test_what_a_snapshot_has_of_a_version_s_traffic_comes_back(role: Role) -> None:
    """Written and read again."""
    assert read_role(json.loads(json.dumps(role.document()))) == role


@pytest.mark.parametrize(
    "document",
    [
        [],
        {"weight": -1},
        {"labels": "canary"},
        {"labels": ["1.0"]},
        {"labels": ["stable", 7]},
        {"weight": 1, "sticky": 7},
    ],
)
def test_a_snapshot_that_cannot_be_meant_is_refused(document: Any) -> None:
    """As a client's call would be."""
    with pytest.raises(BadInput):
        read_role(document)


# ---------------------------------------------------------------------------------------------- at the edges


def test_a_version_of_weight_0_gets_nothing_whoever_can_answer() -> None:
    """Neither by its key nor in turn, and nobody waits for it."""
    weights = rule({"1.0": 1, "2.0": 0})
    sticky = rule({"1.0": 1, "2.0": 0}, Sticky(header="X-User"))

    for one, headers in ((weights, []), (sticky, [(b"X-User", b"a")])):
        assert one.choose(headers, all_but("1.0")) is None
        assert one.pending(all_but("2.0")) == []
        assert one.shares(anybody) == {"1.0": 1.0}
        assert one.shares(all_but("1.0")) == {}


def test_a_share_goes_with_its_version_and_zeros_alone_are_no_traffic() -> None:
    """What is left is traffic as long as one weight is above 0."""
    traffic = Traffic({"1": 1, "2": 0, "3": 5}, Sticky(cookie="c"))

    assert traffic.without("1") == Traffic({"2": 0, "3": 5}, Sticky(cookie="c"))
    assert traffic.without("3") == Traffic({"1": 1, "2": 0}, Sticky(cookie="c"))
    assert Traffic({"1": 1, "2": 0}).without("1") is None
    assert traffic.renamed("1", "9") == Traffic({"9": 1, "2": 0, "3": 5}, Sticky(cookie="c"))


def test_the_key_that_was_asked_for_comes_before_the_sequence() -> None:
    """The sequence's name is the key of those that have no other."""
    one = Rule("m", Traffic({"1": 1, "2": 1}, Sticky(header="X-User")), 1, "X-Sequence")
    by_sequence = Rule("m", Traffic({"1": 1, "2": 1}), 1, "X-Sequence")

    for number in range(50):
        user, sequence = (b"x-user", b"u%d" % number), (b"X-SEQUENCE", b"s%d" % number)
        assert one.choose([sequence, user], anybody) == one.choose([user], anybody)
        assert one.choose([sequence, (b"X-User", b"")], anybody) == by_sequence.choose([sequence], anybody)
    assert by_sequence.choose([(b"X-Sequence", b"")], anybody) in (("1", "weight"), ("2", "weight"))


def test_only_cookies_are_looked_for_cookies_and_the_first_of_a_name_counts() -> None:
    """Whatever else has six letters; blanks around a name and its value are none of them."""
    one = rule({"1": 1, "2": 1}, Sticky(cookie="user"))

    for number in range(50):
        key = b"k%d" % number
        plain = one.choose([(b"cookie", b"user=" + key)], anybody)
        assert plain is not None
        assert plain[1] == "sticky"
        assert one.choose([(b"COOKIE", b"a=b; user = " + key + b" ; user=other")], anybody) == plain
        assert one.choose([(b"cookie", b"x=y"), (b"cookie", b"user=" + key)], anybody) == plain
        for headers in ([(b"secret", b"user=" + key)], [(b"cookies", b"user=" + key)], [(b"cookie", b"user2=" + key)]):
            unsticked = one.choose(headers, anybody)
            assert unsticked is not None
            assert unsticked[1] == "weight"


def test_names_that_no_encoding_has_are_spread_like_others() -> None:
    """A name from JSON may hold half a surrogate pair."""
    one = rule({"a\ud800": 1, "b": 1}, Sticky(header="X-User", salt="\udfff"), model="\ud801")

    assert len(set(by_user(one, range(50)).values())) == 2


def test_the_largest_weight_and_the_longest_words_are_taken_and_no_more() -> None:
    """A million; a salt of 128 characters; a header's name of 128; a label of 63."""
    assert read_traffic({"weights": {"1": 1_000_000}}).weights == {"1": 1_000_000}
    for salt, header in (("s" * 128, "h" * 128),):
        assert read_traffic({"weights": {"1": 1}, "sticky": {"header": header, "salt": salt}}).sticky == Sticky(
            header, None, salt
        )
    for wrong in (
        {"weights": {"1": 1_000_001}},
        {"weights": {"1": -0.001}},
        {"weights": {"1": float("nan")}},
        {"weights": {"1": True}},
        {"weights": {"1": 1}, "sticky": {"header": "h", "salt": "s" * 129}},
        {"weights": {"1": 1}, "sticky": {"header": "h" * 129}},
        {"weights": {"1": 1}, "sticky": {"cookie": "a b"}},
        {"weights": {"1": 1}, "sticky": {"header": "h", "cookie": "c"}},
    ):
        with pytest.raises(BadInput):
            read_traffic(wrong)
    check_label("_" + "l" * 62)
    for label in ("l" * 64, "", "1a", "all", "a/b"):
        with pytest.raises(BadInput, match="cannot be a label"):
            check_label(label)
