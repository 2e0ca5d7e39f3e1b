"""How long inputs are, and how long answers take.

lengths        by a rule of the model's configuration
asked_lengths  by the handler's `length_of`, asked of a worker
latency_goal   batches for a 95th percentile of the latency
allowance      how much of workers' time questions may take
expected_wait  how long a request that comes now would wait
"""
