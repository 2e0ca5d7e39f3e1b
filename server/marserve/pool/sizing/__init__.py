"""How many workers a version has, and when one is replaced.

autoscaler  decides how many there should be
scaling     observes a pool, and carries that decision out
recycling   when a worker has served long enough
succession  replaces a worker, its replacement first
upkeep      looks at memory and age once a second
"""
