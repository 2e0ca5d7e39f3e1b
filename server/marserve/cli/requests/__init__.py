"""Commands about single requests.

explain  why a request took as long as it did
"""
