"""The licence of every package that is installed: `make licences`."""

from importlib import metadata


def licence(package: metadata.PackageMetadata) -> str:
  """Return the licence in a package's metadata: SPDX expression, classifiers or text.

  Example:
    >>> licence(metadata.metadata("jaxscale"))
    'Apache-2.0'
  """
  if expression := package.get("License-Expression"):
    return expression
  classifiers = package.get_all("Classifier") or []
  named = [c.rpartition(" :: ")[2] for c in classifiers if c.startswith("License ::")]
  text = (package.get("License") or "").strip().partition("\n")[0]
  return ", ".join(named) or text or "unknown: see its files"


def main() -> None:
  """Print a line per package, sorted by name."""
  found = {d.metadata["Name"]: licence(d.metadata) for d in metadata.distributions()}
  width = max(map(len, found))
  for name in sorted(found, key=str.lower):
    print(f"{name:{width}}  {found[name]}")


if __name__ == "__main__":
  main()
