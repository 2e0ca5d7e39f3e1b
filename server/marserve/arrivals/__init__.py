"""What becomes of archives that appear in a watched place.

watches        all watches of a server
arrivals       loads what came, by policy
arrival_names  which model and version an archive is
object_events  what an object store says happened
"""
