"""Arms of comparisons: configs of the runs on the pages, which are not installed."""
