"""A step's plan as it is sent to the worker: parameters that several rows share are sent once."""

import msgspec
from msgspec.structs import replace

from lightkv.router.engine.step import StepPlan
from lightkv.router.sampling_params import SamplingParams

_LEFT_OUT = SamplingParams()  # is sent as an empty map


class PlanMessage(msgspec.Struct, frozen=True):
    """A plan whose new rows are sent without their parameters.

    Attributes:
        params: the parameters of the new rows, each once and without the texts that only the API process reads.
        params_of: for each new row the index of its parameters.
    """

    plan: StepPlan
    params: list[SamplingParams] = []
    params_of: list[int] = []

    @classmethod
    def of(cls, plan: StepPlan) -> "PlanMessage":
        """Returns the message of a plan. Rows share parameters where they have the same object."""
        if not plan.new_rows:
            return cls(plan)
        idx_of: dict[int, int] = {}  # id of the parameters → their index
        params: list[SamplingParams] = []
        params_of = []
        for new_row in plan.new_rows:
            idx = idx_of.setdefault(id(new_row.params), len(params))
            if idx == len(params):
                own = new_row.params
                params.append(replace(own, stop=()) if own.stop else own)
            params_of.append(idx)
        rows = [replace(new_row, params=_LEFT_OUT) for new_row in plan.new_rows]
        return cls(replace(plan, new_rows=rows), params, params_of)

    def whole(self) -> StepPlan:
        """Returns the plan. Raises ValueError where a row's parameters are missing."""
        if not self.plan.new_rows:
            return self.plan
        if not all(0 <= idx < len(self.params) for idx in self.params_of):
            raise ValueError(f"a plan names parameters {self.params_of}, and {len(self.params)} came with it")
        rows = [
            replace(new_row, params=self.params[idx])
            for new_row, idx in zip(self.plan.new_rows, self.params_of, strict=True)
        ]
        return replace(self.plan, new_rows=rows)
