"""The built-in handler `sklearn`: an estimator of scikit-learn, saved with skops, as ONNX, or as a trusted pickle."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np

from marserve_handlers.context import Context
from marserve_handlers.errors import ModelNotLoadable
from marserve_handlers.ready.handler import TableHandler
from marserve_handlers.ready.items import Item, read_fields, read_text
from marserve_handlers.ready.items import join as place_of
from marserve_handlers.ready.model_file import find_model_file
from marserve_handlers.ready.options import check_labels, names, word
from marserve_handlers.ready.packages import needed
from marserve_handlers.ready.tables import Columns, plain, scored
from marserve_handlers.ready.trusted_pickle import load_trusted

PREDICT, PROBABILITIES = "predict", "predict_proba"
OUTPUTS = (PREDICT, PROBABILITIES, "decision_function", "transform")
ENDINGS = (".skops", ".onnx", ".joblib", ".pkl", ".pickle")


class SklearnHandler(TableHandler):
    """Answers each row of features, or each text, with what a method of the estimator gives.

    `handler` of the configuration: `output` (`predict`; `predict_proba`, `decision_function`, `transform`), `input`
    (`numbers`, `text`), `labels` (names of the classes in the order of `classes_`).
    """

    name = "sklearn"
    keys = (word("output", OUTPUTS, PREDICT), word("input", ("numbers", "text"), "numbers"), names("labels"))

    def load(self, context: Context) -> None:
        """Open the model's file. Raises ModelNotLoadable."""
        path = find_model_file(self.model_dir, self.manifest, ENDINGS, self.name)
        self._is_text = self.options["input"] == "text"
        self.takes_arrays = path.endswith(".onnx")
        if self.takes_arrays:
            self._load_onnx_file(path, context)
            return
        self.model = self._open(path, context)
        output = self.options["output"]
        if not callable(getattr(self.model, output, None)):
            has = [each for each in OUTPUTS if callable(getattr(self.model, each, None))]
            raise ModelNotLoadable(
                f"handler.output of the model's configuration is {output}, which {type(self.model).__name__} does not "
                f"have: it has {', '.join(has) or 'none of the outputs that are known'}."
            )
        classes = plain(getattr(self.model, "classes_", []))
        self._classes = [str(each) for each in classes]
        if self.options["labels"] is not None:
            check_labels(self.options["labels"], len(self._classes))
            self._names = dict(zip(classes, self.options["labels"], strict=True))
            self._classes = self.options["labels"]
        else:
            self._names = {}
        # Rows are in the order of these names; the arrays have no names, and scikit-learn would warn at each call.
        warnings.filterwarnings("ignore", message="X does not have valid feature names")
        columns = [str(each) for each in plain(getattr(self.model, "feature_names_in_", []))]
        count = None if self._is_text else getattr(self.model, "n_features_in_", None)
        self.columns = Columns(count, columns, takes_missing=_takes_missing(self.model))

    def decode(self, value: Any) -> Any:
        """JSON, unless the model takes texts."""
        return value if self._is_text else super().decode(value)

    def is_list(self, value: Any) -> bool:
        """A list of texts, or of rows."""
        return isinstance(value, list) if self._is_text else super().is_list(value)

    def read(self, value: Any, where: str) -> Any:
        """A row of features, float64, or a text."""
        if not self._is_text:
            return super().read(value, where)
        if isinstance(value, dict):
            read_fields(value, where, ("text",), "text")
            where, value = place_of(where, "text"), value["text"]
        return read_text(value, where or "text")

    def answer(self, items: Sequence[Item]) -> list[Any]:
        """What the estimator's method gives for each item; probabilities by class."""
        values = [item.value for item in items]
        if self.takes_arrays:
            return self._answer_onnx(np.stack(values))
        output = self.options["output"]
        found = getattr(self.model, output)(values if self._is_text else np.stack(values))
        if isinstance(found, list):  # several outputs, each with classes of its own
            return [list(each) for each in zip(*map(plain, found), strict=True)]
        if output == PROBABILITIES:
            return scored(found, self._classes)
        answers: list[Any] = plain(found.toarray() if hasattr(found, "toarray") else found)
        if output == PREDICT and self._names:
            return [self._names.get(each, each) for each in answers]
        return answers

    # ------------------------------------------------------------------------------------------------- loading

    def _open(self, path: str, context: Context) -> Any:
        needed("sklearn", self.name, "scikit-learn")
        if not path.endswith(".skops"):
            return load_trusted(path, context, self.name, ".skops (skops.io.dump) or ONNX")
        skops = needed("skops.io", self.name, "skops")
        try:
            unknown = skops.get_untrusted_types(file=path)
            if unknown and not context.is_trusted:
                raise ModelNotLoadable(
                    f"The model holds types that skops does not know to be safe: {', '.join(unknown)}. They are loaded "
                    "only if the operator names the archive in trusted_models."
                )
            return skops.load(path, trusted=unknown)
        except ModelNotLoadable:
            raise
        except Exception as error:  # skops raises what it stumbles over
            raise ModelNotLoadable(f"The model's file cannot be opened with skops: {error}") from error

    def _load_onnx_file(self, path: str, context: Context) -> None:
        if self._is_text:
            raise ModelNotLoadable("handler.input of the model's configuration is text; an ONNX model takes numbers.")
        if self.options["output"] not in (PREDICT, PROBABILITIES):
            raise ModelNotLoadable(
                f"handler.output of the model's configuration is {self.options['output']}; an ONNX model has {PREDICT} "
                f"and {PROBABILITIES}."
            )
        self.device = self._find_device(context.system_properties.get("gpu_id"))
        self.model = self._load_onnx_model(path)
        outputs = self.model.get_outputs()
        if self.options["output"] == PROBABILITIES and len(outputs) < 2:
            raise ModelNotLoadable(f"The ONNX model has one output, {outputs[0].name}, and none of probabilities.")
        shape = self.model.get_inputs()[0].shape
        count = shape[1] if len(shape) == 2 and isinstance(shape[1], int) else None
        self.columns = Columns(count, takes_missing=True)

    def _answer_onnx(self, rows: Any) -> list[Any]:
        from marserve_handlers.runtimes.onnx import run as run_session

        found = run_session(self.model, rows)
        outputs: list[Any] = found if isinstance(found, list) else [found]
        labels = self.options["labels"]
        if self.options["output"] == PREDICT:
            answers = plain(outputs[0])
            is_row = bool(answers) and isinstance(answers[0], list) and len(answers[0]) == 1
            answers = [each[0] for each in answers] if is_row else answers
            return [labels[each] if labels and type(each) is int else each for each in answers]
        if hasattr(outputs[1], "tolist"):
            return scored(outputs[1], labels or [str(number) for number in range(outputs[1].shape[1])])
        return [  # a map for each row
            {(labels[key] if labels and type(key) is int else str(key)): float(value) for key, value in row.items()}
            for row in outputs[1]
        ]


def _takes_missing(model: Any) -> bool:
    """Whether the estimator says that it takes missing values."""
    tags = getattr(model, "__sklearn_tags__", None)
    return bool(tags is not None and tags().input_tags.allow_nan)
