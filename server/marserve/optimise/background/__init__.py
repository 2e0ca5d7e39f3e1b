"""The key `optimise`: builds are tried beside the version that serves, and the best one takes its place.

share      how long a family of processes has to pause, so that it keeps to a share of a core; pure
throttle   stops and continues the family of this process by that
order      what the server tells the process that searches, and what that answers
program    the process that searches
cache      what was found, in folders of the state folder
standing   how far the search for a version is, as describe and the dashboard show it
searching  one run of that process, from the server
background all searches of a server, and what becomes of them
"""
