"""Fetches the object of an address into a file of this machine, complete or not at all.

fetcher           judges the address, fetches or uses the cache, verifies
download          one object into a file, in parallel ranges
byte_ranges       which ranges in which order
download_list     the downloads and their progress
prefixes          what lies below a prefix, as a folder that processes share
web_folders       what a folder of the web holds, by what its index names
cache             keeps fetched files by their content
fetched_archives  which files of the model store were fetched
"""
