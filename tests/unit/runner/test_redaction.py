"""What looks like a secret is written nowhere, by a run or by a refused command."""

import pytest

from runner.config import overrides
from runner.config.values import MARK, InvalidConfig, redacted, shown
from tests.support.command import results_in, run

SECRET = "Qs9fh37dkw0zX"
ALIKE = "hf_" + "a1B2" * 8


@pytest.mark.parametrize(
    ("value", "written"),
    [
        ({"AWS_SECRET_ACCESS_KEY": SECRET, "X": 1}, {"AWS_SECRET_ACCESS_KEY": MARK, "X": 1}),
        ({"DB_PASS": 12345, "a": [{"apiKey": SECRET}]}, {"DB_PASS": MARK, "a": [{"apiKey": MARK}]}),
        (f"launch.evn={{MY_TOKEN:{SECRET},B:2}}", f"launch.evn={{MY_TOKEN:{MARK}"),
        (f"my.password='two {SECRET}'", f"my.password={MARK}"),
        (f'{{"my_secret": "{SECRET}"}}', f'{{"my_secret": {MARK}'),
        (f"MY_TOKEN={MARK}: must be a text", f"MY_TOKEN={MARK}: must be a text"),
        (f"to http://user:{SECRET}@host:80/p and on", f"to http://{MARK}@host:80/p and on"),
        (f"https://u:a/{SECRET}@host", f"https://{MARK}@host"),
        (f"cloned with {ALIKE}.", f"cloned with {MARK}."),
        (f"[rank 0] -----BEGIN RSA PRIVATE KEY-----\n{SECRET}\n-----END RSA", f"[rank 0] {MARK} RSA"),
        (f"Authorization: Bearer {SECRET}", f"Authorization: {MARK}"),
        ([f"X=of-{ALIKE[::-1]}-variable"], [f"X=of-{MARK}-variable"]),
    ],
)
def test_the_value_of_a_secret_is_replaced(monkeypatch, value, written):
    monkeypatch.setenv("SOME_API_KEY", ALIKE[::-1])
    assert redacted(value) == redacted(written) == written


@pytest.mark.parametrize(
    "value",
    [
        {"key": "0a1b", "tokens_per_s": 3.0, "joules_per_token": 0.5, "token": 17, "MY_TOKEN": None},
        "kernel=auto tokens/s: 3, its key is 0, TOKENIZERS_PARALLELISM=false, launch.env.MY_TOKEN: stands here",
        "see https://host:80/path, mail a@b; the value of a variable such as false",
    ],
)
def test_what_is_no_secret_stays(monkeypatch, value):
    monkeypatch.setenv("TOKEN_CHECK", "false")
    assert redacted(value) == value


def test_a_message_has_no_part_of_a_secret_that_it_cuts_short():
    assert SECRET[-5:] not in shown(f"launch.evn={{MY_SECRET:{'x' * 100}{SECRET}}}")


QUICK = "phases=false baseline=none check.enabled=false timing.settle_ms=0"


def test_a_command_prints_and_leaves_no_secret(tmp_path):
    variables = {"MY_SECRET": SECRET, "TORCH_URL": f"http://u:{SECRET}@h"}
    seen = ["launch.env={X:${oc.env:MY_SECRET}}", "launch.endpoint=${oc.env:TORCH_URL}", "seq_len=128,-1"]
    done = run(tmp_path, QUICK, "-m", *seen, small=False, variables=variables)
    assert SECRET not in done.stdout + done.stderr and len(results_in(tmp_path)) == 2
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and SECRET.encode() in path.read_bytes()]


@pytest.mark.parametrize("text", [f"launch.evn={{MY_SECRET:{SECRET}}}", f"launch.env={{MY_SECRET:{SECRET}}}}}"])
def test_a_refused_override_shows_no_secret(text):
    with pytest.raises(InvalidConfig) as refused:
        overrides.jobs([text], False)
    assert SECRET not in str(refused.value)
