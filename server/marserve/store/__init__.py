"""Finds archives by name or fetches them, never by a path that leads out of the store.

watching/    notices archives that are added, changed and removed
fetching/    fetches an archive to this machine, in parts, and caches it
sources/     the places: folder, HTTP, object stores, hubs
addresses/   reads addresses, and decides whether they may be used
hub_program  the former name of `sources/hub_program.py`
"""
