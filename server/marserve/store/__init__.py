"""Where archives come from: found by name or fetched, never by a path that leads out of the store.

watching/    notices archives that come, change and go
fetching/    brings an archive to this machine, in parts, and keeps it
sources/     the places: folder, HTTP, object stores, hubs
addresses/   what an address says, and whether it may be used
hub_program  the former name of `sources/hub_program.py`
"""
