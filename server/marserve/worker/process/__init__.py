"""The process of a worker or a template, apart from any model.

own_process   its processors and threads; how it ends
printed_lines what it prints and logs, with the requests that each line belongs to
parent        ends with its parent
hindrances    what keeps it from its work: collections, other processes, its own printing
memory_limit  bounds what it can allocate
idle_threads  threads that may be ended before a fork
"""
