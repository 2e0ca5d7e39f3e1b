"""What moving from TorchServe asks for: a folder is read, nothing of it is run, and a report is made.

survey    the whole survey of one folder
layout    finds the pieces: settings, stores, scripts, snapshots
judges/   a file judges one sort of piece
overview  what the settings say that other pieces are judged by
volumes   which folders a container sees
findings  what a survey says
compare   two running servers, asked the same
"""
