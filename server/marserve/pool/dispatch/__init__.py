"""Which request goes to which worker, and when. Pure: time is passed in, I/O is asked for.

dispatcher    the life of every request, from `submit` to its one end
actions       what is asked of the outside world
jobs          jobs, batches under way, workers: the data
lanes         the workers: what each runs, which are idle, lent or held
queue         requests that wait: by priority, then age
batcher       which of them leave together
deadlines     when jobs that are not answered are ended
fingerprints  which bodies are refused, since they killed workers
hold          how long to wait where every start of a worker failed
send_ahead    which busy workers may be sent a batch ahead
least_loaded  which worker has the fewest requests
sequences     whose turn it is in each sequence
lengths/      how long inputs are, and how long answers take
modes/        how workers are given what waits: batches, sequences, steps, coroutines
"""
