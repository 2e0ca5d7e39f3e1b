"""Commands about single requests.

explain  why a request took as long as it did
replay   runs one again, with those that were in its batch
"""
