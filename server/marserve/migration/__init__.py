"""Reports what a move from TorchServe needs: reads its folder, and runs nothing of it.

survey    the whole survey of one folder
layout    finds the pieces: settings, stores, scripts, snapshots
judges/   a file judges one sort of piece
overview  what the settings say that other pieces are judged by
volumes   which folders a container sees
findings  what a survey says
compare   two running servers, asked the same
"""
