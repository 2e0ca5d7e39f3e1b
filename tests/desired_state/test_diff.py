"""From what a server has to what it is to have: steps that lead there, and never lower service on the way."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from marserve.desired_state.diff import PHASES, Step, compare, is_as_wanted
from marserve.desired_state.document import DesiredModel, DesiredState, DesiredVersion, NewVersions
from marserve.registry.changes.actual import ActualModel, ActualState, ActualVersion

BASE = {"minWorkers": 1, "maxWorkers": 1, "batchSize": 1, "maxBatchDelay": 100}


def as_loaded(wanted: DesiredVersion) -> ActualVersion:
    """A version as it is when it has been loaded from a document."""
    config = {**BASE, **wanted.config}
    return ActualVersion(
        wanted.source,
        (config["minWorkers"], config["maxWorkers"]) if config["minWorkers"] else (0, 0),
        config,
        BASE,
        wanted.document(),
    )


class Model:
    """One server's models as the steps change them; each step is checked when it is taken."""

    def __init__(self, actual: ActualState) -> None:
        self.versions = {
            (model, name): found for model, each in actual.items() for name, found in each.versions.items()
        }
        self.defaults = {model: each.default for model, each in actual.items()}
        self.labels = {model: dict(each.labels) for model, each in actual.items()}
        self.traffic = {model: each.traffic for model, each in actual.items()}
        self.shadow = {model: each.shadow for model, each in actual.items()}
        self.beside: dict[tuple[str, str], ActualVersion] = {}
        self.ready: set[tuple[str, str]] = set()
        self.switched: set[tuple[str, str]] = set()

    def take(self, step: Step) -> None:
        """Take one step."""
        key = (step.model, step.version or "")
        if step.kind == "load":
            assert step.replaces == (key in self.versions)
            self.beside[key] = as_loaded(step.after)
        elif step.kind == "wait-ready":
            assert key in self.beside or key in self.versions
            self.ready.add(key)
        elif step.kind == "switch":
            assert key in self.ready, "a version takes requests before it is ready"
            self.versions[key] = self.beside.pop(key)
            self.switched.add(key)
        elif step.kind in ("scale-up", "scale-down"):
            found = self.versions[key]
            assert found.workers == step.before
            least, most = step.after
            if step.kind == "scale-up":
                assert least >= found.workers[0]
                assert most >= found.workers[1]
            config = {**found.config, "minWorkers": least, "maxWorkers": most}
            self.versions[key] = replace(found, workers=(least, most), config=config)
        elif step.kind == "tune":
            found = self.versions[key]
            self.versions[key] = replace(found, config={**found.config, **step.after})
        elif step.kind == "unload":
            if step.replaced:
                assert key in self.switched, "the one before ends before the new one has its place"
            else:
                del self.versions[key]
        elif step.kind == "default":
            assert (step.model, step.after) in self.versions, "the default goes to a version that is not there"
            self.defaults[step.model] = step.after
        elif step.kind == "labels":
            self.labels[step.model] = dict(step.after)
        elif step.kind == "traffic":
            self.traffic[step.model] = step.after
        else:
            self.shadow[step.model] = step.after

    def run(self, steps: tuple[Step, ...]) -> None:
        """Take all."""
        for step in steps:
            self.take(step)

    def actual(self, desired: DesiredState) -> ActualState:
        """What is there, with what the document now says of each version."""
        models: dict[str, ActualModel] = {}
        for name in {model for model, _ in self.versions}:
            versions = {version: found for (model, version), found in self.versions.items() if model == name}
            wanted = desired.models.get(name)
            if wanted is not None:
                versions = {
                    version: replace(found, declared=wanted.versions[version].document())
                    if version in wanted.versions
                    else found
                    for version, found in versions.items()
                }
            models[name] = ActualModel(
                versions,
                self.defaults[name],
                self.labels.get(name, {}),
                self.traffic.get(name),
                self.shadow.get(name),
            )
        return models


