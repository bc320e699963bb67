"""Programs that are compiled before the first step, and the one cache of them.

operation.py         what is compiled: a function with its static arguments and its shapes
aot.py               lowers, compiles in threads, and loads what is in the cache
executable_cache.py  names and bytes of executables: a digest of all that they are made from
program_cache.py     folders of programs, that of the run and that for all runs; signatures
run_cache.py         which folders they are while a command runs
count.py             counts what is compiled after the first step

`training/compile.py` says which operations a run needs.
"""
