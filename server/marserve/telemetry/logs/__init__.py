"""The logs: files, limits and writers.

logs           server log, model log, access log, metric logs
access_log     a line a request
line_ids       which requests a line of the server belongs to
line_writer    buffers lines and writes them from a thread
log_book       the logs as they are asked for and followed
search         looks through log files, from the newest line back
worker_lines   what a worker printed, as logs take it
records        lines as records that can be asked for
recent_lines   what an outlet has just written
log_limit      bounds what clients cause in the server log
output_budget  bounds what workers print into the model log
bucket         a token bucket
"""
