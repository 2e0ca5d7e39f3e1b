"""An optimised archive's build serves where it does what was promised, and its parent where it does not."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from marserve_handlers.optimising import builds
from marserve_handlers.optimising.builds import find_build
from marserve_handlers.optimising.call_arrays import Call
from marserve_handlers.optimising.machine import cpu_flags, versions
from marserve_handlers.optimising.material import Material
from marserve_handlers.optimising.sample_calls import write_samples
from marserve_handlers.runtimes import optimised
from marserve_handlers.runtimes.optimised import load_optimised

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch


class Context:
    """What is said of the load."""

    def __init__(self) -> None:
        self.load_warnings: list[str] = []
        self.computes_on = self.build = self.build_folder = self.refused_build = ""
        self.build_ratios: dict[str, float] = {}
        self.is_trusted = False


class Linear(torch.nn.Module):  # type: ignore[misc]
    """One layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.linear = torch.nn.Linear(4, 3)

    def forward(self, rows: Any) -> Any:
        """Its output."""
        return self.linear(rows)


def parent() -> Any:
    """The archive's own model."""
    return Linear().eval()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An unpacked archive with a build in bfloat16."""
    calls = [Call((torch.randn(1, 4),), {}) for _ in range(3)]
    (tmp_path / "MAR-INF").mkdir()
    (tmp_path / "optimised").mkdir()
    build = find_build("bf16")
    build.build(Material(parent(), calls, 8), tmp_path / "optimised")
    write_samples(tmp_path / "optimised" / "samples.npz", build.load(parent, tmp_path / "optimised", 1), calls)
    write_proof(tmp_path)
    return tmp_path


def write_proof(folder: Path, **other: Any) -> None:
    """The proof, of this machine unless `other` says so."""
    files = {"optimised/samples.npz": "0" * 64}
    proof = {"format": 1, "build": "bf16", "files": files, "cpu": cpu_flags(), "versions": versions(), **other}
    (folder / "MAR-INF" / "optimised.json").write_text(json.dumps(proof))


def load(folder: Path) -> tuple[Any, str, Context]:
    """The model, its build, and what was said."""
    context = Context()
    model = load_optimised(str(folder), parent, 1, context)
    return model, context.build, context


def is_parent(model: Any) -> bool:
    """Whether it is the archive's own model."""
    return type(model) is Linear


def test_a_build_that_does_what_was_promised_serves(folder: Path) -> None:
    """It is what the model runs on."""
    model, name, context = load(folder)

    assert (name, context.computes_on, context.load_warnings) == ("bf16", "bf16", [])
    assert not is_parent(model)
    assert model(torch.ones(2, 4)).dtype is torch.float32


def change_samples(folder: Path) -> None:
    """Other outputs than the build gives."""
    path = folder / "optimised" / "samples.npz"
    with np.load(path) as arrays:
        changed = {name: array * (1.01 if "/out/" in name else 1) for name, array in arrays.items()}
    changed["shapes"] = changed["shapes"].astype(np.uint8)
    np.savez(path, **changed)


def remove_samples(folder: Path) -> None:
    """Nothing to check it by."""
    (folder / "optimised" / "samples.npz").unlink()


def no_sample(folder: Path) -> None:
    """A file without any."""
    np.savez(folder / "optimised" / "samples.npz", shapes=np.frombuffer(b"[]", np.uint8))


def no_output(folder: Path) -> None:
    """Samples of which nothing that the build gave is known."""
    path = folder / "optimised" / "samples.npz"
    with np.load(path) as arrays:
        kept = {name: array for name, array in arrays.items() if "/out/" not in name}
    np.savez(path, **kept)


def no_proof(folder: Path) -> None:
    """No JSON."""
    (folder / "MAR-INF" / "optimised.json").write_text("{")


def later_format(folder: Path) -> None:
    """Of a later version of marserve."""
    write_proof(folder, format={"major": 2})


def no_format(folder: Path) -> None:
    """Of no version at all."""
    write_proof(folder, format=None)


def lacks_a_file(folder: Path) -> None:
    """Repacked by somebody who left one out: without it another library would take the model for a session."""
    write_proof(folder, files={"optimised/samples.npz": "0" * 64, "optimised/output.json": "0" * 64})


