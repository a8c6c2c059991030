"""Guards: checks that everything a captured forward depends on, besides its arguments, still holds."""

from rematplan.runtime.guards.call_key import call_key, check_modes, open_key
from rematplan.runtime.guards.finite_tests import OtherOutcome
from rematplan.runtime.guards.guard import Guard
from rematplan.runtime.guards.module_state import ModuleState, ModuleTree
from rematplan.runtime.guards.recording import python_state_restored, recording
from rematplan.runtime.guards.repeated_writes import store

__all__ = [
    "Guard",
    "ModuleState",
    "ModuleTree",
    "OtherOutcome",
    "call_key",
    "check_modes",
    "open_key",
    "python_state_restored",
    "recording",
    "store",
]
