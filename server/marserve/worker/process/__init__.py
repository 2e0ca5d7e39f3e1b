"""The process of a worker or a template, apart from any model.

own_process   its output, processors and threads; how it ends
parent        ends with its parent
memory_limit  bounds what it can allocate
idle_threads  threads that may be ended before a fork
"""