@st.composite
def versions(draw: st.DrawFn) -> DesiredVersion:
    """What a document says of one version."""
    config: dict[str, Any] = {}
    if draw(st.booleans()):
        config["minWorkers"] = draw(st.integers(0, 3))
        config["maxWorkers"] = config["minWorkers"] + draw(st.integers(0, 2))
    for key, values in (("batchSize", [1, 4]), ("maxBatchDelay", [0, 100]), ("responseTimeout", [10, 20])):
        if draw(st.booleans()):
            config[key] = draw(st.sampled_from(values))
    return DesiredVersion(
        draw(st.sampled_from(["a.mar", "b.mar"])),
        draw(st.sampled_from([None, "a" * 64])),
        draw(st.sampled_from([None, "h:x"])),
        None,
        config,
    )


@st.composite
def states(draw: st.DrawFn) -> DesiredState:
    """A document."""
    models = {}
    for name in draw(st.sets(st.sampled_from("mno"))):
        found = {version: draw(versions()) for version in draw(st.sets(st.sampled_from("123"), min_size=1))}
        names = st.sampled_from(sorted(found))
        models[name] = DesiredModel(
            found,
            draw(names),
            draw(st.dictionaries(st.sampled_from(["stable", "canary"]), names)),
            draw(st.none() | st.fixed_dictionaries({"weights": st.dictionaries(names, st.just(1), min_size=1)})),
            draw(st.none() | st.fixed_dictionaries({"version": names})),
        )
    return DesiredState(models)


@given(states(), states())
def test_the_steps_lead_from_one_state_to_the_other(before: DesiredState, after: DesiredState) -> None:
    """From nothing to the first, from that to the second; then nothing is left to do."""
    model = Model({})
    model.run(compare({}, before).steps)
    middle = model.actual(before)
    assert compare(middle, before).is_empty

    model = Model(middle)
    diff = compare(middle, after)
    model.run(diff.steps)

    assert compare(model.actual(after), after).is_empty
    assert {name: set(each.versions) for name, each in model.actual(after).items()} == {
        name: set(each.versions) for name, each in after.models.items()
    }


@given(states(), states())
def test_no_step_lowers_service_before_its_replacement_is_ready(before: DesiredState, after: DesiredState) -> None:
    """Phase after phase: until the switch every version that serves keeps its workers and its place."""
    model = Model({})
    model.run(compare({}, before).steps)
    middle = model.actual(before)
    serving = {
        (name, version): found.workers for name, each in middle.items() for version, found in each.versions.items()
    }
    order = ["load", "ready", "switch", "retire"]

    diff = compare(middle, after)

    phases = [order.index(step.phase) for step in diff.steps]
    assert phases == sorted(phases)
    model = Model(middle)
    for step in diff.steps:
        if step.phase in ("load", "ready"):
            model.take(step)
            for key, workers in serving.items():
                assert model.versions[key].workers[0] >= workers[0]


@given(states())
def test_equal_states_need_nothing(state: DesiredState) -> None:
    """Whatever they hold."""
    model = Model({})
    model.run(compare({}, state).steps)

    assert compare(model.actual(state), state).is_empty


def of(version: DesiredVersion, **more: Any) -> DesiredState:
    """A document with one version of one model."""
    return DesiredState({"m": DesiredModel({"1": version}, "1", **more)})


def kinds(actual: ActualState, desired: DesiredState) -> list[str]:
    """The kinds of the steps."""
    return [step.kind for step in compare(actual, desired).steps]


def test_a_version_that_came_by_a_call_is_compared_with_what_the_document_says_of_it() -> None:
    """What it does not say stays as the call left it."""
    found = ActualVersion("m.mar", (3, 3), {"batchSize": 8, "responseTimeout": 60}, handler="h", runtime="python")
    actual = {"m": ActualModel({"1": found}, "1")}

    assert kinds(actual, of(DesiredVersion("m.mar"))) == []
    assert kinds(actual, of(DesiredVersion("m.mar", handler="h", config={"responseTimeout": 60}))) == []
    assert kinds(actual, of(DesiredVersion("m.mar", config={"batchSize": 4}))) == ["tune"]
    replaced = ["load", "wait-ready", "switch", "unload"]
    assert kinds(actual, of(DesiredVersion("m.mar", config={"responseTimeout": 61}))) == replaced
    assert kinds(actual, of(DesiredVersion("m.mar", sha256="a" * 64))) == replaced
    assert kinds(actual, of(DesiredVersion("other.mar"))) == replaced


