"""The server's end of one worker.

client          the wire: batches out, results in
output          its two pipes, as lines for the model log
output_lines    a pipe's bytes as lines
worker_levels   the level of its logging
memory          what processes hold, and what the kernel killed
cause_of_death  why a worker ended
"""
