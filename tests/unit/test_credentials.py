"""Secrets reach no file, log or error, and escape sequences of others no terminal."""

import contextlib
import json
import logging
import sys
from types import SimpleNamespace

import pytest

from jaxscale import cli, config
from jaxscale.cli import evaluate, export, generate
from jaxscale.config import record
from jaxscale.errors import ConfigError, hide_credentials, message_of, printable, user_message
from jaxscale.metrics import log, text
from jaxscale.run import provenance
from support.errors import config_error
from support.tables import table, words

SECRET = "5ecre7"
DROPPED = """TF_VAR_db_password TF_TOKEN_app_terraform_io JAXSCALE_SECRET JAX_API_KEY NCCL_AUTH
  JAXSCALE_MY_TOKEN XLA_credentials TPU_PRIVATE FI_PASSPHRASE TF_VAR_region TF_CLI_ARGS
  WANDB_API_KEY HF_TOKEN AWS_SECRET_ACCESS_KEY""".split()
KEPT = {
  "TF_CPP_MIN_LOG_LEVEL": "1",
  "TF_GPU_ALLOCATOR": "x",
  "XLA_FLAGS": "--xla_dump_to=gs://bucket/a@b",
  "NCCL_DEBUG": "WARN",
}


def test_variables_with_secrets_are_not_recorded(monkeypatch, tmp_path):
  for name in DROPPED:
    monkeypatch.setenv(name, SECRET)
  for name, value in KEPT.items():
    monkeypatch.setenv(name, value)
  monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", f"https://{SECRET}@host/a")
  monkeypatch.setattr(sys, "orig_argv", ["x", f"--config.a=http://me:{SECRET}@host/b?sig={SECRET}"])
  provenance.record_start(tmp_path, "8 x cpu")
  (line,) = (tmp_path / provenance.FILE).read_text().splitlines()
  assert SECRET not in line + json.dumps(provenance.environment())
  start = json.loads(line)
  assert start["variables"].items() >= KEPT.items()
  assert start["variables"]["JAX_COMPILATION_CACHE_DIR"] == "https://***@host/a"
  assert not {*DROPPED} & start["variables"].keys()
  assert "http://***@host/b?***" in start["command"]


HIDDEN = table(f"""
https://{SECRET}@host/a | https://***@host/a
HTTPS://{SECRET}@host | HTTPS://***@host
s3://me:{SECRET}@host/a | s3://***@host/a
postgresql://:{SECRET}@host/db | postgresql://***@host/db
https://host/a?b=1&X-Amz-Signature={SECRET}&c=2 | https://host/a?b=1&***&c=2
az://a?sv=1&sig={SECRET} | az://a?sv=1&***
a http://u:{SECRET}@h b | a http://***@h b
""")
SHOWN = words("""
gs://bucket/a@b https://host/@user abfs://container@account/a hdfs://user@host/a
https://host:80/a ssh://git@host/a https://host/a?design=1&monkey me@host file:///a/b:c@d
""")


@pytest.mark.parametrize("given, shown", HIDDEN)
def test_credentials_in_addresses_are_hidden(given, shown):
  assert hide_credentials(given) == shown
  assert message_of(OSError(given)) == shown
  assert user_message(ConfigError(given)).line == shown


@pytest.mark.parametrize("given", SHOWN)
def test_addresses_without_credentials_stay(given):
  assert hide_credentials(given) == given
  assert config.MLflow(uri=given).uri == given


@pytest.mark.parametrize("given", [row[0] for row in HIDDEN if "://" in row[0].split()[0]])
def test_settings_have_no_credentials(given):
  for make in (lambda: config.MLflow(uri=given), lambda: Remote(paths=("a", given))):
    with config_error("contains a user, password or token, which config.json would") as error:
      make()
    assert SECRET not in str(error.value)


class Remote(config.Data):
  paths: tuple[str, ...] = ()


EVIL = "\x1b]0;owned\x07\x9b2J\u202e\r"


def test_the_log_and_tables_escape_names_of_others(capsys):
  with log.shown():
    logging.getLogger("jaxscale").warning(f"class {EVIL}\n\tnext é\xa0")
  out = capsys.readouterr().out
  assert out == f"class {printable(EVIL)}\n\tnext é\xa0\n"
  assert text.table(["run"], [[EVIL]]).splitlines()[1] == printable(EVIL)
  assert all(c.isprintable() for c in printable(EVIL))
  record.print_note(f"{EVIL} is not used")
  assert capsys.readouterr().err == f"note: {printable(EVIL)} is not used\n"


@pytest.mark.parametrize("command", ["evaluate", "export", "generate", "transfer"])
def test_what_a_command_prints_about_a_run_is_escaped(command, tmp_path, monkeypatch, capsys):
  """Names of classes, tokens and texts come from files that others may have written."""
  monkeypatch.setenv("JAX_PLATFORMS", "cpu")  # `export` sets it, and it is restored
  monkeypatch.setattr(evaluate, "workdir_of", lambda args: tmp_path)
  monkeypatch.setattr(export, "workdir_of", lambda args: tmp_path)
  monkeypatch.setattr(generate, "workdir_of", lambda args: tmp_path)
  monkeypatch.setattr("jaxscale.run.export.export", lambda *_, **__: EVIL)
  monkeypatch.setattr("jaxscale.run.generate.write", lambda *_, **__: EVIL)
  described = SimpleNamespace(workdir=tmp_path)
  monkeypatch.setattr("jaxscale.config.loading.evaluated_config", lambda *_, **__: (described, 0))
  monkeypatch.setattr("jaxscale.run.session.open_session", lambda *_: contextlib.nullcontext())
  monkeypatch.setattr("jaxscale.run.predict.evaluate", lambda *_, **__: (EVIL, {}))
  monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
  monkeypatch.setattr("jaxscale.jobs.rate_transfer.report", lambda *_: EVIL)
  to = str(tmp_path / "a.safetensors")
  options = {"export": ["--to", to], "transfer": ["--config", "digits"]}.get(command, [])
  assert cli.main([command, "run", *options]) == 0
  assert capsys.readouterr().out == f"{printable(EVIL)}\n"
