"""What does a sum lose in each number format, and what does this device's matrix unit keep?

    stepscope run accumulation

`sum` cases add the same small number again and again; `dot` cases multiply long rows on the device;
`square` cases square numbers near the ends of each format's range. None of them takes a second.
"""

from stepscope.studies.accumulation.cases import STUDY as STUDY
