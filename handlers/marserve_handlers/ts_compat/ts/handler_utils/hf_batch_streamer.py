"""TorchServe's name for `marserve_handlers.batch_streamer`."""

from marserve_handlers.batch_streamer import TextIteratorStreamerBatch

__all__ = ["TextIteratorStreamerBatch"]
