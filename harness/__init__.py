"""The run of many cases: cases, failed rows, reports, flags, environment and exit statuses."""
