"""Notices archives that are added, changed and removed.

watch           looks at one place, from time to time and after hints
sightings       what changed between two looks, and which files are complete
watched_folder  a folder as such a place
"""
