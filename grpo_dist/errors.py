"""The exceptions that somebody catches. Each survives a trip between processes (pickle) with its message."""

from __future__ import annotations


class GrpoDistError(Exception):
    """Base of every error this package raises on purpose. ``exit_code`` is what the command line ends with."""

    exit_code = 1


class UserError(GrpoDistError):
    """The input is wrong: a recipe, a data row, a path, more workers than there is room for. No traceback."""

    exit_code = 2


class RecipeError(UserError):
    """The recipe cannot be used; the message lists every problem with its key and line."""


class DataError(UserError):
    """A data set cannot be used; the message names file, row, wanted and found."""


class CheckpointError(GrpoDistError):
    """No usable checkpoint, or one that could not be written; the message says which file and why."""


class WorkerLost(GrpoDistError):
    """A worker died or did not answer within its limit."""

    def __init__(self, role: str, name: str, why: str) -> None:
        super().__init__(role, name, why)
        self.role, self.name, self.why = role, name, why

    def __str__(self) -> str:
        return f"{self.role} worker {self.name} was lost: {self.why}"


class PublicationError(GrpoDistError):
    """New weights did not reach every engine, or did not arrive as they were sent."""


class SelfCheckError(GrpoDistError):
    """A start-up or per-step self-check failed: the numbers of this run cannot be trusted."""


class Interrupted(GrpoDistError):
    """The run was asked to stop and has saved; 130 after a person, 85 when a scheduler wants it requeued."""

    def __init__(self, message: str, exit_code: int = 130) -> None:
        super().__init__(message, exit_code)
        self.exit_code = exit_code

    def __str__(self) -> str:
        return str(self.args[0])
