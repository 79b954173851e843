"""The compiled simulator unpacks its records by position."""

from gdp.simulator import records


def test_fields_stand_as_unpacked() -> None:
    """A field moved in one place only would make two arrays change roles."""
    expected = {
        records.Arrays: "num_inputs sources tensor_offsets consumer_offsets consumers occupancy_ns "
        "route_rate latency_ns route_offsets route_channels tail_ns memory host_time_ns",
        records.MemoryArrays: "resident_bytes alloc_bytes owner owned_bytes copy_bytes producers "
        "input_offsets inputs input_producers residents readers",
        records.Readers: "frees_bytes lengths offsets producers owned_bytes copy_bytes ops list_of lone_reader",
        records.Dispatch: "rank op_of_rank successor_offsets successors order_offsets order_ops host_time_ns",
        records.Scratch: "waiting duration_ns bits0 bits1 bits2 lowest running until_ns remaining_ns channel_free_ns "
        "first_edge end_edge ready_ns following taken newest newest_ns soonest_ns heap_ns heap_item host_ns",
        records.ManyScratch: "missing ready_ns ready num_ready is_idle changed is_changed remaining_ns "
        "channel_free_ns destinations end_ns end_item heap_ns heap_item host_ns",
        records.Schedule: "finish_ns ops num_ops transfer_tensor transfer_route transfer_start_ns transfer_end_ns "
        "arrival_ns num_transfers begins start_ns",
        records.Memory: "freed_ns freed_by frees_bytes copied last_ns allocated_bytes used_bytes last_event "
        "event_before heap_ns heap_item peak_bytes",
        records.Workspace: "scratch schedule memory",
    }
    assert {record: list(record._fields) for record in expected} == {
        record: names.split() for record, names in expected.items()
    }
