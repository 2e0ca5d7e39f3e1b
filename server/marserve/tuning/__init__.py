"""Measures a served model with its users' requests, and finds the options that suit it best.

payloads     the bodies that are sent
load         sends them, as fast as they are answered or when they are due, and notes each answer
percentiles  times of requests with what they show, by order statistics; pure
baseline     whether one build is slower than another beyond chance, from pairs in turns; pure
bench        the whole of a measurement: warm-up, load, turns with a baseline
"""
