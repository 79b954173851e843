"""The compiled simulator unpacks its records by position."""

from gdp.simulator import records


def test_fields_stand_in_the_order_in_which_the_engine_unpacks_them() -> None:
    """A field moved in one place only would make two arrays change roles."""
    expected = {
        records.Arrays: "num_inputs sources tensor_offsets consumer_offsets consumers occupancy_ns "
        "route_rate latency_ns route_offsets route_channels tail_ns memory",
        records.MemoryArrays: "resident_bytes alloc_bytes owner owned_bytes copy_bytes producers "
        "input_offsets inputs input_producers residents",
        records.Dispatch: "rank op_of_rank successor_offsets successors order_offsets order_ops",
        records.Scratch: "waiting duration_ns bits0 bits1 bits2 lowest running until_ns remaining_ns channel_free_ns "
        "last num_waiting heap_ns heap_item",
        records.ManyScratch: "missing ready num_ready is_idle changed is_changed remaining_ns channel_free_ns "
        "destinations last num_waiting end_ns end_item heap_ns heap_item",
        records.Schedule: "finish_ns ops num_ops transfer_tensor transfer_route transfer_start_ns transfer_end_ns "
        "arrival_ns first following num_transfers begins first_in next_in first_out next_out",
        records.Memory: "freed_ns freed_by op_frees_bytes transfer_frees_bytes last_there last_tensor heap_ns "
        "heap_item peak_bytes",
        records.Workspace: "scratch schedule memory",
    }
    assert {record: list(record._fields) for record in expected} == {
        record: names.split() for record, names in expected.items()
    }
