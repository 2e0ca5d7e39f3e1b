"""Commands for one model of a running server.

register     register an archive
unregister   remove a model or version
swap         another archive in place of a version
scale        how many workers
set_default  which version answers
models       list and describe
infer        send one file, print the answer
check        whether batches are answered as single requests are
watches      watched places, and a look at once
"""
