"""The handlers `sklearn`, `xgboost` and `lightgbm` beside their libraries, on tiny models."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from marserve.pool.launchers.process import limit_threads
from marserve_handlers.batch_check import check_handler
from marserve_handlers.errors import BadInput, ModelNotLoadable
from marserve_handlers.ready.handler import ReadyHandler
from marserve_handlers.support.builtin import find_built_in
from support.model_context import FakeItem, make_context

pytestmark = pytest.mark.ready

ROWS = np.random.default_rng(3).normal(size=(60, 4))
CLASSES = np.digitize(ROWS[:, 0] + ROWS[:, 1], [-0.5, 0.5])
HOW = "`make test-ready` installs it"


def needed(name: str) -> Any:
    """The library; the test is skipped without it."""
    return pytest.importorskip(name, reason=f"needs {name}: {HOW}")


def started(name: str, folder: Path, file: str | None, *, is_trusted: bool = False, **section: Any) -> ReadyHandler:
    """The handler with the model in this folder."""
    handler: Any = find_built_in(name)
    handler = handler()
    context = make_context(folder, file, config={"handler": section})
    context.is_trusted = is_trusted
    context.threads = 1
    handler.initialize(context)
    return handler


def ask(handler: ReadyHandler, *values: Any) -> list[Any]:
    """The answers to a batch of these bodies."""
    handler.context.begin_batch([FakeItem(id=str(number)) for number, _ in enumerate(values)])
    answers = handler.handle([{"body": value} for value in values], handler.context)
    return [answer.message if isinstance(answer, BadInput) else answer for answer in answers]


def check_all_alike(handler: ReadyHandler, wanted: list[Any]) -> None:
    """The answers to the first rows alone, in a batch, and as one list are those wanted, and JSON."""
    rows = ROWS[: len(wanted)].tolist()
    assert ask(handler, *rows) == pytest.approx(wanted)
    assert [ask(handler, row)[0] for row in rows] == pytest.approx(wanted)
    (listed,) = ask(handler, rows)
    assert listed == pytest.approx(wanted)
    json.dumps(listed)
    verdict = check_handler(handler.handle, handler.context, [{"body": row} for row in rows], batch_size=3)
    assert verdict.has_passed, verdict.differences


# ------------------------------------------------------------------------------------------------- scikit-learn


def classifier() -> Any:
    """A classifier of three classes that is a pipeline."""
    needed("sklearn")
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    return make_pipeline(StandardScaler(), LogisticRegression()).fit(ROWS, np.array(["low", "mid", "high"])[CLASSES])


def test_skops_models_answer_as_scikit_learn_does(tmp_path: Path) -> None:
    """Each method that the configuration may name; labels of its own rename the classes."""
    model = classifier()
    needed("skops.io").dump(model, tmp_path / "model.skops")

    check_all_alike(started("sklearn", tmp_path, "model.skops"), model.predict(ROWS[:5]).tolist())
    probabilities = [dict(zip(model.classes_, row, strict=True)) for row in model.predict_proba(ROWS[:5])]
    by_class = started("sklearn", tmp_path, None, output="predict_proba")
    assert ask(by_class, *ROWS[:5].tolist()) == [pytest.approx(each) for each in probabilities]
    decided = started("sklearn", tmp_path, None, output="decision_function")
    check_all_alike(decided, [pytest.approx(each) for each in model.decision_function(ROWS[:3]).tolist()])
    named = started("sklearn", tmp_path, None, labels=["H", "L", "M"])
    assert ask(named, ROWS[0].tolist()) == [{"high": "H", "low": "L", "mid": "M"}[model.predict(ROWS[:1])[0]]]


def test_texts_go_to_models_of_texts(tmp_path: Path) -> None:
    """With `input: text`."""
    needed("sklearn")
    from sklearn.feature_extraction.text import CountVectorizer
    from sklearn.naive_bayes import MultinomialNB
    from sklearn.pipeline import make_pipeline

    texts = ["good film", "bad film", "very good", "very bad"]
    model = make_pipeline(CountVectorizer(), MultinomialNB()).fit(texts, ["yes", "no", "yes", "no"])
    needed("skops.io").dump(model, tmp_path / "model.skops")
    handler = started("sklearn", tmp_path, None, input="text", is_trusted=True)

    assert ask(handler, "good", {"text": "bad"}, ["bad", "good"], 3, {"txt": 1}) == [
        "yes",
        "no",
        ["no", "yes"],
        "text: expected text, got 3",
        "txt: is not known; an item may have text",
    ]


def test_columns_of_a_table_are_named(tmp_path: Path) -> None:
    """An estimator that was fitted with names of columns takes objects, and does not warn at each call."""
    model = classifier()
    model.steps[0][1].feature_names_in_ = np.array(["a", "b", "c", "d"], dtype=object)
    model.steps[0][1].n_features_in_ = 4
    needed("joblib").dump(model, tmp_path / "model.joblib")
    with warnings.catch_warnings():
        handler = started("sklearn", tmp_path, None, is_trusted=True)
        row = dict(zip("abcd", ROWS[0].tolist(), strict=True))

        assert ask(handler, row, {**row, "e": 1}) == [
            model.predict(ROWS[:1])[0],
            "e: is not known; the columns are a, b, c, d",
        ]


def test_pickles_are_opened_by_the_operators_trust_alone(tmp_path: Path) -> None:
    """Of joblib, and of pickle itself."""
    model = classifier()
    needed("joblib").dump(model, tmp_path / "model.joblib")
    (tmp_path / "model.pkl").write_bytes(pickle.dumps(model))

    for file in ("model.joblib", "model.pkl"):
        with pytest.raises(ModelNotLoadable, match=rf"{file} is a pickle.*\.skops .*trusted_models"):
            started("sklearn", tmp_path, file)
        check_all_alike(started("sklearn", tmp_path, file, is_trusted=True), model.predict(ROWS[:5]).tolist())


def test_unknown_types_of_skops_are_loaded_by_the_operators_trust_alone(tmp_path: Path) -> None:
    """They are named."""
    needed("sklearn")
    from sklearn.preprocessing import FunctionTransformer

    model = FunctionTransformer(np.cbrt, feature_names_out=pytest.approx).fit(ROWS)
    needed("skops.io").dump(model, tmp_path / "model.skops")

    with pytest.raises(ModelNotLoadable, match=r"does not know to be safe: .*approx.*trusted_models"):
        started("sklearn", tmp_path, "model.skops", output="transform")
    trusted = started("sklearn", tmp_path, "model.skops", output="transform", is_trusted=True)
    check_all_alike(trusted, [pytest.approx(row) for row in np.cbrt(ROWS[:3]).tolist()])


@pytest.mark.onnx
def test_onnx_models_answer_as_scikit_learn_does(tmp_path: Path) -> None:
    """Classes, and the map of probabilities that converters write."""
    onnx, _ = needed("onnx"), needed("onnxruntime")
    needed("sklearn")
    from sklearn.linear_model import LogisticRegression

    helper, kinds = onnx.helper, onnx.TensorProto
    model = LogisticRegression().fit(ROWS, CLASSES)
    node = helper.make_node(
        "LinearClassifier",
        ["rows"],
        ["label", "scores"],
        domain="ai.onnx.ml",
        coefficients=model.coef_.ravel().tolist(),
        intercepts=model.intercept_.tolist(),
        classlabels_ints=[0, 1, 2],
        post_transform="SOFTMAX",
    )
    maps = helper.make_node("ZipMap", ["scores"], ["maps"], domain="ai.onnx.ml", classlabels_int64s=[0, 1, 2])
    one_map = helper.make_map_type_proto(kinds.INT64, helper.make_tensor_type_proto(kinds.FLOAT, []))
    graph = helper.make_graph(
        [node, maps],
        "classes",
        [helper.make_tensor_value_info("rows", kinds.FLOAT, [None, 4])],
        [
            helper.make_tensor_value_info("label", kinds.INT64, [None]),
            helper.make_value_info("maps", helper.make_sequence_type_proto(one_map)),
        ],
    )
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("ai.onnx.ml", 3)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=10), tmp_path / "model.onnx")

    check_all_alike(started("sklearn", tmp_path, None), model.predict(ROWS[:5]).tolist())
    by_class = started("sklearn", tmp_path, None, output="predict_proba", labels=["low", "mid", "high"])
    wanted = [dict(zip(("low", "mid", "high"), row, strict=True)) for row in model.predict_proba(ROWS[:2]).tolist()]
    assert ask(by_class, *ROWS[:2].tolist()) == [pytest.approx(each, abs=1e-5) for each in wanted]
    assert ask(by_class, [1, 2]) == ["features: expected 4 numbers, got 2"]


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"output": "transform"}, r"handler\.output .* is transform, which Pipeline does not have: it has predict, "),
        ({"labels": ["a"]}, r"handler\.labels .* must be a list of 3 texts"),
        ({"outputs": 1}, r"handler\.outputs .* is not known"),
    ],
)
def test_what_an_estimator_does_not_have_is_an_error_of_the_load(
    tmp_path: Path, section: dict[str, Any], message: str
) -> None:
    """It names what there is."""
    needed("skops.io").dump(classifier(), tmp_path / "model.skops")

    with pytest.raises(ModelNotLoadable, match=message):
        started("sklearn", tmp_path, "model.skops", **section)


# ------------------------------------------------------------------------------------------------- boosters


@pytest.mark.parametrize("file", ["model.json", "model.ubj"])
def test_xgboost_models_answer_as_xgboost_does(tmp_path: Path, file: str) -> None:
    """Probabilities of three classes, named where there are labels; margins where they are asked for."""
    xgboost = needed("xgboost")
    options = {"objective": "multi:softprob", "num_class": 3, "nthread": 1}
    model = xgboost.train(options, xgboost.DMatrix(ROWS, CLASSES), num_boost_round=3)
    model.save_model(tmp_path / file)
    own = model.predict(xgboost.DMatrix(ROWS[:5])).tolist()

    check_all_alike(started("xgboost", tmp_path, file), [pytest.approx(row) for row in own])
    named = started("xgboost", tmp_path, None, labels=["low", "mid", "high"])
    assert ask(named, ROWS[0].tolist()) == [pytest.approx(dict(zip(("low", "mid", "high"), own[0], strict=True)))]
    margins = model.predict(xgboost.DMatrix(ROWS[:2]), output_margin=True).tolist()
    check_all_alike(started("xgboost", tmp_path, None, output="margin"), [pytest.approx(row) for row in margins])


def test_columns_of_xgboost_are_named(tmp_path: Path) -> None:
    """A model that knows its columns takes objects; a missing value is null."""
    xgboost = needed("xgboost")
    table = xgboost.DMatrix(ROWS, ROWS[:, 0], feature_names=list("abcd"))
    model = xgboost.train({"nthread": 1}, table, num_boost_round=2)
    model.save_model(tmp_path / "model.ubj")
    wanted = model.predict(xgboost.DMatrix(np.array([[1, np.nan, 2, 3.0]]), feature_names=list("abcd"))).tolist()

    answers = ask(started("xgboost", tmp_path, None), {"a": 1, "b": None, "d": 3, "c": 2}, {"a": 1})

    assert answers == [pytest.approx(wanted[0]), "b: is missing"]


def test_lightgbm_models_answer_as_lightgbm_does(tmp_path: Path) -> None:
    """The probability of the second of two classes, of both where there are labels; raw scores where asked for."""
    lightgbm = needed("lightgbm")
    options = {"objective": "binary", "num_threads": 1, "verbosity": -1, "min_data_in_leaf": 5}
    model = lightgbm.train(options, lightgbm.Dataset(ROWS, CLASSES > 0), num_boost_round=3)
    model.save_model(tmp_path / "model.txt")
    own = model.predict(ROWS[:5]).tolist()

    check_all_alike(started("lightgbm", tmp_path, "model.txt"), own)
    named = started("lightgbm", tmp_path, None, labels=["no", "yes"])
    assert ask(named, ROWS[0].tolist()) == [pytest.approx({"no": 1 - own[0], "yes": own[0]})]
    raw = started("lightgbm", tmp_path, None, output="raw")
    check_all_alike(raw, model.predict(ROWS[:3], raw_score=True).tolist())


@pytest.mark.parametrize(("name", "file"), [("xgboost", "model.json"), ("lightgbm", "model.txt")])
def test_a_file_that_holds_no_model_is_an_error_of_the_load(tmp_path: Path, name: str, file: str) -> None:
    """So is a missing one, one of another kind, and labels that are not one for each class."""
    needed(name)
    (tmp_path / file).write_text("{}")

    with pytest.raises(ModelNotLoadable, match=r"The file holds no model of"):
        started(name, tmp_path, file)
    with pytest.raises(ModelNotLoadable, match=r"serialized file gone.* is missing"):
        started(name, tmp_path, f"gone{file[-5:]}" if name == "xgboost" else "gone.txt")
    with pytest.raises(ModelNotLoadable, match=rf"{name} loads a file that ends in .*; model\.pt does not"):
        started(name, tmp_path, "model.pt")


@pytest.mark.parametrize("name", ["sklearn", "xgboost", "lightgbm"])
def test_a_load_leaves_no_thread_that_forbids_a_fork(tmp_path: Path, name: str) -> None:
    """In a fresh process, as a template looks at itself."""
    if name == "sklearn":
        needed("skops.io").dump(classifier(), tmp_path / "model.skops")
    elif name == "xgboost":
        table = needed(name).DMatrix(ROWS, CLASSES)
        needed(name).train({"nthread": 1}, table, num_boost_round=2).save_model(tmp_path / "model.json")
    else:
        table = needed(name).Dataset(ROWS, CLASSES)
        options = {"num_threads": 1, "verbosity": -1}
        needed(name).train(options, table, num_boost_round=2).save_model(tmp_path / "model.txt")
    root = Path(__file__).parents[3]
    script = f"""
import json, sys
sys.path[:0] = {[str(root / name) for name in ("server", "handlers", "tests")]!r}
from marserve.worker.process.idle_threads import end_idle_threads
from marserve.worker.template import open_descriptors, refusals
from support.model_context import make_context
from marserve_handlers.support.builtin import find_built_in
known = open_descriptors()
handler = find_built_in({name!r})()
handler.initialize(make_context({str(tmp_path)!r}))
end_idle_threads()
print(json.dumps(refusals(known)))
"""
    run = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, **limit_threads(1)},
    )

    assert json.loads(run.stdout.splitlines()[-1]) == []
