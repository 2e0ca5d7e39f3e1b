"""What is counted, and the pages and lines made of it.

counts              `VersionMetrics`, to which pools add; the Prometheus page
measurements        what happens to requests, as TorchServe's metrics
metric_definitions  which metrics there are
series              a family of the page, fed by updates
histogram           how often values fell between bounds
handler_metrics     which values of handlers are kept
printed_metrics     metrics in what workers print
metric_line         the grammar of lines
metrics_log         metrics as lines of logs
"""
