"""What looks like a secret is written nowhere, by a run or by a refused command."""

import pytest

from runner.config.values import shown
from runner.output.record import Result
from runner.redaction import MARK, redacted
from runner.tracker import columns
from tests.support.command import only, results_in, run
from tests.support.recorded import measured

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


def test_a_tracker_gets_no_secret(tmp_path):
    value = measured("a") | {"environment": {"started_at": 1.0, "seconds": 1.0}, "reason": f"MY_TOKEN={SECRET}"}
    assert SECRET not in str(columns(Result.of(redacted(value), tmp_path)))


TINY = ("config=tiny", "hardware=cpu", "phases=false", "baseline=none", "check.enabled=false")
# the command, its environment, and its exit status
COMMANDS = {
    "refused variable": (["launch.env={MY_SECRET:${oc.env:MY_SECRET}}"], {"MY_SECRET": SECRET}, 2),
    "refused literally": ([f"launch.env={{MY_SECRET:{SECRET}}}"], {}, 2),
    "in a file": (["-cd", "{folder}", "-cn", "mine"], {}, 2),
    "misspelt key": ([f"launch.evn={{MY_SECRET:{SECRET}}}"], {}, 2),
    "no override": ([f"launch.env={{MY_SECRET:{SECRET}}}}}"], {}, 2),
    "sweep": (["-m", "seq_len=128,-1", f"+hydra.job.env_set={{MY_SECRET:{SECRET}}}"], {}, None),
    "other variable": (["launch.env={X:${oc.env:MY_SECRET}}"], {"MY_SECRET": SECRET}, 0),
    "url": (["tracker=mlflow", "tracker.uri=sqlite:///{folder}/mlflow.db", f"config=http://u:{SECRET}@h"], {}, 2),
    "copied": (["hydra.job.env_copy=[MY_SECRET,TORCH_URL]"], {"MY_SECRET": SECRET, "TORCH_URL": f"http://u:{SECRET}@h"}, 0),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("kind", COMMANDS)
def test_a_command_leaves_no_secret(tmp_path, kind):
    arguments, variables, status = COMMANDS[kind]
    folder, out = tmp_path / "given", tmp_path / "out"
    folder.mkdir()
    (folder / "mine.yaml").write_text(f"defaults: [config, _self_]\nlaunch: {{env: {{MY_SECRET: {SECRET}}}}}\n")
    arguments = [text.replace("{folder}", str(folder)) for text in arguments]
    done = run(out, *TINY, *arguments, variables=variables)
    assert status in (None, done.returncode), done.stderr
    assert SECRET not in done.stdout + done.stderr
    written = [path for path in out.rglob("*") if path.is_file()]
    assert results_in(out) and not [path for path in written if SECRET.encode() in path.read_bytes()]
    assert status != 0 or MARK in str(only(out))
