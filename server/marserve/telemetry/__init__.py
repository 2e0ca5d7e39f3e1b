"""Metrics and logs of the server process. Workers only send numbers and lines.

metrics/  what is counted, and the pages and lines made of it
logs/     the logs, bounded
"""
