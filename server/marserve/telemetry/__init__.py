"""What the server process says about itself. Workers only send numbers and lines.

metrics/  what is counted, and the pages and lines made of it
logs/     the logs, bounded
"""
