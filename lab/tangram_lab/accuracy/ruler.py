"""RULER's thirteen tasks on texts of our own (Hsieh et al., arXiv 2404.06654, Table 2, Appendix B).

One context may serve several questions of a kind; RULER's own comes first. The worked examples that
RULER puts before variable tracking and common words are left out.
"""

from __future__ import annotations

from tangram_lab.accuracy.documents import multi_hop, single_hop
from tangram_lab.accuracy.needles import NEEDLES
from tangram_lab.accuracy.sample import Task
from tangram_lab.accuracy.tracking import common_words, frequent_words, variable_tracking

TASKS: dict[str, Task] = {
    **NEEDLES,
    "vt": variable_tracking,
    "cwe": common_words,
    "fwe": frequent_words,
    "qa_1": single_hop,
    "qa_2": multi_hop,
}
