"""Times steps of the router in one tree, for `alternate.py`, which runs this file in a process of each tree.

Everything that it imports is of the tree that comes first in PYTHONPATH, `router_step.py` among it. It reads
requests from stdin, a line of JSON each, and answers each by a line: a load is set up and answered with its
name, and a number of steps is taken and answered with the median µs of one.
"""

import gc
import json
import statistics
import sys

from bench.serving.router_step import ANY, WORTH_IT, Load, Router, name_of

RUNNING, QUEUED, PROMPT = 1000, 10_000, 64
WARM_UP = 400  # steps until what ends is evicted as fast as it is cached
MOST_STEPS = 10_000  # of one load


def main() -> None:
    gc.freeze()  # the router process has no torch, whose objects would be gone through again and again here
    router = None
    for line in sys.stdin:
        request = json.loads(line)
        if "steps" in request:
            assert router is not None
            router.measure(request["steps"])
            whole = [sum(parts) for parts in zip(*router.times.values(), strict=False)]
            answer = statistics.median(whole) / 1e3
        else:
            shared, sharing = PROMPT // 2 * request["shared"], ANY if request["grouped"] else WORTH_IT
            load = Load(RUNNING, QUEUED, PROMPT, shared, request["churn"], request["depth"], sharing)
            router = None  # its memory is freed before the next one is made
            gc.collect()
            router = Router(load, MOST_STEPS)
            router.measure(WARM_UP)
            answer = name_of(load)
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
