"""What ranks are forked with: all that they need is imported once, so that a rank is there as soon as it is forked.
Nothing here may touch a GPU or start a thread."""

import torch.fx.experimental.symbolic_shapes  # the first gradient imports it, and sympy with it: a second for each rank

import runner.job
import runner.launch.rank

__all__ = ["runner", "torch"]