def test_what_a_document_says_no_longer_goes_back_to_the_archives_word() -> None:
    """In place, for workers and batches."""
    before = DesiredVersion("m.mar", config={"minWorkers": 2, "maxWorkers": 2, "batchSize": 8})
    actual = {"m": ActualModel({"1": as_loaded(before)}, "1")}

    steps = compare(actual, of(DesiredVersion("m.mar"))).steps

    assert [(step.kind, step.after) for step in steps] == [("tune", {"batchSize": 1}), ("scale-down", (1, 1))]


def test_bounds_that_move_apart_widen_first_and_narrow_last() -> None:
    """So that there are never fewer than either asks for."""
    actual = {
        "m": ActualModel({"1": as_loaded(DesiredVersion("m.mar", config={"minWorkers": 1, "maxWorkers": 4}))}, "1")
    }

    steps = compare(actual, of(DesiredVersion("m.mar", config={"minWorkers": 2, "maxWorkers": 2}))).steps

    assert [(step.kind, step.after) for step in steps if step.after] == [("scale-up", (2, 4)), ("scale-down", (2, 2))]


@pytest.mark.parametrize(("policy", "stays"), [("ignore", False), ("load", True), ("canary", True)])
def test_versions_that_a_policy_let_in_are_no_drift(policy: Any, stays: bool) -> None:
    """They stay although no document names them, as long as the policy does, and so does the default that they took."""
    arrived = ActualVersion("s3://models/m-2.mar", (1, 1))
    actual = {"m": ActualModel({"1": as_loaded(DesiredVersion("m.mar")), "2": arrived}, "2")}
    desired = of(DesiredVersion("m.mar"), new_versions=NewVersions("s3://models/m-", policy))

    diff = compare(actual, desired)

    assert [step.kind for step in diff.of("unload")] == ([] if stays else ["unload"])
    assert bool(diff.of("default")) == (policy != "canary")
    assert diff.kept == ((("m", "2"),) if stays else ())


def test_devices_bound_the_workers_without_end() -> None:
    """What cannot be is not tried again at each look."""
    found = replace(as_loaded(DesiredVersion("m.mar")), workers=(2, 2), most_workers=2)
    actual = {"m": ActualModel({"1": found}, "1")}

    assert kinds(actual, of(DesiredVersion("m.mar", config={"minWorkers": 8, "maxWorkers": 8}))) == []


def test_every_step_has_a_phase_and_words() -> None:
    """For whoever reads a plan."""
    step = Step("load", "m", "1", "m.mar", memory_bytes=5)

    assert step.document() == {
        "step": "load",
        "phase": "load",
        "model": "m",
        "version": "1",
        "detail": "m.mar",
        "memoryBytes": 5,
    }
    assert set(PHASES.values()) == {"load", "ready", "switch", "retire"}


# --------------------------------------------------------------------------------------------- words and figures


def test_a_step_tells_what_it_has_to_tell_and_no_more() -> None:
    """A plan is read by people and by programs."""
    assert Step("default", "m").document() == {"step": "default", "phase": "switch", "model": "m"}
    assert Step("load", "m", "1", is_loaded=True, memory_bytes=0).document() == {
        "step": "load",
        "phase": "load",
        "model": "m",
        "version": "1",
        "isLoaded": True,
        "memoryBytes": 0,
    }


@pytest.mark.parametrize(
    ("kind", "phase"),
    [
        *(("load", "load"), ("scale-up", "load"), ("wait-ready", "ready"), ("switch", "switch"), ("tune", "switch")),
        *(("default", "switch"), ("labels", "switch"), ("traffic", "switch"), ("shadow", "switch")),
        *(("scale-down", "retire"), ("unload", "retire")),
    ],
)
def test_each_step_has_its_phase(kind: Any, phase: str) -> None:
    """Clients show it, and nothing of a later one begins before."""
    assert Step(kind, "m").document()["phase"] == phase


