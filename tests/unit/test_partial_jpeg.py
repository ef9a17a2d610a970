"""Crops that decode their box alone: the pixels and the damage of a whole decode."""

import functools
import io
import random
import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
import simplejpeg
from PIL import Image

from jaxscale.cli import main
from jaxscale.data import jpeg, partial_jpeg
from jaxscale.data.augment import crop_box, uniform
from support import fuzzing
from support.odd_images import jpeg_441, of_size
from support.paths import ROOT


def why_not() -> str:
  """Return what this machine lacks to build the library, without our own code."""
  if shutil.which("cc") is None:
    return "no C compiler"
  asked = "#include <stdio.h>\n#include <jpeglib.h>\n"
  done = subprocess.run(["cc", "-E", "-x", "c", "-"], input=asked, capture_output=True, text=True)
  return "no jpeglib.h (libjpeg-turbo's development files)" if done.returncode else ""


@pytest.fixture(scope="module")
def built(tmp_path_factory):
  """Build the library from the current source, and use it."""
  if reason := why_not():
    pytest.skip(reason)
  with pytest.MonkeyPatch.context() as patch:
    patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
    patch.delenv("CC", raising=False)
    path = partial_jpeg.build()
    partial_jpeg.library.cache_clear()
    assert partial_jpeg.library().decode is not None
    yield path
  partial_jpeg.library.cache_clear()


@pytest.fixture
def bare(tmp_path, monkeypatch):
  """Yield the package folder of a machine where nothing has been built."""
  monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
  partial_jpeg.library.cache_clear()
  yield tmp_path / "jaxscale"
  partial_jpeg.library.cache_clear()


def by_pillow(pixels, mode=None, kind="JPEG", **options):
  out = io.BytesIO()
  Image.fromarray(pixels).convert(mode).save(out, kind, quality=90, **options)
  return out.getvalue()


def by_turbo(kind):
  encode = functools.partial(simplejpeg.encode_jpeg, quality=90, colorsubsampling=kind)
  return lambda pixels: encode(np.ascontiguousarray(pixels))


KINDS = {
  **{s: by_turbo(s) for s in ("444", "422", "420", "440", "411")},
  "grey": lambda pixels: by_pillow(pixels[..., 0]),
  "progressive": lambda pixels: by_pillow(pixels, progressive=True),
  "restarts": lambda pixels: by_pillow(pixels, restart_marker_blocks=3),
  "RGB": lambda pixels: by_pillow(pixels, keep_rgb=True),
}


def whole(encoded, channels):
  """Return simplejpeg's pixels of the whole image, from which a crop would be cut."""
  space = "RGB" if channels == 3 else "GRAY"
  return simplejpeg.decode_jpeg(encoded, space, fastdct=True, fastupsample=True)


def boxes(height, width, number=25):
  """Yield the whole image, its corners and edges, and random boxes."""
  rng = np.random.default_rng(height * width)
  yield from [(0, 0, height, width), (height - 1, width - 1, 1, 1), (0, 0, 1, 1)]
  yield from [(height - 1, 0, 1, width), (0, width - 1, height, 1)]
  for _ in range(number):
    h, w = int(rng.integers(1, height + 1)), int(rng.integers(1, width + 1))
    top, left = rng.integers(0, height - h + 1), rng.integers(0, width - w + 1)
    yield int(top), int(left), h, w


def decode_box(data, box, channels):
  decode = partial_jpeg.library().decode
  assert decode is not None
  return decode(data, box, channels)


@pytest.mark.parametrize("kind", KINDS)
def test_a_box_has_the_pixels_of_a_whole_decode(built, photo, kind):
  for height, width in [(120, 150), (48, 64), (37, 53), (17, 9), (70, 3), (1, 1)]:
    encoded = KINDS[kind](photo[100 : 100 + height, 200 : 200 + width])
    for channels in (3, 1):
      expected = whole(encoded, channels)
      for top, left, h, w in boxes(height, width):
        box = decode_box(encoded, (top, left, h, w), channels)
        case = f"{kind} {height}x{width}, box {top, left, h, w}"
        np.testing.assert_array_equal(box, expected[top : top + h, left : left + w], case)


