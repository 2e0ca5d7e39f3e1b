"""The logs: their files, what they take, and how they are written.

logs           server log, model log, access log, metric logs
access_log     a line a request
line_writer    takes lines at once, writes them from a thread
log_limit      how much clients get written into the server log
output_budget  how much of what workers print is taken
bucket         an allowance that fills with time
"""
