"""The engine unpacks its records by position."""

from gdp import engine


def test_fields_stand_in_the_order_in_which_the_engine_unpacks_them() -> None:
    """A field moved in one place only would make two arrays change roles."""
    expected = {
        engine.Arrays: "num_inputs sources tensor_offsets consumer_offsets consumers occupancy_ns "
        "route_rate latency_ns route_offsets route_channels tail_ns memory",
        engine.MemoryArrays: "resident_bytes alloc_bytes owner owned_bytes first_uses copy_bytes producers "
        "input_offsets inputs input_producers",
        engine.Scratch: "missing bits0 bits1 bits2 running until_ns remaining_ns next_in_order "
        "channel_free_ns transfers",
        engine.Transfers: "copy start_ns end_ns arrival_ns following last num_waiting heap_ns heap_item",
        engine.Memory: "limit_bytes usage_bytes peak_bytes uses copy_uses num_unstarted heap_ns heap_item",
    }
    assert {record: list(record._fields) for record in expected} == {
        record: names.split() for record, names in expected.items()
    }
