"""What is there, and what to do next: `python -m jaxscale.cli.doctor [CHECK]`.

    python -m jaxscale.cli.doctor [--workdir DIR] [--config FILE] ...
                                          is this allocation ready for a job?
    python -m jaxscale.cli.doctor imagenet [--data_dir DIR | --folder DIR] ...
                                          is ImageNet there, and whole?

Without a check it is the preflight: start it as the job is started (a process a
node is enough), `srun python -m jaxscale.cli.doctor --workdir DIR --config FILE`.

Exit code 0: ready; 2: not ready, and the last lines say what to do.
"""

from __future__ import annotations

from jaxscale.config.validation import nearest
from jaxscale.errors import EXIT_DONE, ConfigError, leave, one_line_errors
from jaxscale.preflight.finding import report

CHECKS = {"imagenet": "ImageNet's 1.28 million training and 50,000 held-out images"}


@one_line_errors
def main(argv: list[str]) -> int:
  """The command line; returns the exit code."""
  if argv[:1] == ["imagenet"]:
    from jaxscale.preflight import (
      imagenet,  # TFDS and JAX, 2 s: only who asks for it waits
    )

    return report("imagenet", imagenet.check(argv[1:]))
  if argv and not argv[0].startswith("-"):
    raise ConfigError(f"{argv[0]}: no such check, {nearest(argv[0], CHECKS)}")
  from jaxscale import preflight

  if argv[:1] in (["-h"], ["--help"]):
    print((__doc__ or "").strip() + "\n\n" + preflight.help_text())
    return EXIT_DONE
  return preflight.main(argv)


if __name__ == "__main__":
  leave(main)
