"""Commands for one model of a running server.

register     bring an archive into it
unregister   take a model or version out
swap         another archive in the place of a version
scale        how many workers
tune         how batches are formed
set_default  which version answers
models       list and describe
infer        send one file, print the answer
check        whether batches are answered as single requests are
watches      watched places, and looking now
"""
