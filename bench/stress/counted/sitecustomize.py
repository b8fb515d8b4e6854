"""Python runs this at its start where the folder is on PYTHONPATH: the process counts its heap."""

from bench.stress.heap import begin_to_count

begin_to_count()
