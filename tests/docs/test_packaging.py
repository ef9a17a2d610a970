"""Files that install jaxscale elsewhere: containers, recipes, profiles, workflows."""

import re
import tomllib

import pytest
import yaml

from jaxscale import __version__
from jaxscale.jobs import slurm_executor
from jaxscale.jobs.site import load_site
from support.commands import run
from support.job_script import RUN, fake
from support.paths import ROOT

PACKAGING = ROOT / "packaging"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EASYCONFIGS = sorted(PACKAGING.glob("easybuild/*.eb"))
MACHINES = "alps", "perlmutter", "lumi", "leonardo", "jupiter", "frontera", "vista"


def read(path):
  return (ROOT / path).read_text()


@pytest.mark.parametrize("name", MACHINES)
def test_a_machines_profile_makes_a_script(name, tmp_path):
  path = f"launch/profiles/{name}.toml"
  script = slurm_executor.render(RUN._replace(nodes=2, site=load_site(str(ROOT / path))))
  (tmp_path / "job").write_text(script)
  assert run("bash", "-n", tmp_path / "job").returncode == 0
  # TACC's Slurm rejects options for GPUs and memory.
  refused = "--gpus" in script or "--mem" in script
  assert refused == (name not in ("frontera", "vista"))


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
  env = {"PATH": "/usr/bin:/bin", "PYTHON": f"{tmp_path}/bin/python"}
  done = run("bash", "packaging/containers/install.sh", "a.whl", **env)
  assert (done.returncode, line in done.stdout + done.stderr) == (code, True), done
  if code != 2:
    assert re.search(r"--constraint \S+ a\.whl", (tmp_path / "done").read_text())


def test_the_containers_have_the_same_image_and_files():
  docker, apptainer = (read(f"packaging/containers/{x}") for x in ("Dockerfile", "jaxscale.def"))
  (image,) = set(re.findall(r"^(?:ARG|  ) ?BASE=(.+)$", docker + apptainer, re.M))
  assert re.fullmatch(r"nvcr\.io/nvidia/jax:\d\d\.\d\d-py3", image)
  copied = " ".join(re.findall(r"^COPY (.+) /opt/jaxscale/", docker, re.M)).split()
  listed = re.findall(r"^  (\S+) /opt/jaxscale/\S+$", apptainer, re.M)
  kept = [line[1:] for line in read(".dockerignore").splitlines() if line[0] == "!"]
  assert sorted(copied) == sorted(listed) == sorted(kept)
  assert all((ROOT / name).exists() for name in listed)


def test_an_easyconfig_has_what_is_pinned():
  pinned = dict(
    re.findall(r"^([\w.-]+==[^\s;]+)((?:.*\\\n)+.*)$", read("requirements/py313.txt"), re.M)
  )
  assert [path.name for path in EASYCONFIGS] == [
    f"jaxscale-{__version__}-GCCcore-14.3.0{suffix}.eb" for suffix in ("-cuda12", "")
  ]
  for path in EASYCONFIGS:
    recipe, agreed = {}, 0
    exec(compile(path.read_text(), path, "exec"), recipe)
    *components, own = recipe["exts_list"]
    assert own[0] == recipe["name"] == "jaxscale"
    needed = {re.match(r"[\w-]+", text)[0].lower() for text in PROJECT["dependencies"]}
    named = {name.lower() for name, _, _ in components}
    assert {name.replace("_", "-") for name in needed} <= {x.replace("_", "-") for x in named}
    for name, version, options in components:
      (digest,) = options["checksums"]
      assert version in options["source_tmpl"], name
      if hashes := pinned.get(f"{name}=={version}"):
        assert f"sha256:{digest}" in hashes, name
        agreed += 1
    assert agreed > 50  # others were released between the two


def test_workflows_run_files_and_versions_that_exist():
  flows = {p.stem: p.read_text() for p in ROOT.glob(".github/workflows/*.yml")}
  for text in flows.values():
    for name in re.findall(r"(?:run: |bash )((?:packaging|\.ci)/\S+)", text):
      assert (ROOT / name).exists(), name
  wheel = yaml.safe_load(flows["tests"])["jobs"]["wheel"]
  tested = {v.replace(".", "") for v in wheel["strategy"]["matrix"]["python"]}
  assert tested == {p.stem[2:] for p in ROOT.glob("requirements/py3??.txt")}
  oldest = re.search(r"sed -n '(s/\^  \"jax.*?/p)'", flows["tests"]).group(1)
  found = run("sed", "-n", oldest, "pyproject.toml")
  assert re.fullmatch(r"\d+\.\d+\.\d+\n", found.stdout), found


def test_what_workflows_use_cannot_be_moved_to_other_code():
  """A tag or branch of an action can; a commit cannot."""
  flows = {p.stem: p.read_text() for p in ROOT.glob(".github/workflows/*.yml")}
  uses = [line for text in flows.values() for line in re.findall(r"uses: (.*)", text)]
  assert len(uses) > 10
  for line in uses:
    assert re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}  # v\d+\.\d+\.\d+", line), line
  assert len({line.split("@")[0] for line in uses}) == len({*uses})  # one version of each


def test_a_release_is_built_where_no_other_package_has_run():
  jobs = yaml.safe_load(read(".github/workflows/publish.yml"))["jobs"]
  commands = {name: [s.get("run", "") for s in job["steps"]] for name, job in jobs.items()}
  assert any("try_wheel.sh" in x for x in commands["try"])
  installs = [x for x in commands["build"] if "pip" in x or "try_wheel" in x]
  assert installs == ["pip install --require-hashes -r requirements/build.txt"]
  assert jobs["publish"]["needs"] == ["try", "build"]
  assert jobs["publish"]["permissions"] == {"id-token": "write"}
  assert not any("run" in step for step in jobs["publish"]["steps"])
  assert all("permissions" not in jobs[name] for name in ("try", "build"))


def test_versions_agree_and_scripts_are_read_by_bash():
  assert yaml.safe_load(read("CITATION.cff"))["version"] == __version__
  (module,) = PACKAGING.glob("modules/jaxscale/*")
  assert module.name == __version__
  assert f"/apps/jaxscale/{__version__}\n" in module.read_text()
  assert yaml.safe_load(read("packaging/spack/spack.yaml"))["spack"]["specs"]
  for script in PACKAGING.rglob("*.sh"):
    assert run("bash", "-n", script).returncode == 0
