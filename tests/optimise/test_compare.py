"""Planted bad builds beside a good one: what each recorded is compared as `marserve compare` does."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from marserve.messages import Load
from marserve.optimise.compare import Answers, Errors, UnknownScores, Wish, check_scores, faults_of_answers
from marserve.optimise.comparison import Agreement, Bounds, Verdict
from marserve.optimise.recording import Recording, read_recording
from marserve.worker.load import LoadedModel, make_context
from marserve.worker.without_server.compared import Compared
from marserve.worker.without_server.in_process import in_process

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

INPUTS, MANY, CLASSES, WIDTH, BATCH = 64, 200, 10, 12, 8


@dataclass
class Out:
    """Scores in a value of one's own that says what is in it."""

    scores: Any


class Hidden:
    """Scores in a value that says nothing of them."""

    def __init__(self, scores: Any) -> None:
        self.scores = scores


class Net(torch.nn.Module):  # type: ignore[misc]
    """A linear classifier, and what a planted fault does to its answer."""

    def __init__(self, fault: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.linear = torch.nn.Linear(WIDTH, CLASSES)
        self.fault = fault
        self.calls = 0

    def forward(self, rows: Any) -> Any:
        """The scores."""
        self.calls += 1
        return self.fault(self, rows)


class Handler:
    """Reads a list of numbers, answers the scores."""

    names_classes = True

    def __init__(self, model: Any) -> None:
        self.model = model

    def handle(self, data: Any, context: Any) -> Any:
        """As a base handler does."""
        with torch.inference_mode():
            given = self.model(torch.tensor([row["body"] for row in data], dtype=torch.float32))
        if isinstance(given, dict):
            given = next(iter(given.values()))
        given = getattr(given, "scores", given)
        return given.tolist() if given.dtype is torch.float32 else [str(each) for each in given]


def per_tensor(net: Any, rows: Any) -> Any:
    """Quantised with one scale for the whole batch."""
    scale = rows.abs().max() / 127
    return net.linear((rows / scale).round() * scale)


def nan_for_one(net: Any, rows: Any) -> Any:
    """No number for the input whose first number is the largest of all."""
    scores = net.linear(rows)
    scores[rows[:, 0] >= LARGEST] = float("nan")
    return scores


def stale(net: Any, rows: Any) -> Any:
    """Keeps a part of the answer before."""
    scores = net.linear(rows)
    before = getattr(net, "before", scores[:1])
    net.before = scores[-1:].clone()
    return scores + 0.2 * before


def only_at_eight(net: Any, rows: Any) -> Any:
    """Wrong in full batches alone."""
    scores = net.linear(rows)
    return scores.flip(1) if len(rows) == BATCH else scores


def swapped(net: Any, rows: Any) -> Any:
    """Answers of a batch in another order."""
    return net.linear(rows).flip(0)


def normalised(net: Any, rows: Any) -> Any:
    """Batch normalisation as in training."""
    return net.linear(rows - rows.mean(0) if len(rows) > 1 else rows)


def fails_at_two(net: Any, rows: Any) -> Any:
    """A build for batch 1 alone."""
    if len(rows) == 2:
        raise RuntimeError("expected batch 1")
    return net.linear(rows)


def crop(net: Any, rows: Any) -> Any:
    """Another number of classes."""
    return net.linear(rows)[:, :-1]


def first_row(net: Any, rows: Any) -> Any:
    """One answer for a batch."""
    return net.linear(rows)[:1]


def fewer_than_declared(net: Any, rows: Any) -> Any:
    """A package that was declared for eight rows, and takes seven."""
    if len(rows) == BATCH:
        raise RuntimeError("dim value is too large")
    return net.linear(rows)


def misread(net: Any, rows: Any) -> Any:
    """A quantised file that another runtime misreads: five of six answers are others (OpenVINO, a QDQ file)."""
    scores = net.linear(rows)
    is_right = (rows[:, :1] * 1000).long().abs() % 6 == 0
    return torch.where(is_right, scores, scores.flip(1) * 1.01)


def one_class_negated(net: Any, rows: Any) -> Any:
    """A channel's scale with the wrong sign."""
    scores = net.linear(rows)
    return torch.cat([-scores[:, :1], scores[:, 1:]], 1)


ONE_OF_MANY = "no number for one of 200"
PLANTED: dict[str, tuple[Callable[[Any, Any], Any], str]] = {
    "wrong scale": (lambda net, rows: net.linear(rows) * 1.2, "has a mean error of 0.2 of the mean output"),
    "permuted labels": (lambda net, rows: net.linear(rows).roll(1, 1), "has a mean error of"),
    "one scale for a batch": (per_tensor, "of a row depends on its mates"),
    ONE_OF_MANY: (nan_for_one, "elements that are no finite number"),
    "saturation": (lambda net, rows: net.linear(rows).clamp(-0.3, 0.3), "has a mean error of"),
    "a stale buffer": (stale, "mean error"),
    "wrong only at batch 8": (only_at_eight, "in batches of 8: output has a mean error of"),
    "answers in another order": (swapped, "in twos: output has a mean error of"),
    "normalised over the batch": (normalised, "in twos: output has a mean error of"),
    "fails at batch 2": (fails_at_two, "in twos: input 0: RuntimeError('expected batch 1')"),
    "another number of classes": (crop, "it is [1, 9], wanted [1, 10]"),
    "one answer for a batch": (first_row, "2 rows gave outputs that are not as long"),
    "a constant": (lambda net, rows: torch.ones(len(rows), CLASSES), "has a mean error of"),
    "noise": (lambda net, rows: net.linear(rows) + torch.randn(len(rows), CLASSES), "has a mean error of"),
    "fewer rows than declared": (
        fewer_than_declared,
        "in batches of 8: input 0: RuntimeError('dim value is too large')",
    ),
    "a misread file": (misread, "has a mean error of"),
    "a channel with the wrong sign": (one_class_negated, "has a mean error of"),
    "infinite": (lambda net, rows: net.linear(rows) / (rows[:, :1] > -1), "elements that are no finite number"),
    "whole numbers": (lambda net, rows: net.linear(rows).round(), "has a mean error of"),
    "another name": (lambda net, rows: {"a": net.linear(rows), "b": rows}, "the outputs are a, b, wanted output"),
}
LARGEST = 0.0


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    """Lists of numbers as JSON."""
    global LARGEST
    folder = tmp_path_factory.mktemp("inputs")
    torch.manual_seed(2)
    rows = torch.randn(MANY, WIDTH)
    LARGEST = float(rows[:, 0].max())
    for at, row in enumerate(rows.tolist()):
        (folder / f"{at:03}.json").write_text(json.dumps(row))
    return [{"path": str(path), "content_type": "application/json"} for path in sorted(folder.iterdir())]


@pytest.fixture(scope="module")
def inputs(many: list[dict[str, str]]) -> list[dict[str, str]]:
    """The first of them."""
    return many[:INPUTS]


def record(
    fault: Callable[[Any, Any], Any], folder: Path, inputs: list[dict[str, str]], within_s: float = 60
) -> Recording:
    """What the build with that fault gives."""
    folder.mkdir()
    load = Load("m", "1.0", str(folder), "h", None, None, BATCH)
    model = LoadedModel(Handler(Net(fault).eval()).handle, make_context(load), load)
    with in_process(model) as process:
        compared = Compared(model, process)
        said = compared.obey(
            {"do": "record", "folder": str(folder), "inputs": inputs, "batch_size": BATCH, "within_s": within_s}
        )
    return read_recording(json.loads(json.dumps(said)))


@pytest.fixture(scope="module")
def reference(inputs: list[dict[str, str]], tmp_path_factory: pytest.TempPathFactory) -> tuple[Recording, Path]:
    """What is right."""
    folder = tmp_path_factory.mktemp("reference") / "run"
    return record(lambda net, rows: net.linear(rows), folder, inputs), folder


def judged(reference: tuple[Recording, Path], other: Recording, folder: Path) -> tuple[Errors, Verdict]:
    """The errors, and the verdict with the usual bounds."""
    errors = Errors([reference[0], other], [reference[1], folder], ())
    return errors, errors.judge(errors.agreement, Bounds())


@pytest.mark.parametrize("fault", [each for each in PLANTED if each != ONE_OF_MANY])
def test_a_bad_build_is_refused_with_what_is_wrong(
    fault: str, reference: tuple[Recording, Path], inputs: list[dict[str, str]], tmp_path: Path
) -> None:
    """Whichever of these it is."""
    planted, words = PLANTED[fault]
    other = record(planted, tmp_path / "run", inputs)

    errors, verdict = judged(reference, other, tmp_path / "run")

    assert not verdict.has_passed
    assert any(words in each for each in verdict.faults), verdict.faults
    assert errors.runs


def test_a_build_without_a_number_for_one_of_two_hundred_inputs_is_refused(
    many: list[dict[str, str]], tmp_path: Path
) -> None:
    """Half a percent of the answers, which agreement of 98 % would let pass."""
    planted, words = PLANTED[ONE_OF_MANY]
    right = record(lambda net, rows: net.linear(rows), tmp_path / "reference", many)
    other = record(planted, tmp_path / "run", many)

    errors, verdict = judged((right, tmp_path / "reference"), other, tmp_path / "run")

    assert len(many) == MANY
    assert errors.agreement is not None
    assert errors.agreement.agreeing >= MANY - 1
    assert not verdict.has_passed
    assert any(words in each for each in verdict.faults), verdict.faults


def test_good_builds_pass_and_all_their_inputs_agree(
    reference: tuple[Recording, Path], inputs: list[dict[str, str]], tmp_path: Path
) -> None:
    """The same once more; one with a small error; one that names its output otherwise."""
    builds: dict[str, Callable[[Any, Any], Any]] = {
        "same": lambda net, rows: net.linear(rows),
        "rounded": lambda net, rows: net.linear((rows * 256).round() / 256),
        "named": lambda net, rows: {"logits": net.linear(rows)},
        "in a dataclass": lambda net, rows: Out(net.linear(rows)),
    }
    for name, build in builds.items():
        errors, verdict = judged(reference, record(build, tmp_path / name, inputs), tmp_path / name)

        assert verdict.has_passed, (name, verdict.faults)
        assert set(errors.runs) == {"alone", "in twos", f"in batches of {BATCH}", "beside a loud mate"}
        assert errors.agreement is not None
        assert (errors.agreement.by, errors.agreement.inputs) == ("top-1 of output", INPUTS)
        assert errors.agreement.agreeing >= INPUTS - 2


def test_an_input_that_both_refuse_is_left_out_and_the_others_keep_their_places(
    reference: tuple[Recording, Path], inputs: list[dict[str, str]], tmp_path: Path
) -> None:
    """Text among the numbers."""
    (tmp_path / "bad.json").write_text('"text"')
    mixed = [inputs[0], {"path": str(tmp_path / "bad.json"), "content_type": "application/json"}, *inputs[1:]]

    first = record(lambda net, rows: net.linear(rows), tmp_path / "first", mixed)
    second = record(lambda net, rows: net.linear(rows) * 1.01, tmp_path / "second", mixed)
    errors, verdict = judged((first, tmp_path / "first"), second, tmp_path / "second")

    assert first.answers[1].message
    assert first.answers[1].call == -1
    assert verdict.has_passed, verdict.faults
    assert errors.runs["alone"].outputs["output"].rows == INPUTS
    assert errors.runs["alone"].outputs["output"].mean_error == pytest.approx(0.01, rel=1e-3)


def test_a_handler_that_calls_its_model_twice_has_only_its_answers_compared(
    inputs: list[dict[str, str]], tmp_path: Path
) -> None:
    """It says so, with the input."""

    class Twice(Handler):
        def handle(self, data: Any, context: Any) -> Any:
            super().handle(data, context)
            return super().handle(data, context)

    load = Load("m", "1.0", str(tmp_path), "h", None, None, BATCH)
    model = LoadedModel(Twice(Net(lambda net, rows: net.linear(rows))).handle, make_context(load), load)
    with in_process(model) as process:
        compared = Compared(model, process)
        said = compared.record(tmp_path, inputs[:3], BATCH, 60)
        timed = compared.time(3, 0.01)

    recording = read_recording(said)
    assert recording.why_not == "the handler calls its model 2 times for input 0"
    assert recording.runs == []
    assert [answer.message for answer in recording.answers] == ["", "", ""]
    assert timed["calls"] >= 1


def test_a_recording_without_the_time_for_its_inputs_or_batches_says_that_it_is_cut_short(
    reference: tuple[Recording, Path], inputs: list[dict[str, str]], tmp_path: Path
) -> None:
    """Runs of no batch have no faults."""
    none = record(lambda net, rows: net.linear(rows), tmp_path / "none", inputs, within_s=0)
    one = record(lambda net, rows: net.linear(rows), tmp_path / "one", inputs[:1], within_s=0)

    assert len(none.answers) == 1
    assert none.is_cut_short(INPUTS)
    assert one.is_cut_short(1)
    assert [run.is_cut_short for run in one.runs] == [False, True, True, True]
    assert not reference[0].is_cut_short(INPUTS)
    assert reference[0].is_cut_short(INPUTS + 1)


def test_a_model_of_whose_output_nothing_can_be_compared_is_refused_with_what_to_do(
    inputs: list[dict[str, str]], tmp_path: Path
) -> None:
    """However alike both are: nothing showed it."""
    first, second = (
        record(lambda net, rows: Hidden(net.linear(rows)), tmp_path / name, inputs[:3]) for name in ("first", "second")
    )

    errors, verdict = judged((first, tmp_path / "first"), second, tmp_path / "second")

    assert errors.runs
    assert verdict.faults == (
        "nothing could be compared: the model gives a value of the type Hidden, in which no tensor and no array was "
        "found; let it return tensors, or lists, tuples, dicts or dataclasses of them",
    )


def test_an_output_that_is_lacking_for_some_inputs_alone_is_refused(
    reference: tuple[Recording, Path], inputs: list[dict[str, str]], tmp_path: Path
) -> None:
    """What is not there cannot be far off; and the other way round."""
    other = record(lambda net, rows: (Out if rows[0, 0] < 0 else Hidden)(net.linear(rows)), tmp_path / "run", inputs)

    _, verdict = judged(reference, other, tmp_path / "run")
    _, reverse = judged((other, tmp_path / "run"), *reference)

    assert any("there are no outputs, wanted output" in fault for fault in verdict.faults), verdict.faults
    assert any("the outputs are scores, wanted none" in fault for fault in reverse.faults), reverse.faults


def as_complex(net: Any, rows: Any) -> Any:
    """Scores with an imaginary part, which is half of them."""
    scores = net.linear(rows)
    return torch.complex(scores, scores / 2)


def as_texts(net: Any, rows: Any) -> Any:
    """The best class in words, as ONNX Runtime gives texts."""
    return np.array([f"class {best}" for best in net.linear(rows).argmax(1).tolist()], object)


@pytest.mark.parametrize(
    ("right", "wrong", "words"),
    [
        (as_complex, lambda net, rows: as_complex(net, rows).conj(), "output has a mean error of 0.67 of the mean"),
        (as_texts, lambda net, rows: as_texts(net, rows)[::-1], "in twos: output has a mean error of"),
        (as_texts, lambda net, rows: net.linear(rows).argmax(1), "output: it is of type int64, wanted <U7, and"),
    ],
    ids=["complex", "texts", "numbers for texts"],
)
def test_outputs_that_are_no_real_numbers_are_compared_too(
    right: Callable[[Any, Any], Any],
    wrong: Callable[[Any, Any], Any],
    words: str,
    inputs: list[dict[str, str]],
    tmp_path: Path,
) -> None:
    """In batches and beside themselves as well; what cannot be compared is a fault, and no end of the comparison."""
    first, second, third = (
        record(fault, tmp_path / name, inputs[:20]) for name, fault in [("a", right), ("b", right), ("c", wrong)]
    )

    errors, same = judged((first, tmp_path / "a"), second, tmp_path / "b")
    _, other = judged((first, tmp_path / "a"), third, tmp_path / "c")

    assert same.has_passed, same.faults
    assert errors.runs["in twos"].outputs["output"].rows == 20
    assert set(errors.mates) == {"in twos", f"in batches of {BATCH}", "beside a loud mate"}
    assert any(words in fault for fault in other.faults), other.faults


@pytest.mark.parametrize(
    ("one", "kind", "words"),
    [
        ({}, object, "an array holds values of the types dict, which cannot be compared"),
        (7, "M8[s]", "neither numbers"),
    ],
)
def test_an_output_of_something_else_is_named_in_a_fault(
    one: Any, kind: Any, words: str, inputs: list[dict[str, str]], tmp_path: Path
) -> None:
    """Every input was tried all the same."""
    both = [record(lambda net, rows: np.array([one for _ in rows], kind), tmp_path / name, inputs[:3]) for name in "ab"]

    _, verdict = judged((both[0], tmp_path / "a"), both[1], tmp_path / "b")

    assert len(both[0].answers) == 3
    assert words in verdict.faults[0]


@pytest.mark.parametrize(
    ("scores", "words"),
    [
        (["logit"], "there is no output logit; there are logits, best; did you mean logits?"),
        (["logits", "nothing alike"], "there is no output nothing alike; there are logits, best$"),
        (["best"], r"the output best holds no class scores, .* it is int64 \[1\]; there are logits, best"),
        (["*"], r"\* is the only output, and there are logits, best"),
    ],
)
def test_a_name_for_scores_that_no_output_with_scores_has_is_an_error(
    scores: list[str], words: str, inputs: list[dict[str, str]], tmp_path: Path
) -> None:
    """Else a slip of the pen would switch agreement off."""

    def build(net: Any, rows: Any) -> Any:
        return {"logits": net.linear(rows), "best": net.linear(rows).argmax(1)}

    recording = record(build, tmp_path / "run", inputs[:2])

    check_scores(["logits"], recording, tmp_path / "run")
    check_scores([], recording, tmp_path / "run")
    with pytest.raises(UnknownScores, match=words):
        check_scores(scores, recording, tmp_path / "run")


def test_the_only_output_may_be_named_by_a_star(reference: tuple[Recording, Path]) -> None:
    """As archives do that name classes."""
    check_scores(["*"], *reference)
    check_scores(["output"], *reference)


TEXTS, NUMBERS = (4, "best", "'dog'", "'cat'"), (5, "score", "0.5", "0.9")
BY_TOLERANCE = Answers("by more than 0.001", 9, (TEXTS, NUMBERS), beyond_numbers=(TEXTS,))
BY_HANDLER = Answers("by the handler's compare", 9, (TEXTS, NUMBERS), by_handler=True)
BY_COMPARE = Agreement("the handler's compare", 7, 9)
ALL = "2 of 9 answers differ "


@pytest.mark.parametrize(
    ("answers", "same", "disagreeing", "wish", "agreement", "faults"),
    [
        (BY_TOLERANCE, (), (), Wish(), None, ["1 of 9 answers differ in more than numbers: input 4 at best is 'dog',"]),
        (BY_TOLERANCE, (), (4,), Wish(), None, []),
        (BY_TOLERANCE, (5,), (4,), Wish(), None, ["1 of 9 answers differ where the models give the same: input 5 at"]),
        (BY_TOLERANCE, (4, 5), (), Wish(), None, [f"{ALL}where the models give the same: input 4 at best is 'dog',"]),
        (BY_TOLERANCE, (), (4,), Wish(same_answers=True), None, [f"{ALL}(by more than 0.001): input 4 at best is"]),
        (BY_HANDLER, (), (4, 5), Wish(), BY_COMPARE, [f"{ALL}(by the handler's compare)"]),
        (BY_HANDLER, (), (), Wish(Bounds(min_agreement=0.5)), BY_COMPARE, []),
        (BY_HANDLER, (), (), Wish(Bounds(min_agreement=0.5)), Agreement("top-1 of x", 9, 9), [f"{ALL}(by the han"]),
        (BY_HANDLER, (), (), Wish(Bounds(min_agreement=0.5), same_answers=True), BY_COMPARE, [f"{ALL}(by the han"]),
        (Answers("by more than 0.001", 9, ()), (1,), (), Wish(same_answers=True), None, []),
    ],
)
def test_which_answers_that_differ_are_at_fault(
    answers: Answers,
    same: tuple[int, ...],
    disagreeing: tuple[int, ...],
    wish: Wish,
    agreement: Agreement | None,
    faults: list[str],
    reference: tuple[Recording, Path],
) -> None:
    """Those that the models' errors do not explain, and those that the handler's compare or an export counts."""
    errors = Errors([reference[0]] * 2, [reference[1]] * 2, ())
    assert errors.same == set(range(INPUTS))
    errors.same, errors.disagreeing = set(same), set(disagreeing)

    found = faults_of_answers(answers, errors, agreement, wish)

    assert len(found) == len(faults)
    assert all(fault.startswith(words) for fault, words in zip(found, faults, strict=True)), found


def test_without_an_output_every_answer_that_differs_is_at_fault(tmp_path: Path) -> None:
    """Nothing else was compared."""
    errors = Errors([read_recording({"answers": [], "kind": "", "why_not": "", "runs": []})] * 2, [tmp_path] * 2, ())

    assert faults_of_answers(BY_TOLERANCE, errors, None, Wish()) == [f"{ALL}(by more than 0.001)"]
