"""Canary releases: a version takes over step by step, unless it is worse.

rollouts    carries roll-outs out: reads counts, asks the judge, sets the traffic
course      the steps and the state of one roll-out
judge       decides: go on, hold, promote, or roll back
records     roll-outs kept on disk
schema      the former name of `desired_state/schema.py`
"""