def test_costs_stand_beside_their_steps() -> None:
    """In the order of the steps; where nobody knows there is none, and there are as many as steps."""
    diff = compare({}, of(DesiredVersion("m.mar")))

    costs = diff.with_costs([5, None, -3, 0])

    assert [step.memory_bytes for step in costs.steps] == [5, None, -3, 0]
    assert [step.kind for step in costs.steps] == [step.kind for step in diff.steps]
    assert diff.steps[0].memory_bytes is None
    with pytest.raises(ValueError, match="shorter"):
        diff.with_costs([5])


def test_a_plan_says_what_changes() -> None:
    """Sources, bounds of workers, values, targets, labels, shares: before and after."""
    old = DesiredVersion("m.mar", config={"minWorkers": 2, "maxWorkers": 2, "batchSize": 4})
    other = as_loaded(DesiredVersion("n.mar"))
    actual = {
        "m": ActualModel(
            {"1": as_loaded(old), "2": other}, "2", {"live": "2"}, {"weights": {"2": 1, "1": 3}}, {"version": "1"}
        )
    }
    wanted = DesiredModel(
        {
            "1": DesiredVersion("m.mar", config={"minWorkers": 1, "maxWorkers": 3, "batchSize": 8}),
            "3": DesiredVersion("s3://b/k.mar"),
        },
        "1",
        {},
        {"sticky": {"header": "X"}, "share": 1},
    )

    told = [(step.kind, step.version, step.detail) for step in compare(actual, DesiredState({"m": wanted})).steps]

    assert told == [
        ("scale-up", "1", "2 workers → 2 to 3 workers"),
        ("load", "3", "s3://b/k.mar"),
        ("wait-ready", "1", ""),
        ("wait-ready", "3", ""),
        ("tune", "1", "batchSize 4 → 8"),
        ("switch", "3", "takes requests"),
        ("default", None, "2 → 1"),
        ("labels", None, "none"),
        ("traffic", None, "share: 1, sticky: {'header': 'X'}"),
        ("shadow", None, "none"),
        ("scale-down", "1", "2 to 3 workers → 1 to 3 workers"),
        ("unload", "2", ""),
    ]


def test_a_replaced_version_says_that_it_takes_the_place_of_the_one_before() -> None:
    """And the one before that it is that: one name, two versions."""
    actual = {"m": ActualModel({"1": as_loaded(DesiredVersion("old.mar"))}, "1")}

    steps = compare(actual, of(DesiredVersion("new.mar"))).steps

    assert [(step.kind, step.detail, step.replaces, step.replaced) for step in steps] == [
        ("load", "new.mar", True, False),
        ("wait-ready", "", False, False),
        ("switch", "takes the place of the one before", False, False),
        ("unload", "the one before", False, True),
    ]


def test_what_is_new_has_a_default_and_labels_from_the_beginning() -> None:
    """Before there was none of either."""
    diff = compare({}, DesiredState({"m": DesiredModel({"1": DesiredVersion("m.mar")}, "1", {"live": "1", "a": "1"})}))

    assert [(step.kind, step.detail, step.before, step.after) for step in diff.of("default", "labels")] == [
        ("default", "none → 1", None, "1"),
        ("labels", "a → 1, live → 1", {}, {"live": "1", "a": "1"}),
    ]
    assert not diff.is_empty
    assert not diff.of("load")[0].replaces
    assert diff.undo_window_s == 0.0


def test_shares_are_told_version_by_version() -> None:
    """In the order of the versions' names, without what stands beside them."""
    versions = {name: DesiredVersion(f"{name}.mar") for name in "12"}
    traffic = {"weights": {"2": 1, "1": 3}, "sticky": {"header": "X"}}

    [step] = compare({}, DesiredState({"m": DesiredModel(versions, "1", {}, traffic)})).of("traffic")

    assert step.detail == "1: 3, 2: 1"


