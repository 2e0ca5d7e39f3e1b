"""Which request goes to which worker, and when. Pure: time is passed in, I/O is asked for.

dispatcher    the life of every request, from `submit` to its one end
actions       what is asked of the outside world
jobs          jobs, batches under way, workers: the data
lanes         the workers: what each runs, which are idle, lent or held
queue         requests that wait: by priority, then age
batcher       which of them leave together
deadlines     when jobs that are not answered are ended
fingerprints  which bodies are refused because they killed workers
hold          how long requests wait for a worker after failed starts
send_ahead    which busy workers may be sent a batch ahead
least_loaded  which worker has the fewest requests
sequences     which request is next in each sequence
lengths/      how long inputs are, and how long answers take
modes/        how requests are given to workers: batches, sequences, steps, coroutines
"""
