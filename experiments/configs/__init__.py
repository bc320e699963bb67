"""Configs of the measurements on the pages, which are not installed."""
