"""The logs: files, limits and writers.

logs           server log, model log, access log, metric logs
access_log     a line a request
line_ids       which requests a line of the server belongs to
line_writer    buffers lines and writes them from a thread
log_limit      bounds what clients cause in the server log
output_budget  bounds what workers print into the model log
bucket         a token bucket
"""
