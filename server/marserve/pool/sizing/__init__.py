"""How many workers a version has, and when one is replaced.

autoscaler  decides how many there should be
scaling     looks, and gives the pool its workers
recycling   when a worker has served long enough
succession  replaces one, its replacement first
upkeep      looks at memory and age once a second
"""
