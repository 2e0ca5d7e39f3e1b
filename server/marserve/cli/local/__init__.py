"""Commands that need no server.

new      make a folder with a model to begin with, from one of the `templates`
archive  make a model archive
optimise try faster builds, and archive the best that is equal
export   the model in another format, in an archive of its own
compare  whether two archives answer alike, and how fast each is
debug    one request to an archive, on this terminal
fetch    bring archives into a folder
compared_words  what `compare`, `optimise` and `export` check before anything runs
hub      the model of a hub, for `archive` and `marserve run`
version  versions of this program and its runtimes
"""
