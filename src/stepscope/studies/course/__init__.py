"""Every problem of the CS336 systems assignments, and the document that answers it.

`problems.py` has the problems as data, `needs.py` the cases that answer them, `document.py` builds
the document from records. Pure: nothing here measures.
"""

from stepscope.studies.course.problem import EDITIONS, Edition, Part, Problem, Show
from stepscope.studies.course.problems import PROBLEMS, find_problems

__all__ = ["EDITIONS", "PROBLEMS", "Edition", "Part", "Problem", "Show", "find_problems"]
