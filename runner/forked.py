"""What an agent's fork server imports: all that a rank needs, so that a rank is there as soon as it is forked. Nothing here
may touch a GPU or start a thread."""

import runner.rank
import runner.worker
from runner.agent import die_with_parent

__all__ = ["runner"]

die_with_parent()  # the server itself, else the ranks that it forked would keep it
