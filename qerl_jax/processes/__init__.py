"""The processes of a run, on one host or several: how they connect, agree and end together."""