def test_views_are_the_same_and_no_whole_image_is_decoded(built, photo, monkeypatch):
  encoded = KINDS["420"](photo[:300])
  draws = uniform(0, np.arange(24))
  cut = lambda d, channels: jpeg.decode_view(encoded, 64, channels, d)[0]  # noqa: E731
  with monkeypatch.context() as patch:
    patch.setattr(jpeg, "decode", None)  # whoever calls it fails
    ours = [(cut(d, 3), cut(d, 1)) for d in draws]
    with ThreadPoolExecutor(4) as threads:
      threaded = list(threads.map(lambda d: cut(d, 3), draws))
  for (colours, grey), same, d in zip(ours, threaded, draws, strict=True):
    np.testing.assert_array_equal(colours, jpeg.view(whole(encoded, 3), 64, d))
    np.testing.assert_array_equal(grey, jpeg.view(whole(encoded, 1), 64, d))
    np.testing.assert_array_equal(colours, same)


def outcome(encoded, draws):
  """Return a stream's view and its kind, or nothing."""
  try:
    pixels, kind = jpeg.decode_view(encoded, 32, 3, draws)
  except ValueError:
    return "damaged"
  return kind, pixels.tobytes()


def harmed(encoded):
  """Yield a stream cut short, lengthened, and with bytes of its pixels overwritten."""
  start = encoded.index(b"\xff\xda")  # of the scan: sizes before it stay possible
  rng = np.random.default_rng(0)
  yield from [encoded[:n] for n in np.linspace(2, len(encoded) - 1, 12).astype(int)]
  yield from [encoded + b"\0" * 9, encoded[:-2], encoded[:-2] + b"\0\0", b"\xff\xd8"]
  yield encoded[:start] + b"\0\0\0" + encoded[start:]
  for at in np.linspace(start + 20, len(encoded) - 12, 60).astype(int):
    noise = rng.integers(0, 256, int(rng.integers(1, 9)), np.uint8).tobytes()
    yield encoded[:at] + noise + encoded[at + len(noise) :]


@pytest.mark.filterwarnings("ignore")  # Pillow has its own words for some of them
@pytest.mark.parametrize("kind", ["420", "444", "grey", "progressive", "restarts"])
def test_damage_is_the_same_with_the_library_and_without(built, photo, monkeypatch, kind):
  draws = uniform(3, np.arange(80))
  whole_file = KINDS[kind](photo[:90, :130])
  streams = [whole_file, *harmed(whole_file)]
  ours = [outcome(s, d) for s, d in zip(streams, draws, strict=False)]
  off = partial_jpeg.Library(None, "")
  monkeypatch.setattr(partial_jpeg, "library", lambda: off)
  plain = [outcome(s, d) for s, d in zip(streams, draws, strict=False)]
  assert {o if o == "damaged" else o[0] for o in ours} >= {"JPEG", "damaged"}
  for stream, got, expected in zip(streams, ours, plain, strict=True):
    if got != expected:  # an end, and damage before it that the crop is above of
      assert got[0] == "JPEG" and stream.endswith(b"\xff\xd9")
  assert sum(got == expected for got, expected in zip(ours, plain, strict=True)) > 40


def test_damage_below_the_box_does_no_harm(built, photo):
  encoded = KINDS["restarts"](photo[:128, :128])  # damage ends at the next restart
  half = (encoded.index(b"\xff\xda") + len(encoded)) // 2
  torn = encoded[:half] + b"\0" * 200 + encoded[half + 200 :]
  with pytest.raises(ValueError):
    whole(torn, 3)
  box = decode_box(torn, (0, 0, 32, 128), 3)
  np.testing.assert_array_equal(box, whole(encoded, 3)[:32])
  assert decode_box(torn, (0, 0, 128, 128), 3) is None
  assert decode_box(encoded[:-2], (0, 0, 8, 8), 3) is None  # no end


