"""A step under the profiler: recording its trace, its tables, its findings."""
