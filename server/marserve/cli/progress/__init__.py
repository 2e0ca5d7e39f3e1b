"""Progress of a command that waits.

wait_progress  waits for a server and shows what happens there
downloads      the progress of a download, and its end
"""
