// Live charts.
