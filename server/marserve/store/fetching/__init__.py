"""Brings what an address names to a file of this machine, complete or not at all.

fetcher           judged, fetched or kept, verified
download          one object into a file, in parallel ranges
byte_ranges       which ranges in which order
download_list     which downloads there are, and how far
cache             keeps what was fetched, by its content
fetched_archives  which files of the model store were fetched
"""
