"""One pool a model version: queue, batcher, dispatcher (pure), and the processes that answer.

pool         `Pool`: the workers of one version, built of the parts below
changes      lets coroutines wait until a pool has changed
wake_timer   wakes the dispatcher at its next moment
options      how a version is served, after all precedence
interpreter  an interpreter other than the server's, and whether it was replaced
reservation  the memory that a pool may use, as the pool asks for it
sizing/      how many workers there are, and when one is replaced
slots/       the life of one worker slot: start, answers, time limits, end
checks/      whether a version may be given batches
launchers/   how workers are started
worker_end/  the server's end of one worker: wire, output, memory, cause of death
dispatch/    which request goes to which worker, and when
"""
