"""Commands that measure a model of a running server, and find what suits it.

bench        how fast it answers, beside another version too
load_target  where `bench` and `tune` send their requests, and what
grpc_target  the same over gRPC, and how a request body becomes a call
tune         how batches are formed: as said, or as a search finds best
tuned_copy   a copy of a version without traffic, which the search loads
tune_space   which settings the search tries
tune_search  what `tune --goal` shows, and what it applies
profile      how a worker spends its time while it serves
"""
