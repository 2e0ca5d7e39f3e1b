"""Commands for one model of a running server.

register     register an archive
unregister   remove a model or version
swap         another archive in place of a version
scale        how many workers
bench        how fast it answers, beside another version too
load_target  where `bench` and `tune` send their requests, and what
tune         how batches are formed: as said, or as a search finds best
tuned_copy   a copy of a version without traffic, which the search loads
tune_search  what `tune --goal` shows, and what it applies
set_default  which version answers
models       list and describe
infer        send one file, print the answer
check        whether batches are answered as single requests are
watches      watched places, and a look at once
"""
