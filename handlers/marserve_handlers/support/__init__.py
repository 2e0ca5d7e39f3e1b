"""What only supports the handlers; authors import none of it.

builtin          the names of the handlers that come with marserve
classes          a class by its dotted name, and those that a module defines
labels targets   names of classes, and which class an explanation is asked for
tokens contractions pictures     from text and pictures to what a model takes
shown            names and values of clients, cut for messages
line_owner       which requests what is logged and printed belongs to
timing           the steps of a handler, timed
distributions    the package that brings a module which was not found
exported_check   looks through a `.pt2` before torch opens it
metric_types metrics_file        kinds of metrics, errors of their cache, and the file that declares metrics
devices/         the device of a worker, its errors, its driver; compilation; engines of language models
overlapping/     `overlapPreprocess`: a step of a handler on a thread of its own
comparing/       how two answers to one request are compared
torchserve/      what stands behind names of TorchServe's package `ts`
"""

__all__: list[str] = []
