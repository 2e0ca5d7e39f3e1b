"""Reports what a move from TorchServe needs, and imports from Triton: reads folders, and runs nothing of them.

survey    the whole survey of one folder
layout    finds the pieces: settings, stores, scripts, snapshots
judges/   a file judges one sort of piece
overview  the settings by which other pieces are judged
volumes   the folders that a container sees
findings  the results of a survey
compare   sends two running servers the same requests
triton/   imports a model repository of Triton's
"""
