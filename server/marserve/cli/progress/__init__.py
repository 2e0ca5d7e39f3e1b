"""Progress of a command that waits.

wait_progress  waits for a server and shows what happens there
registering    registers an archive, and shows how its workers load
uploads        sends an archive of this machine
downloads      the progress of a download, and its end
"""
