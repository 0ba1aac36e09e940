"""Kineto traces: activities, collectives and how ranks wait for each other."""
