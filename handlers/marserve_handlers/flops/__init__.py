"""How many floating-point operations a model's batches take, and how many the machine could do.

cost     what a batch of any size takes, from counts of some sizes
watch    sees what a model is called with by the first batches, and has that counted
apart    counts in a process of its own, so that the worker goes on answering
counting what batches take that were seen
modules  counts a module of torch, on its device for shapes alone
graphs   counts an ONNX graph, by the shapes of its nodes
peak     the most that this machine does, measured once; a program of its own
"""

__all__: list[str] = []
