"""Loads archives that appear in a watched place.

watches        all watches of a server
arrivals       loads new archives, by policy
arrival_names  the model and version of an archive
object_events  the events of object stores
"""