def no_files(folder: Path) -> None:
    """Of other types than were written."""
    write_proof(folder, files=3)


def no_build(folder: Path) -> None:
    """A name that is none."""
    write_proof(folder, build="../fast")


def endless_proof(folder: Path) -> None:
    """More than is read."""
    write_proof(folder, more="x" * (1 << 20))


def deep_proof(folder: Path) -> None:
    """Lists in lists."""
    (folder / "MAR-INF" / "optimised.json").write_text("[" * 100_000)


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (endless_proof, "MAR-INF/optimised.json has more than 1048576 bytes"),
        (deep_proof, "the build of the archive cannot be loaded, the parent serves: RecursionError"),
        (
            change_samples,
            "the build bf16 of the archive is not used, the parent serves: output of sample 0 is off by 0.0099",
        ),
        (
            later_format,
            'the build of the archive is not used, the parent serves: MAR-INF/optimised.json is of format {"major": 2}'
            ", and this marserve reads 1: optimise the archive's parent anew",
        ),
        (no_format, "is of format null, and this marserve reads 1"),
        (
            lacks_a_file,
            "the build bf16 of the archive is not used, the parent serves: optimised/output.json is missing, which "
            "MAR-INF/optimised.json names",
        ),
        (no_files, "the build bf16 cannot be loaded, the parent serves: TypeError"),
        (remove_samples, "optimised/samples.npz is missing, which MAR-INF/optimised.json names"),
        (no_sample, "there are no samples to check it by"),
        (no_output, "no output of sample 0 is recorded to check it by"),
        (no_proof, "the build of the archive cannot be loaded, the parent serves: JSONDecodeError"),
        (no_build, "there is no build '../fast'"),
    ],
)
def test_a_build_that_is_not_as_promised_leaves_the_parent_and_says_why(
    spoil: Callable[[Path], None], words: str, folder: Path
) -> None:
    """In one warning."""
    names = {
        no_build: "../fast",
        **dict.fromkeys((no_proof, endless_proof, deep_proof, later_format, no_format), "unknown"),
    }
    spoil(folder)

    model, name, context = load(folder)

    assert is_parent(model)
    assert (name, context.computes_on) == ("", "")
    (warning,) = context.load_warnings
    assert words in warning
    assert context.refused_build == names.get(spoil, "bf16")


INF, NAN = float("inf"), float("nan")
ONE = [Call((torch.ones(1, 4),), {})]


def record(folder: Path, gives: Callable[[Any], Any]) -> None:
    """Have the samples say that the build gives this for a row."""
    write_samples(folder / "optimised" / "samples.npz", gives, ONE)


