"""What concerns the process of a worker or a template, and no model.

own_process   its output, processors and threads; how it ends
parent        ends with its parent
memory_limit  bounds what it can allocate
idle_threads  threads that a fork may do without
"""
