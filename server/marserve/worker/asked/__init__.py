"""What the server asks the author's code beside requests, between two batches.

lengths  how long items are, by the author's `length_of`
health   whether the worker is well, by the author's `health`
"""
