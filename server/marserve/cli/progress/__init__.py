"""What a command shows while it waits.

wait_progress  waits for a server while showing what happens there
downloads      how far a download is, and ending it
"""
