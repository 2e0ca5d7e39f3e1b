"""A worker that preprocesses the next batch while one computes (`overlapPreprocess`, ADR 18).

ahead  the thread that reads the server's messages and preprocesses
turns  the main thread: the batches, one after the other, as the thread hands them over
"""
