"""What runs in a worker process and in a template. Light on purpose: see `tests/test_house.py`.

loop                 loads a model, then carries out the server's messages
serving              a batch to the handler, its answers to the server
connection           the worker's end of its socket to the server
template             loads a model once and forks workers
load                 from an archive's folder to a handler
rank                 one process of a group
overlap/             a batch is preprocessed while the one before computes
coroutines           many batches at once, in one event loop
continuous_batching  a call of the handler is a step
checks               warm-up inputs, and answers compared
profile              how the time of some batches is spent
calls                other models, called by the handler
rows                 the rows and ids that a handler gets for items
outgoing             the author's values and errors, as they travel on the wire
asked/               what the server asks the author's code beside requests
device/              the worker's accelerator
without_server/      what a handler declares, and a handler under test
process/             its own process: output, limits, threads, parent
"""
