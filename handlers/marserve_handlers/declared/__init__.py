"""Handlers that say what they take and give, beside TorchServe's shape.

`declaration`   what a model declares, as plain data: named tensors, or one item; its JSON, and how two differ
`decorator`     `@model`, which marks a class or function, and finds marked ones again
`predicting`    what the signature of `predict` says: arrays or one item, sync or async, a stream or one answer
`bodies`        which bytes of a request are its input, and JSON with line and column for what cannot be parsed
`arrays`        one tensor: bytes to a checked array and back
`stacking`      requests to stacked batches, padded where that is declared, and their rows back in order
`items`         one annotated value: bytes to a checked object and back, with its JSON schema
`answer`        an answer that is JSON text already
`opening`       from a marked class or function to what the worker calls
`tensors`, `single`   `handle(rows, context)` for the two shapes; `running` runs coroutines for them
`streams`, `events`   the same for a `predict` that yields, and Server-Sent Events
`named`         models that declare themselves, for `base_handler`
`signature`     what a model's configuration declares for it
`accept`        which of two content types a client would rather have
`item_context`  what `predict(self, item, context)` knows of its request

A worker imports `bodies` alone of this for a handler of TorchServe's shape. numpy, Pillow and pydantic are imported
only by models that use them.
"""
