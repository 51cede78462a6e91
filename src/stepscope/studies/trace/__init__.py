"""A step under the profiler: recording and reading its trace, its tables, its findings."""
