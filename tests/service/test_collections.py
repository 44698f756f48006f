"""The router's process collects garbage without a look at every queued request."""

import gc

from lightkv.router.service.child_process import collect_seldom


def test_many_new_objects_cause_no_collection_of_all() -> None:
    before = gc.get_threshold()
    try:
        gc.collect()
        collect_seldom()
        collections = gc.get_stats()
        kept = [[i] for i in range(300_000)]
        later = gc.get_stats()
    finally:
        gc.set_threshold(*before)
    assert later[1]["collections"] > collections[1]["collections"]
    assert later[2]["collections"] == collections[2]["collections"]
    del kept
