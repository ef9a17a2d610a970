"""What installs jaxscale elsewhere: containers, recipes, profiles, workflows."""

import re
import subprocess
import tomllib

import pytest
import yaml

from jaxscale.launch import slurm_script
from jaxscale.launch.site import load_site
from support.job_script import RUN, fake
from support.paths import ROOT

PACKAGING = ROOT / "packaging"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EASYCONFIGS = sorted(PACKAGING.glob("easybuild/*.eb"))
MACHINES = "alps", "perlmutter", "lumi", "leonardo", "jupiter", "frontera", "vista"


def read(path):
  return (ROOT / path).read_text()


def specifiers(text):
  """A requirement as index and lock write it: the name, and bounds in any order."""
  name, bounds = re.fullmatch(r"([\w-]+)(.*)", text.lower().replace("_", "-")).groups()
  return name, *sorted(bounds.split(","))


@pytest.mark.parametrize("name", MACHINES)
def test_a_machines_profile_has_a_source_and_makes_a_script(name, tmp_path):
  path = f"launch/profiles/{name}.toml"
  assert re.search(r"^# Source: .*\n(# .*\n)*# Tried: ", read(path), re.M)
  script = slurm_script.render(RUN._replace(nodes=2, site=load_site(str(ROOT / path))))
  (tmp_path / "job").write_text(script)
  assert subprocess.run(["bash", "-n", tmp_path / "job"]).returncode == 0
  # TACC's Slurm rejects options for GPUs and memory.
  refused = "--gpus" in script or "--mem" in script
  assert refused == (name not in ("frontera", "vista"))


def test_the_containers_have_the_same_image_and_files():
  docker, apptainer = (
    read(f"packaging/containers/{name}") for name in ("Dockerfile", "jaxscale.def")
  )
  (image,) = set(re.findall(r"^(?:ARG|  ) ?BASE=(.+)$", docker + apptainer, re.M))
  assert re.fullmatch(r"nvcr\.io/nvidia/jax:\d\d\.\d\d-py3", image)
  copied = re.findall(r"^COPY (.+) /opt/jaxscale/", docker, re.M)
  files = re.search(r"^%files\n((?:  .+\n)+)", apptainer, re.M).group(1)
  listed = [line.split()[0] for line in files.splitlines()]
  assert sorted(" ".join(copied).split()) == sorted(listed)
  assert all((ROOT / name).exists() for name in listed)
  kept = {line[1:] for line in read(".dockerignore").splitlines() if line[0] == "!"}
  assert kept == set(listed)


def test_the_environment_of_alps_is_the_one_that_its_profile_names():
  text = read("packaging/containers/cscs.toml")
  edf = tomllib.loads(text)
  assert set(edf) == {"image", "mounts", "annotations"}
  (option,) = load_site(str(ROOT / "launch/profiles/alps.toml")).srun
  assert f"~/.edf/{option.removeprefix('--environment=')}.toml" in text


@pytest.mark.parametrize(
  ("before", "after", "code", "line"),
  [
    ("jax==0.10.2", "jax==0.10.2", 0, "jaxscale 0"),
    ("numpy==2.0", "", 2, "of this image has no jax"),
    ("jax==0.10.2", "jax==0.12.0", 1, "has replaced a part of the image's JAX"),
  ],
)
def test_an_images_own_jax_is_kept(tmp_path, before, after, code, line):
  """With a Python that answers for pip."""
  answers = f"""case "$*" in
    -V) echo Python 3.12 ;;
    *list*) [ -e "{tmp_path}/done" ] && echo {after} || echo {before} ;;
    *install*) echo "$@" >"{tmp_path}/done" ;;
    *) echo jaxscale 0 ;;
  esac"""
  fake(tmp_path / "bin" / "python", answers)
  done = subprocess.run(
    ["bash", PACKAGING / "containers" / "install.sh", "a.whl"], text=True,
    env={"PATH": "/usr/bin:/bin", "PYTHON": str(tmp_path / "bin" / "python")},
    capture_output=True,
  )  # fmt: skip
  assert (done.returncode, line in done.stdout + done.stderr) == (code, True), done
  if code != 2:
    assert re.search(r"--constraint \S+ a\.whl", (tmp_path / "done").read_text())


def test_an_easyconfig_has_what_is_pinned():
  pinned = dict(
    re.findall(
      r"^([\w.-]+==[^\s;]+)((?:.*\\\n)+.*)$", read("requirements/py313.txt"), re.M
    )
  )
  assert [path.name for path in EASYCONFIGS] == [
    f"jaxscale-{PROJECT['version']}-GCCcore-14.3.0{suffix}.eb"
    for suffix in ("-cuda12", "")
  ]
  for path in EASYCONFIGS:
    recipe, agreed = {}, 0
    exec(compile(path.read_text(), path, "exec"), recipe)
    *components, own = recipe["exts_list"]
    assert own[0] == recipe["name"] == "jaxscale"
    needed = {specifiers(text)[0] for text in PROJECT["dependencies"]}
    assert needed <= {name for name, _, _ in components}
    for name, version, options in components:
      (digest,) = options["checksums"]
      assert version in options["source_tmpl"], name
      if hashes := pinned.get(f"{name}=={version}"):
        assert f"sha256:{digest}" in hashes, name
        agreed += 1
    assert agreed > 50  # others were released between the two


def test_workflows_run_what_is_there():
  flows = {p.stem: p.read_text() for p in ROOT.glob(".github/workflows/*.yml")}
  assert set(flows) == {"tests", "docs", "publish"}
  for text in flows.values():
    for job in yaml.safe_load(text)["jobs"].values():
      assert job["timeout-minutes"] and job["steps"]
    for name in re.findall(r"(?:run: |bash )((?:packaging|\.ci)/\S+)", text):
      assert (ROOT / name).exists(), name
  pinned = {p.stem[2:] for p in ROOT.glob("requirements/py3??.txt")}
  jobs = yaml.safe_load(flows["tests"])["jobs"]
  tested = {
    version.replace(".", "")
    for version in jobs["wheel"]["strategy"]["matrix"]["python"]
  }
  assert tested == pinned
  oldest = re.search(r"sed -n '(s/\^  \"jax.*?/p)'", flows["tests"]).group(1)
  found = subprocess.run(
    ["sed", "-n", oldest, ROOT / "pyproject.toml"], capture_output=True, text=True
  )
  assert re.fullmatch(r"\d+\.\d+\.\d+\n", found.stdout), found
  for form in ("bug", "idea"):
    assert yaml.safe_load(read(f".github/ISSUE_TEMPLATE/{form}.yml"))["body"]


def test_versions_agree_and_scripts_are_read_by_bash():
  version = PROJECT["version"]
  assert yaml.safe_load(read("CITATION.cff"))["version"] == version
  (module,) = PACKAGING.glob("modules/jaxscale/*")
  assert module.name == version
  assert f"/apps/jaxscale/{version}\n" in module.read_text()
  assert yaml.safe_load(read("packaging/spack/spack.yaml"))["spack"]["specs"]
  for script in PACKAGING.rglob("*.sh"):
    assert subprocess.run(["bash", "-n", script]).returncode == 0
