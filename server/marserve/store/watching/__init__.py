"""Notices archives that come, change and go.

watch           looks at one place, from time to time and when told
sightings       what changed between two looks, and what is finished
watched_folder  a folder as such a place
"""
