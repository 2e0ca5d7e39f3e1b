"""The built-in handler `xgboost`: a booster that XGBoost saved as `.json` or `.ubj`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from marserve_handlers.context import Context
from marserve_handlers.errors import ModelNotLoadable
from marserve_handlers.ready.handler import TableHandler, threads_of
from marserve_handlers.ready.items import Item
from marserve_handlers.ready.model_file import find_model_file
from marserve_handlers.ready.options import check_labels, names, word
from marserve_handlers.ready.packages import needed
from marserve_handlers.ready.tables import Columns, scored


class XGBoostHandler(TableHandler):
    """Answers each row of features with what the booster predicts: a number, or one for each class.

    `handler` of the configuration: `output` (`predict`, `margin`), `labels` (names of the classes, for probabilities).
    """

    name = "xgboost"
    keys = (word("output", ("predict", "margin"), "predict"), names("labels"))

    def load(self, context: Context) -> None:
        """Open the booster; it computes with one thread until a worker says how many. Raises ModelNotLoadable."""
        path = find_model_file(self.model_dir, self.manifest, (".json", ".ubj"), self.name)
        library = needed("xgboost", self.name, "xgboost")
        self.model = library.Booster({"nthread": 1})
        try:
            self.model.load_model(path)
        except library.core.XGBoostError as error:
            raise ModelNotLoadable(
                f"The file holds no model of XGBoost's: {str(error).strip().splitlines()[-1]}"
            ) from error
        self._threads: int | None = None
        check_labels(self.options["labels"], max(2, self._classes()))
        self.columns = Columns(self.model.num_features(), self.model.feature_names or (), takes_missing=True)

    def answer(self, items: Sequence[Item]) -> list[Any]:
        """A number for each row, a list of numbers, or with labels a dict."""
        threads = threads_of(self.context)
        if self._threads != threads:
            self._threads = threads
            self.model.set_param({"nthread": threads})
        rows = np.stack([item.value for item in items])
        kind = "margin" if self.options["output"] == "margin" else "value"
        found = self.model.inplace_predict(rows, predict_type=kind, validate_features=False)
        return scored(found, self.options["labels"])

    def _classes(self) -> int:
        """How many classes the booster has, 0 for one number a row."""
        learner = json.loads(self.model.save_config())["learner"]
        return int(learner["learner_model_param"].get("num_class", 0))
