"""What the ready handlers share, from the options at load to the answers of a batch.

`ReadyHandler` is for any items; `TableHandler` for rows of numbers, as its `columns` describe them.
"""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

from marserve_handlers.base import BaseHandler
from marserve_handlers.context import Context
from marserve_handlers.ready.items import Asked, Item
from marserve_handlers.ready.options import Key, read_options
from marserve_handlers.ready.tables import Columns, as_document, is_table
from marserve_handlers.support.timing import timed

# The most items that the model is run on at once, if `batchSize` is not larger.
MOST_AT_ONCE = 32


class ReadyHandler(BaseHandler):
    """Reads the options, then the items of each batch; subclasses load a model and answer items."""

    name: ClassVar[str]
    keys: ClassVar[Sequence[Key]]

    def __init__(self) -> None:
        super().__init__()
        self.options: dict[str, Any] = {}
        self.model_dir = ""

    def initialize(self, context: Context) -> None:
        """Read `handler` of the model's configuration and load the model. Raises ModelNotLoadable."""
        self.context = context
        self.model_yaml_config = context.model_yaml_config or {}
        self.manifest = context.manifest
        self.model_dir = str(context.system_properties.get("model_dir"))
        self.options = read_options(self.model_yaml_config.get("handler"), self.name, self.keys)
        self.load(context)
        self.initialized = True

    @abstractmethod
    def load(self, context: Context) -> None:
        """Load the model; `options` are there."""

    @abstractmethod
    def read(self, value: Any, where: str) -> Any:
        """What the model takes of one item's value. Raises BadInput, with the field after `where`."""

    @abstractmethod
    def answer(self, items: Sequence[Item]) -> list[Any]:
        """One answer for each of these items; a BadInput in the place of one fails its request alone."""

    def decode(self, value: Any) -> Any:
        """A request's value before its items are read. Raises BadInput."""
        return value

    def is_list(self, value: Any) -> bool:
        """Whether a request's value is a list of items."""
        return isinstance(value, list)

    @timed
    def preprocess(self, data: list[Any]) -> Any:
        """The items of the rows, and the errors of rows that have none."""
        return Asked.of(data, self, self.options["max_items"])

    @timed
    def inference(self, data: Any, *args: Any, **kwargs: Any) -> Any:
        """Answer the items, at most `MOST_AT_ONCE` or `batchSize` at once."""
        asked: Asked = data
        most = max(MOST_AT_ONCE, int(self.context.system_properties.get("batch_size") or 1))
        asked.found = []
        for begin in range(0, len(asked.items), most):
            asked.found += self.answer(asked.items[begin : begin + most])
        return asked

    @timed
    def postprocess(self, data: Any) -> list[Any]:
        """One answer for each row."""
        asked: Asked = data
        return asked.answers()


def threads_of(context: Context) -> int:
    """How many threads a computation may use: said for each call, since a forked worker's libraries know only one."""
    if context.threads:
        return context.threads
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class TableHandler(ReadyHandler):
    """Reads rows of features: JSON, also where the body has no content type. Subclasses set `columns` in `load`."""

    columns: Columns

    def decode(self, value: Any) -> Any:
        """The JSON of rows."""
        return as_document(value)

    def is_list(self, value: Any) -> bool:
        """A list of rows; one row is a list of numbers."""
        return is_table(value)

    def read(self, value: Any, where: str) -> Any:
        """A row of features, float64."""
        return self.columns.read(value, where)
