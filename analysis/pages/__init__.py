"""The HTML page of report.py and its figures."""
