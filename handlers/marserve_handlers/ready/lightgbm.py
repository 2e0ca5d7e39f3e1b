"""The built-in handler `lightgbm`: a booster that LightGBM saved as text."""

from __future__ import annotations

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


class LightGBMHandler(TableHandler):
    """Answers each row of features with what the booster predicts: a number, or one for each class.

    `handler` of the configuration: `output` (`predict`, `raw`), `labels` (names of the classes, for probabilities).
    """

    name = "lightgbm"
    keys = (word("output", ("predict", "raw"), "predict"), names("labels"))

    def load(self, context: Context) -> None:
        """Open the booster. Raises ModelNotLoadable."""
        path = find_model_file(self.model_dir, self.manifest, (".txt",), self.name)
        library = needed("lightgbm", self.name, "lightgbm")
        try:
            self.model = library.Booster(model_file=path)
        except library.basic.LightGBMError as error:
            raise ModelNotLoadable(f"The file holds no model of LightGBM's: {error}") from error
        check_labels(self.options["labels"], max(2, self.model.num_model_per_iteration()))
        self.columns = Columns(self.model.num_feature(), self.model.feature_name(), takes_missing=True)

    def answer(self, items: Sequence[Item]) -> list[Any]:
        """A number for each row, a list of numbers, or with labels a dict."""
        rows = np.stack([item.value for item in items])
        is_raw = self.options["output"] == "raw"
        found = self.model.predict(rows, raw_score=is_raw, num_threads=threads_of(self.context))
        return scored(found, self.options["labels"])
