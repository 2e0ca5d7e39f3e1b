"""How long inputs are, and how long answers take.

lengths        by a rule of the model's configuration
asked_lengths  by the handler's `length_of`, which runs in a worker
latency_goal   the batch size for a 95th percentile of the latency
allowance      how much of workers' time questions and checks may take
expected_wait  how long a request that comes now would wait
"""
