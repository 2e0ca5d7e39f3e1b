"""What runs in a worker process and in a template. Light on purpose: see `tests/test_house.py`.

loop                 reads a batch, runs the handler, writes the answers
template             loads a model once and forks workers
load                 from an archive's folder to a handler
rank                 one process of a group
coroutines           many batches at once, in one event loop
continuous_batching  a call of the handler is a step
checks               warm-up inputs, and answers compared
lengths              how long items are, by the author's `length_of`
outgoing             what the author's values become on the wire
device/              the worker's accelerator
memory_limit         bounds what a worker can allocate
idle_threads         threads that a fork may do without
parent               ends with its parent
"""
