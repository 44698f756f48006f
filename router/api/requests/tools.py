"""Tools and reasoning in OpenAI's requests."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from lightkv.router.sampling_params import Grammar, InvalidParams
from lightkv.router.text.tool_calls.closed_schema import closed_schema
from lightkv.router.text.tool_calls.constrained import required_schema, schema_text
from lightkv.router.text.tool_calls.json_call import NAME

MAX_TOOLS = 1024
NO_PARAMETERS = {"type": "object", "properties": {}}


class RequestPart(BaseModel):
    """A part of a request, checked as the request is."""

    model_config = ConfigDict(strict=True, extra="ignore")


class Function(RequestPart):
    """A function that the model may call. `parameters`: the JSON schema of its arguments, an object."""

    name: str = Field(pattern=f"^{NAME}$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = Field(
        None, description="Without effect: the arguments of a required or a named call follow the schema."
    )


class Tool(RequestPart):
    """One tool. Only functions are supported."""

    type: Literal["function"]
    function: Function


class FunctionName(RequestPart):
    """The name of a function."""

    name: str


class NamedTool(RequestPart):
    """The choice of one function."""

    type: Literal["function"] = "function"
    function: FunctionName


Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]


class ToolFields(BaseModel):
    """The fields of a chat that concern tools and reasoning."""

    tools: Annotated[list[Tool], Field(fail_fast=True, max_length=MAX_TOOLS)] | None = Field(
        None, description="Functions that the model may call."
    )
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = Field(
        None,
        description="auto lets the model choose (the default with tools), required makes it call some "
        "function, a name makes it call that one, and with none it does not see the tools.",
    )
    parallel_tool_calls: bool | None = Field(
        None, description="Whether an answer may have several calls; on by default."
    )
    reasoning_effort: Effort | None = Field(
        None, description="How long the model reasons, where its chat template knows that; none: not at all."
    )
    include_reasoning: bool | None = Field(
        None, description="Whether the answer has the model's reasoning; on by default."
    )

    def tool_use(self) -> "ToolUse | None":
        """Returns which functions the model may call, or None if it may call none. Raises InvalidParams."""
        given = [tool.function for tool in self.tools or ()]
        choice = self.tool_choice
        name = choice.function.name if isinstance(choice, NamedTool) else None
        if not given:
            if name is not None or choice == "required":
                raise InvalidParams("tool_choice", name or choice, "it together with tools")
            return None
        if choice == "none":
            return None
        names = [function.name for function in given]
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise InvalidParams("tools", f"two functions {twice}", "each function a name of its own")
        if name is not None and name not in names:
            raise InvalidParams("tool_choice", name, f"one of the functions, {', '.join(names)}"[:1000])
        return ToolUse(given, choice == "required", name, self.parallel_tool_calls is not False)


@dataclass(frozen=True)
class ToolUse:
    """How an answer may call functions. `is_required`: some call has to be made. `name`: the one function that
    has to be called."""

    functions: Sequence[Function]
    is_required: bool = False
    name: str | None = None
    is_parallel: bool = True

    @property
    def schemas(self) -> dict[str, Any]:
        """The JSON schema of each function's arguments."""
        return {function.name: function.parameters or NO_PARAMETERS for function in self.functions}

    @property
    def callable_schemas(self) -> dict[str, Any]:
        """Those of the functions that may be called, all or the named one, without properties that they do not
        list."""
        schemas = self.schemas
        names = schemas if self.name is None else [self.name]
        return {name: closed_schema(schemas[name]) for name in names}

    @property
    def described(self) -> list[dict[str, Any]]:
        """The tools as chat templates expect them."""
        return [
            {"type": "function", "function": function.model_dump(exclude_none=True, exclude={"strict"})}
            for function in self.functions
        ]

    @property
    def grammar(self) -> Grammar:
        """What an answer has to be that calls some function, or the named one. Raises RecursionError."""
        if self.name is not None:
            return Grammar("json_schema", schema_text(self.callable_schemas[self.name]))
        return Grammar("json_schema", required_schema(self.schemas, None if self.is_parallel else 1))
