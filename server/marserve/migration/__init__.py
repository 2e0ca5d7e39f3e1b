"""What moving from TorchServe asks for: a folder of its user's is read, nothing of it is run, and a report is made.

`layout.py` finds the pieces (settings, stores, start scripts, snapshots), a file each judges one sort of them, and
`survey.py` puts their findings together. `compare.py` asks two running servers the same and compares the answers.
Knows no terminal; `marserve migrate` is the command.
"""