@pytest.mark.parametrize(
    ("source", "wanted", "same"),
    [
        ("m.mar#sha256=" + "a" * 64, DesiredVersion("m.mar", "a" * 64), True),
        ("m.mar#sha256=" + "a" * 64, DesiredVersion("m.mar"), True),
        ("m.mar#sha256=" + "a" * 64, DesiredVersion("m.mar", "b" * 64), False),
        ("m.mar", DesiredVersion("m.mar", "b" * 64), False),
        ("m.mar", DesiredVersion("m.mar", handler="h"), True),
        ("m.mar", DesiredVersion("m.mar", handler="other"), False),
        ("m.mar", DesiredVersion("m.mar", runtime="python"), True),
        ("m.mar", DesiredVersion("m.mar", runtime="LSP"), False),
        ("m.mar", DesiredVersion("m.mar", config={"batchSize": 3}), False),
        ("m.mar", DesiredVersion("m.mar", config={"minWorkers": 1, "maxWorkers": 1}), True),
        ("m.mar", DesiredVersion("m.mar", config={"minWorkers": 1, "maxWorkers": 2}), False),
    ],
)
def test_a_version_is_as_wanted_where_nothing_of_it_is_to_be_changed(
    source: str, wanted: DesiredVersion, same: bool
) -> None:
    """Neither replaced nor in place; a digest counts where the document has one."""
    found = ActualVersion(source, (1, 1), {"batchSize": 1}, handler="h", runtime="python")

    assert is_as_wanted(found, wanted) is same


@pytest.mark.parametrize("where", ["document", "archive", "nowhere"])
def test_no_workers_at_least_are_none_at_all_unless_the_version_may_sleep(where: str) -> None:
    """By an `idleTimeout`, whoever says it: only then it wakes by itself up to its most."""
    sleeps = {"idleTimeout": 10}
    config = {"minWorkers": 0, "maxWorkers": 3, **(sleeps if where == "document" else {})}
    wanted = DesiredVersion("m.mar", config=config)
    declared = wanted.document() if where == "document" else None
    in_force = {**BASE, **(sleeps if where == "archive" else {})}
    found = ActualVersion("m.mar", (1, 1), in_force, BASE, declared, "h", "python")

    steps = compare({"m": ActualModel({"1": found}, "1")}, of(wanted)).steps

    assert [step.after for step in steps if step.after] == ([(0, 0)] if where == "nowhere" else [(1, 3), (0, 3)])


@pytest.mark.parametrize(
    ("declared", "bounds"), [((2, 4), [(0, 4)]), ((0, 0), []), ((1, 1), []), ((3, 3), [(0, 3)])], ids=str
)
def test_a_version_whose_workers_are_woken_by_requests_has_none_at_least_and_one_at_most(
    declared: tuple[int, int], bounds: list[tuple[int, int]]
) -> None:
    """However many a document says at least; it needs no `idleTimeout` to sleep."""
    wanted = DesiredVersion("m.mar", config=dict(zip(("minWorkers", "maxWorkers"), declared, strict=True)))
    found = ActualVersion("m.mar", (0, 1), BASE, handler="h", runtime="python", is_on_demand=True)

    steps = compare({"m": ActualModel({"1": found}, "1")}, of(wanted)).steps

    assert [step.after for step in steps if step.after] == bounds


def test_the_default_that_a_policy_chose_stays_only_with_its_version() -> None:
    """`load` brings a version in and leaves the default to the document; the others may move it."""
    declared = as_loaded(DesiredVersion("m.mar"))
    arrived = ActualVersion("s3://models/m-2.mar", (1, 1))
    for policy, moves in (("load", True), ("load-and-default", False), ("canary", False)):
        desired = of(DesiredVersion("m.mar"), new_versions=NewVersions("s3://models/m-", policy))

        stays = compare({"m": ActualModel({"1": declared, "2": arrived}, "2")}, desired)
        gone = compare({"m": ActualModel({"1": declared}, "9")}, desired)

        assert bool(stays.of("default")) is moves
        assert bool(gone.of("default"))


def test_versions_of_a_model_that_no_document_names_go_unless_a_policy_lets_them_stay() -> None:
    """In order of their names."""
    versions = {name: ActualVersion(f"{name}.mar", (1, 1)) for name in "321"}

    diff = compare({"gone": ActualModel(versions, "1")}, DesiredState({}))

    assert [(step.kind, step.model, step.version) for step in diff.steps] == [
        ("unload", "gone", "1"),
        ("unload", "gone", "2"),
        ("unload", "gone", "3"),
    ]
