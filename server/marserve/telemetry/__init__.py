"""Metrics and logs of the server process. Workers only send numbers and lines.

metrics/          counts, and the pages and lines made of them
logs/             the logs, bounded
traces/           spans, sent to a collector
trace_context     a trace's ids, as headers carry them
timeline          one request from its first byte to its last
recorder          keeps the timelines of the last requests, the slowest and the failed
recorder_file     the same in a file, which outlives the server
happenings        what else the server did, and when
collector_pauses  of the server's own collector, as happenings
body_samples      what some requests hold, in the log, for debugging
kept_requests     some requests with their bodies, to be run again
explanation       why a request took as long as it did
loop_lag          how late the event loop is, and when it stood still
loop_watch        a thread that logs what holds it
"""
