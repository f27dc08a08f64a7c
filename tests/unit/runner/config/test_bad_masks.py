"""Bad masks on the command line: one line with the value, the rule and a way out."""

import pytest

from runner.config import resolve
from runner.config.values import InvalidConfig, UnsupportedHere
from tests.support.cases import FORM
from tests.support.composing import composed

SIZE = ("config=tiny", "seq_len=64", "batch=1", "attention=ring", "world_size=1", "hardware=cpu")
WRONG = {
    "mask=documents mask.lengths=[30,30]": "lengths.*sums to 60, but the sequence has 64 tokens",
    "mask=documents mask.lengths=[65,-1]": r"lengths\[1\]=-1: must be at least 0",
    "mask=prefix_lm mask.prefix=65": "prefix=65: the sequence has 64 tokens",
    "mask=prefix_lm_documents mask.lengths=[60,4] mask.prefixes=[1,5]": r"prefixes\[1\]=5: document 1 has 4 tokens",
    "mask=global_window mask.window=4 mask.global_tokens=65": "global_tokens=65: the sequence has 64 tokens",
    "mask=chunked mask.chunk=0": "chunk=0: must be at least 1",
    "mask=rectangles mask.parts=[[[0,8],[0,8],[-1,0]],[[7,9],[0,4],[-1,-1]]]": "rectangles 0 and 1.*share",
    "mask=rectangles mask.parts=[]": "no query sees a key, so there is nothing to measure; give it a pair",
    "mask=sliding_window mask.left=-2": "left=-2: must be at least -1",
}


@pytest.mark.parametrize("given", WRONG)
def test_a_bad_mask_is_refused_in_one_line(given):
    cfg = composed(*SIZE, *given.split())
    with pytest.raises((InvalidConfig, UnsupportedHere), match=WRONG[given]) as error:
        resolve.experiment(cfg, 1 << 20, 0)
    assert FORM.fullmatch(str(error.value)), error.value


@pytest.mark.parametrize("given", ["mask=sliding_window mask.left=0", "window=[0,0]"])
def test_a_window_of_0_is_the_diagonal(given):
    assert resolve.experiment(composed(*SIZE, *given.split()), 1 << 20, 0).workload.pairs == 64
