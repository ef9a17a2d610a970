"""Files as kills, full disks, editors and other users leave them."""

DEEP = b"[" * 100_000
HUGE = b"9" * 5_000
NO_JSON = {"empty": b"", "cut": b'{"config": {"model": {"cl', "deep": DEEP}
NO_JSON |= {"deep and whole": b'{"config":' * 500 + b"1" + b"}" * 500, "NUL": b'{"step": 1}\0'}
NO_JSON |= {"a number of 5,000 digits": b'{"step": ' + HUGE + b"}"}
NO_JSON |= {"no UTF-8": b'{"config": "\xff\xfe"}'}
OTHER_JSON = {"a list": b"[]", "null": b"null", "text": b'"text"', "a number": b"5"}
OTHER_JSON |= {"not a number": b"NaN", "an empty object": b"{}"}
EVERY = NO_JSON | OTHER_JSON


def put(path, content):
  """Damage a file: bytes replace it, None makes a directory of it."""
  path.parent.mkdir(exist_ok=True)
  if content is None:
    path.unlink(missing_ok=True)
    path.mkdir()
  else:
    path.write_bytes(content)
