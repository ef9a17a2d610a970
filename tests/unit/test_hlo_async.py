"""Forms of a TPU's collectives that are written for no single instruction."""

from jaxscale import hlo

GRID = {"replica": 2, "data": 4}
GATHER = """all-gather(%p), channel_id=1, replica_groups=[1,8]<=[8], dimensions={0}"""
CARRIED = f"""HloModule m, is_scheduled=true, num_partitions=8
%begin (p: u8[100]) -> u8[800] {{
  %p = u8[100]{{0}} parameter(0)
  %g = u8[800]{{0}} {GATHER}
  ROOT %c = u8[800]{{0}} custom-call(%g), custom_call_target="AsyncCollectiveStart"
}}
%carry (p: u8[100]) -> u8[800] {{
  %p = u8[100]{{0}} parameter(0)
  ROOT %g = u8[800]{{0}} {GATHER}
}}
%end (p: u8[100]) -> u8[800] {{
  %p = u8[100]{{0}} parameter(0)
  %g = u8[800]{{0}} {GATHER}
  ROOT %c = u8[800]{{0}} custom-call(%g), custom_call_target="AsyncCollectiveDone"
}}
%body (b: u8[100]) -> u8[100] {{
  %b = u8[100]{{0}} parameter(0)
  %f = u8[800]{{0}} fusion(%b), kind=kCustom, calls=%carry
  ROOT %r = u8[100]{{0}} copy(%b)
}}
%ask (a: u8[100]) -> pred[] {{
  %a = u8[100]{{0}} parameter(0)
  ROOT %t = pred[] constant(true)
}}
ENTRY %m (x: u8[100]) -> u8[800] {{
  %x = u8[100]{{0}} parameter(0)
  %s = u8[800]{{0}} fusion(%x), kind=kCustom, calls=%begin
  %w = u8[100]{{0}} while(%x), condition=%ask, body=%body, \
backend_config={{"known_trip_count":{{"n":"5"}}}}
  ROOT %d = u8[800]{{0}} fusion(%w), kind=kCustom, calls=%end
}}"""


def rows(table):
  return [(r.kind, r.axes, r.times, r.payload_bytes, r.wire_bytes) for r in table]


def test_what_a_loop_carries_on_is_counted_once():
  """Begun before the loop, ended behind it, and in it a part of each turn's fusion."""
  (gather,) = hlo.collectives(CARRIED, GRID)
  assert rows([gather]) == [("all-gather", ("replica", "data"), 1, 800, 700)]
  assert gather.is_async and (gather.overlap or 0) > 0.5


def test_what_a_loop_begins_itself_is_counted_each_time():
  text = CARRIED.replace("calls=%carry", "calls=%begin")
  assert [r.times for r in hlo.collectives(text, GRID)] == [1, 5]


def test_an_all_to_all_over_slices_goes_to_each_device():
  """The host carries also what stays in the slice: 7 of 8 parts."""
  whole = """HloModule m, is_scheduled=true, num_partitions=4
  ENTRY %m (p: u16[8,100]) -> u16[8,100] {
    %p = u16[8,100]{1,0} parameter(0)
    %t = token[] after-all()
    %s = (u16[8,100]{1,0}, u32[], token[]) send(%p, %t), is_host_transfer=true, """
  whole += """frontend_attributes={_xla_host_transfer_rendezvous="a_0",\
_xla_megascale_target={{100000,100001,100002,100003,200000,200001,200002,200003}},\
_xla_megascale_transfer_type="ALL_TO_ALL"}
    ROOT %r = u16[8,100]{1,0} copy(%p)
  }"""
  (sent,) = hlo.collectives(whole, GRID)
  assert rows([sent]) == [("all-to-all", ("replica", "data"), 1, 1600, 1400)]
