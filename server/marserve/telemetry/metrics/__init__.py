"""Counts, and the pages and lines made of them.

counts              `VersionMetrics`, to which pools add; the Prometheus page
measurements        events of requests, as TorchServe's metrics
metric_definitions  the metrics, TorchServe's list or the operator's
series              a family of the page that is fed update by update
windows             figures of the last 1, 5 and 60 minutes, and since the start
histogram           counts values between bounds
stages              histograms of the stages of requests
handler_metrics     decides which values of handlers are kept
printed_metrics     metrics in what workers print
metric_line         the syntax of lines
metrics_log         metrics as lines of logs
"""
