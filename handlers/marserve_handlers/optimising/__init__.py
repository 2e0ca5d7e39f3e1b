"""What makes a model faster, and shows that it stays the same. Runs in processes of commands, never in a server.

call_arrays  what a model is called with and gives, as named arrays
capture      keeps what goes into a handler's model, and runs it again
batches      the batches in which captured rows are run: alone, in twos, in full batches, beside a loud mate
"""

__all__: list[str] = []
