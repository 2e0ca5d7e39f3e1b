"""Traces: spans made of the timelines of requests, and of what else the server did, and sent to a collector.

tracing   gives each request its place in a trace, and takes requests that have ended
sampling  which traces are kept
spans     a timeline as spans
exporter  a thread that sends spans, with a bounded queue
otlp      the exporters of OpenTelemetry's own libraries; imported only where traces are sent
"""
