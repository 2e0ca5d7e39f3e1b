"""Counts, and the pages and lines made of them.

counts              `VersionMetrics`, to which pools add
causes              why requests are refused or fail, and workers end: one table
server_metrics      `Metrics`, those of the whole server
page/               the Prometheus page: its families, and how it is written
scrapes             pages for those who ask, in short steps on the event loop
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
