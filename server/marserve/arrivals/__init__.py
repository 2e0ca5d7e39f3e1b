"""What becomes of archives that appear in a watched place.

watches        all watches of a server
arrivals       loads archives that came, by policy
arrival_names  which model and version an archive is
object_events  the events of object stores
"""
