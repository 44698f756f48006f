"""A scheduler that can take many alike steps at once, so that a long trace is simulated in seconds."""

from array import array

from lightkv.router.engine.scheduler import Scheduler


class SteadyScheduler(Scheduler):
    """A scheduler for the simulator. While the same requests decode and no other can join them, the next steps
    differ in nothing but their number: `repeat` takes them at once."""

    @property
    def late_at(self) -> float:
        """The time after which another request will have waited too long; infinity where none will."""
        return self.waiting.late_at

    def steady_steps(self) -> int:
        """Returns how many of the next steps bring one token to each request that decodes and do nothing else,
        unless a request ends, is aborted or added, or has waited too long (`late_at`)."""
        if not self._decoding or self._in_flight or self._prefilling or self._finishing or self._failed:
            return 0
        steps = min([request.expected - len(request.output) for request in self._decoding.values()])
        if self.waiting and self.ledger.num_open < self.limits.max_num_seqs:
            steps = int(min(steps, max(self._retry_at - self.step, 0)))
        while steps > 0 and self._growth(steps) > self.ledger.num_available:
            steps //= 2
        return max(steps, 0)

    def repeat(self, count: int, token: int) -> None:
        """Takes `count` of these steps at once, in each of which every request gets `token`.

        The state is then the same as after as many plans and results. Raises ValueError for more than
        `steady_steps`.
        """
        if count > self.steady_steps():
            raise ValueError(f"{count} steps at once; {self.steady_steps()} are alike")
        decoding = self._decoding.values()
        self.ledger.extend([request.sequence for request in decoding], [count] * len(decoding))  # type: ignore[misc]
        self.ledger.drain()
        self.ledger.step += count
        tokens = array("i", [token]) * count
        for request in decoding:
            request.output += tokens
        self.num_output_tokens += count * len(decoding)
        self.peak_held = max(self.peak_held, self.ledger.num_held)

    def _growth(self, steps: int) -> int:
        """Returns the slots that `steps` tokens more for each decode take."""
        return self.ledger.growth([request.sequence for request in self._decoding.values()], steps)  # type: ignore[misc]