def test_what_is_not_for_it_is_left_alone(built, photo):
  small = photo[:40, :40]
  cmyk, png = by_pillow(small, "CMYK"), by_pillow(small, kind="PNG")
  for other in (cmyk, png, b"", b"\xff\xd8"):
    assert decode_box(other, (0, 0, 8, 8), 3) is None
  encoded = KINDS["420"](small)
  for box in [(0, 0, 41, 8), (33, 0, 8, 8), (0, 40, 1, 1), (0, 0, 0, 8), (-1, 0, 8, 8)]:
    assert decode_box(encoded, box, 3) is None
  view, kind = jpeg.decode_view(cmyk, 16, 3, uniform(0, np.arange(1))[0])
  assert kind == "CMYK" and view.shape == (16, 16, 3)


@pytest.fixture(scope="module")
def sanitized(tmp_path_factory):
  """Return a function that runs our C code, built with sanitizers, on a file of JPEGs."""
  if reason := why_not():
    pytest.skip(reason)
  program = tmp_path_factory.mktemp("sanitized") / "cases"
  sources = [str(partial_jpeg.SOURCE), str(ROOT / "tests/support/jpeg_cases.c")]
  flags = ["-g", "-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
  command = ["cc", *flags, *sources, "-o", str(program), "-ljpeg"]
  done = subprocess.run(command, capture_output=True, text=True)
  if "cannot find" in done.stderr:
    pytest.skip("no libasan or libubsan")
  assert done.returncode == 0, done.stderr

  def run(cases, short=0):
    parts = []
    for encoded, box, channels in cases:
      head = np.array([len(encoded), *box, channels, short], np.int32)
      parts += [head.tobytes(), encoded]
    (program.parent / "jpegs").write_bytes(b"".join(parts))
    command = [str(program), str(program.parent / "jpegs")]
    return subprocess.run(command, capture_output=True, text=True, errors="replace")

  return run


def size_of(encoded):
  """Height and width that a header says; None: it is not given to the C code."""
  try:
    if header := jpeg._jpeg_header(encoded, max_pixels=1 << 16):
      return header[:2]
  except ValueError:
    return None
  # Its subsampling has no name, as 4:4:1: our C code is to be sure of it all the same.
  sof = re.search(rb"\xff[\xc0-\xc2]..\x08(..)(..)", encoded, re.DOTALL)
  size = [int.from_bytes(n) for n in sof.groups()] if sof else [0, 0]
  return size if 0 < size[0] * size[1] <= 1 << 16 else None


def mutated(encoded, chance):
  """Return a stream cut short, or with changed bytes or additional markers."""
  found, scan = bytearray(fuzzing.edit(encoded, chance)), encoded.index(b"\xff\xda")
  values = [0, 1, 0x11, 0x14, 0x41, 0xFF, chance.randrange(256)]
  for _ in range(chance.randrange(4)):
    at = chance.randrange(len(found) + 1)
    match chance.randrange(3):
      case 0:
        found[at % scan : at % scan + 1] = bytes([chance.choice(values)])
      case 1:
        found[at : at + 1] = bytes([chance.choice(values)])
      case 2:
        found[at:at] = bytes([0xFF, chance.randrange(0xC0, 0x100)])
  # Without an end it is refused at once.
  return bytes(found) + b"\xff\xd9" * (chance.random() < 0.9)


def jpegs_to_mutate(photo):
  small = photo[:70, :90]
  wide = of_size(48, 64, progressive=True)
  return [make(small) for make in KINDS.values()] + [by_pillow(small, "CMYK"), jpeg_441(), wide]


def test_5000_mutated_jpegs_touch_no_memory_that_is_not_theirs(sanitized, photo):
  chance, wholes, cases = random.Random(0), jpegs_to_mutate(photo), []
  while len(cases) < 5000:
    encoded = mutated(chance.choice(wholes), chance)
    if size := size_of(encoded):
      draws = np.array([chance.random() for _ in range(64)])
      box = crop_box(*size, draws)
      if chance.random() < 0.1:  # whatever box: it is compared with the header
        box = [chance.choice([-(2**31), -1, 0, 1, 7, 64, 200]) for _ in range(4)]
      cases.append((encoded, box, chance.choice([1, 3])))
  done = sanitized(cases)
  assert done.returncode == 0, done.stderr[-5000:]
  decoded, damaged, refused = map(int, done.stdout.split())
  print(f"{decoded} decoded, {damaged} damaged, {refused} refused")
  assert decoded + damaged + refused == 5000
  assert min(decoded, damaged, refused) > 300


def test_the_search_finds_a_write_beyond_the_pixels(sanitized, photo):
  encoded = KINDS["444"](photo[:64, :64])
  assert sanitized([(encoded, (0, 0, 64, 64), 3)]).returncode == 0
  assert sanitized([(encoded, (0, 0, 64, 64), 3)], short=31 * 3 + 1).returncode != 0


# Building, and what is reported when it cannot be.


def test_the_command_builds_and_what_is_used_is_reported(bare, capsys, monkeypatch):
  if reason := why_not():
    pytest.skip(reason)
  monkeypatch.delenv("CC", raising=False)
  reported = partial_jpeg.library().text
  assert partial_jpeg.BUILD in reported and "not built" in reported
  partial_jpeg.library.cache_clear()
  assert main(["prepare", "jpeg"]) == 0
  (library,) = bare.iterdir()  # and nothing else is left there
  out = capsys.readouterr().out
  assert out.startswith(f"{library}: built\n") and "only the box" in out


def test_what_is_missing_is_reported_in_one_line(bare, tmp_path, capsys, monkeypatch):
  def complaint():
    assert main(["prepare", "jpeg"]) == 2
    line = capsys.readouterr().err
    assert line.startswith("error: ") and line.count("\n") == 1
    return line

  monkeypatch.setenv("CC", str(tmp_path / "no such cc"))
  assert "CC=" in complaint()
  compiler = tmp_path / "cc"
  no_library = "{ echo 'ld: cannot find -ljpeg' >&2; exit 1; }"
  for script, hint in (
    ("echo 'x.c:1: fatal error: jpeglib.h: No such file' >&2; exit 1", "turbo-dev"),
    ("echo '#define JPEG_LIB_VERSION 90'", "not libjpeg-turbo's"),
    ("echo 'cc: error: unknown option -fPIC' >&2; exit 1", "unknown option -fPIC"),
    (f"[ $1 = -E ] && echo '#define LIBJPEG_TURBO_VERSION 9.9' || {no_library}", "LDFLAGS"),
  ):
    compiler.write_text(f"#!/bin/sh\n{script}\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    assert hint in complaint()
  assert not list(bare.glob("*"))


def test_a_library_that_does_not_fit_is_not_used(bare, photo, monkeypatch):
  assert "not built" in partial_jpeg.library().text
  bare.mkdir()
  junk = bare / f"partial_jpeg-{partial_jpeg._key()}-9.9.so"
  junk.write_bytes(b"no library")
  partial_jpeg.library.cache_clear()
  found = partial_jpeg.library()
  assert found.decode is None and "does not load" in found.text
  other = SimpleNamespace(jaxscale_jpeg_box=lambda *args: 0)
  monkeypatch.setattr(partial_jpeg.ctypes, "CDLL", lambda path, mode: other)
  partial_jpeg.library.cache_clear()
  found = partial_jpeg.library()
  assert found.decode is None and "different pixels than simplejpeg" in found.text
  encoded, draws = KINDS["420"](photo), uniform(0, np.arange(1))[0]
  assert jpeg.decode_view(encoded, 16, 3, draws)[1] == "JPEG"
