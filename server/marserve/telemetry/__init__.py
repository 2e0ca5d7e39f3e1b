"""Metrics and logs of the server process. Workers only send numbers and lines.

metrics/  counts, and the pages and lines made of them
logs/     the logs, bounded

What follows single requests over time has its place here, beside the two.
"""
