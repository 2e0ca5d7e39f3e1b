"""Calls in which a client sends many requests, and gets their answers as they come.

infer_stream  `ModelStreamInfer` of the Open Inference Protocol
"""