@pytest.mark.parametrize(
    ("recorded", "given", "words"),
    [
        ([1.0, 2.0], [1.0, NAN], "output of sample 0 is nan where 2 is recorded, in 1 of 2 numbers"),
        ([1.0, 2.0], [INF, 2.0], "output of sample 0 is inf where 1 is recorded, in 1 of 2 numbers"),
        ([1.0, INF], [1.0, -INF], "output of sample 0 is -inf where inf is recorded, in 1 of 2 numbers"),
        ([NAN, NAN], [1.0, NAN], "output of sample 0 is 1 where nan is recorded, in 1 of 2 numbers"),
        ([0.0, 0.0], [NAN, NAN], "output of sample 0 is nan where 0 is recorded, in 2 of 2 numbers"),
        ([1.0, 2.0], [1.0, 2.1], "output of sample 0 is off by 0.033 of what was recorded"),
        ([0.0, 0.0], [0.0, 1e-9], "output of sample 0 is off by 5e-10, and only zeros were recorded"),
        (3.0, 3.1, "output of sample 0 is off by 0.033 of what was recorded"),
        (3.0, NAN, "output of sample 0 is nan where 3 is recorded, in 1 of 1 numbers"),
        ([INF, -INF, NAN, 1.0], [INF, -INF, NAN, 1.0], ""),
        ([NAN, NAN], [NAN, NAN], ""),
        ([0.0, 0.0], [0.0, 0.0], ""),
        ([], [], ""),
        (3.0, 3.0, ""),
    ],
)
def test_numbers_are_compared_whether_finite_or_not_and_alone_or_many(
    recorded: Any, given: Any, words: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No number in the place of one is as bad as an error; the same infinity, or no number on both sides, is equal."""
    record(folder, lambda rows: torch.tensor(recorded))
    monkeypatch.setattr(optimised, "run_model", lambda model, call: torch.tensor(given))

    _, name, context = load(folder)

    assert name == ("" if words else "bf16")
    assert [warning.partition("serves: ")[2] for warning in context.load_warnings] == ([words] if words else [])


@pytest.mark.parametrize("is_slow", [True, False])
def test_on_another_processor_the_faster_of_both_serves(
    is_slow: bool, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both are measured; a build that is slower there is not used."""
    write_proof(folder, cpu=["x86_64", "amx_int8"])
    clock = Clock()
    monkeypatch.setattr(optimised.time, "perf_counter", clock)
    monkeypatch.setattr(
        optimised,
        "run_model",
        lambda model, call: clock.spend(model(*call.args), 3.0 if is_parent(model) != is_slow else 1.0),
    )

    model, _name, context = load(folder)

    assert is_parent(model) is is_slow
    assert context.build_ratios == ({} if is_slow else {"1": 3.0})
    if is_slow:
        assert (
            "it is 0.33 times as fast as the parent here; it was built for x86_64 amx_int8, and"
            in context.load_warnings[0]
        )


@pytest.mark.parametrize(
    ("seen", "wanted", "is_alike"),
    [
        (np.array([1 + 2j]), np.array([1 + 2j]), True),
        (np.array([1 - 2j]), np.array([1 + 2j]), False),
        (np.array(["cat"]), np.array(["cat"]), True),
        (np.array(["dog"]), np.array(["cat"]), False),
        (np.array([1.0]), np.array(["1.0"]), False),
    ],
)
def test_complex_numbers_and_texts_are_checked_too(
    seen: np.ndarray[Any, Any], wanted: np.ndarray[Any, Any], is_alike: bool
) -> None:
    """By both parts; by being equal."""
    with contextlib.nullcontext() if is_alike else pytest.raises(optimised.NotAsPromised):
        optimised._compare("output of sample 0", seen, wanted)


@pytest.mark.parametrize(("slow_pairs", "serves"), [(9, False), (8, False), (7, True), (0, True)])
@pytest.mark.parametrize("goal", ["memory", "latency"])
def test_on_another_processor_a_build_for_memory_serves_unless_it_is_surely_slower(
    goal: str, slow_pairs: int, serves: bool, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The eighth of nine ratios decides; one for speed must be faster, by the fifth."""
    write_proof(folder, cpu=["x86_64", "amx_int8"], goal=goal)
    clock, runs = Clock(), [0]

    def run(model: Any, call: Call) -> Any:
        runs[0] += not is_parent(model)
        is_slow = not is_parent(model) and 1 < runs[0] <= 1 + slow_pairs  # the first run is the check's
        return clock.spend(model(*call.args), 0.02 if is_parent(model) else 0.04 if is_slow else 0.01)

    write_samples(folder / "optimised" / "samples.npz", find_build("bf16").load(parent, folder, 1), ONE)
    monkeypatch.setattr(optimised.time, "perf_counter", clock)
    monkeypatch.setattr(optimised, "run_model", run)

    _, name, _context = load(folder)

    assert name == ("bf16" if (serves if goal == "memory" else slow_pairs < 5) else "")


class Clock:
    """Time that goes by when it is spent."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        """The time."""
        return self.now

    def spend(self, value: Any, seconds: float) -> Any:
        """Pass a value on after so long."""
        self.now += seconds
        return value


@pytest.mark.parametrize(
    ("load_s", "first_s", "others_s", "samples"),
    [
        (100.0, 2.0, 1.0, 9),  # a tenth of the load exactly
        (100.0, 0.1, 0.1, 20),  # all of them
        (100.0, 6.0, 1.0, 1),  # a second one might take as long
        (0.1, 2.0, 1.0, 1),  # one at least, whatever it takes
        (100.0, 3.0, 3.0, 3),
        (0.0, 0.0, 0.0, 20),
    ],
)
def test_the_check_takes_a_tenth_of_the_load_at_most_or_one_sample(
    load_s: float, first_s: float, others_s: float, samples: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a clock of the test's own: as many samples as fit, and none that would end too late."""
    build = find_build("bf16")
    calls = [Call((torch.randn(1, 4),), {}) for _ in range(20)]
    write_samples(folder / "optimised" / "samples.npz", build.load(parent, folder / "optimised", 1), calls)
    clock, ran = Clock(), 0

    class Slow:
        def load(self, parent: Any, folder: Path, threads: int) -> Any:
            return clock.spend(build.load(parent, folder, threads), load_s)

    def run(model: Any, call: Call) -> Any:
        nonlocal ran
        ran += 1
        return clock.spend(model(*call.args), first_s if ran == 1 else others_s)

    monkeypatch.setattr(optimised.time, "perf_counter", clock)
    monkeypatch.setattr(optimised, "find_build", lambda name: Slow())
    monkeypatch.setattr(optimised, "run_model", run)

    _, name, context = load(folder)

    assert (name, context.load_warnings, ran) == ("bf16", [], samples)
    assert clock.now - load_s <= max(first_s, 0.1 * load_s) + 1e-6


def test_other_versions_are_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was, and what is."""
    write_proof(folder, versions={**versions(), "torch": "1.0"})
    clock = Clock()
    monkeypatch.setattr(optimised.time, "perf_counter", clock)
    monkeypatch.setattr(
        optimised, "run_model", lambda model, call: clock.spend(model(*call.args), 1.0 if is_parent(model) else 9.0)
    )

    _, _, context = load(folder)

    assert f"torch 1.0 then, {versions()['torch']} now" in context.load_warnings[0]


def test_a_build_whose_library_fails_leaves_the_parent(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever it raises."""

    class Broken:
        def load(self, parent: Any, folder: Path, threads: int) -> Any:
            raise RuntimeError("illegal instruction")

    monkeypatch.setattr(optimised, "find_build", lambda name: Broken())

    model, _, context = load(folder)

    assert is_parent(model)
    assert "RuntimeError: illegal instruction" in context.load_warnings[0]
    assert "bf16" in builds.BUILDS


@pytest.mark.parametrize("name", sorted(builds.NATIVE))
def test_native_code_is_not_looked_at_unless_the_archive_is_trusted(
    name: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loading it would run it, even where the load then fails."""
    write_proof(folder, build=name)
    loaded: list[Path] = []

    class Native:
        def load(self, parent: Any, folder: Path, threads: int) -> Any:
            loaded.append(folder)
            return parent()

    monkeypatch.setattr(optimised, "find_build", lambda name: Native())
    model, _, untrusted = load(folder)
    seen = list(loaded)
    trusted = Context()
    trusted.is_trusted = True
    load_optimised(str(folder), parent, 1, trusted)
    made_here = Context()
    made_here.build_folder = str(folder)
    load_optimised(str(folder), parent, 1, made_here)

    assert is_parent(model)
    assert "it is native code, which runs as soon as it is loaded" in untrusted.load_warnings[0]
    assert untrusted.refused_build == name
    assert (seen, loaded) == ([], [folder / "optimised"] * 2)


@pytest.mark.parametrize(
    ("recorded", "told"),
    [
        ({"1": [2.5, 2.0, 3.0], "16": [4.0, 3.5, 4.5]}, {"1": 2.5, "16": 4.0}),
        ({"1": [float("inf")]}, {}),
        ({"one": [2.5]}, {}),
        ([1], {}),
        ({str(rows): [1.5] for rows in range(1, 100)}, {str(rows): 1.5 for rows in range(1, 9)}),
    ],
)
def test_the_recorded_ratios_are_told_where_they_are_numbers(
    recorded: object, told: dict[str, float], folder: Path
) -> None:
    """By the rows of a batch, and no more than a page bears."""
    write_proof(folder, ratios=recorded)

    assert load(folder)[2].build_ratios == told


@pytest.mark.parametrize(
    "ratios",
    [
        {"1": [10**400]},
        {"1": [float("nan")]},
        {"1": [float("inf")]},
        {"1": {}},
        {"1": ["-"]},
        [1],
        {"one": [2.0]},
        None,
    ],
)
def test_ratios_that_are_no_numbers_are_left_out_and_the_build_serves(ratios: Any, folder: Path) -> None:
    """They are shown, and decide nothing."""
    write_proof(folder, ratios=ratios)

    _, name, context = load(folder)

    assert (name, context.build_ratios) == ("bf16", {})
