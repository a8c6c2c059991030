"""What code does with a value that it has just loaded, read off its bytecode until the value has left the stack.

A forward that only counts its calls, or appends to a list, does not depend on them. Instructions outside of the
tables below reveal the value.
"""

from __future__ import annotations

import dis
from collections.abc import Iterator, Sequence
from functools import cache
from types import CodeType
from typing import Any

READ = "read"
"""The use may reveal the value."""
COUNTED = "counted"
"""The value is only an operand of arithmetic with numbers, of comparisons and of truth tests, or is stored back."""
TESTED = "tested"
"""The value is only compared with None by ``is``."""
KEYED = "keyed"
"""The value is a dictionary, and the use looks up one key in it, by ``in``, ``[key]``, ``get`` or ``setdefault``."""
WRITERS = frozenset({"append", "appendleft", "extend", "extendleft", "add", "update", "clear", "__setitem__"})
"""Methods of containers that return nothing and whose effect does not depend on what the container has. They are uses,
too, under their names, like `ITEM`."""
ITEM = "[]="
"""The value is a container, and the use stores an item in it."""

_LOOKUPS = frozenset({"get", "setdefault"})
_LOADS = {
    "LOAD_GLOBAL": "STORE_GLOBAL",
    "LOAD_NAME": "STORE_NAME",
    "LOAD_DEREF": "STORE_DEREF",
    "LOAD_ATTR": "STORE_ATTR",
    "LOAD_FAST": "STORE_FAST",
}
_OTHER_LOADS = frozenset(n for n in dis.opmap if "LOAD_" in n) - {*_LOADS, "LOAD_CONST", "LOAD_CLOSURE"}
_VALUE, _OTHER, _CONSTANT, _OWNER, _METHOD = "value", "other", "constant", "owner", "method"
_NOTHING = frozenset({"CACHE", "EXTENDED_ARG", "NOP", "PRECALL", "RESUME", "KW_NAMES", "NOT_TAKEN"})
_PUSHES = frozenset({"LOAD_FAST", "LOAD_FAST_BORROW", "LOAD_FAST_CHECK", "LOAD_DEREF", "LOAD_NAME"})
_CONSTANTS = frozenset({"LOAD_CONST", "LOAD_SMALL_INT"})
_NONE_JUMPS = frozenset(n for n in dis.opmap if n.endswith(("_IF_NONE", "_IF_NOT_NONE")))
_POPS = {
    "BINARY_SUBSCR": 2,
    "BINARY_SLICE": 3,
    "UNARY_NEGATIVE": 1,
    "UNARY_NOT": 1,
    "UNARY_INVERT": 1,
    "TO_BOOL": 1,
}
"""How many values an instruction replaces by one."""
_BUILDS = {"BUILD_TUPLE": 1, "BUILD_LIST": 1, "BUILD_STRING": 1, "BUILD_SLICE": 1, "BUILD_MAP": 2}
"""How many values an instruction takes for each number of its argument."""


@cache
def uses_of(code: CodeType, name: str) -> tuple[str, ...]:
    """Return the uses (`use_of`) of all loads of a variable, parameter, cell or attribute ``name`` in a code object and
    its nested functions. A string constant equal to the name is a `READ`."""
    found = [
        use_of(code, i.offset, name) for i in _instructions(code) if _LOADS.get(i.opname) and i.argval == name
    ]
    # Some load two variables.
    found += [READ for i in _instructions(code) if i.opname in _OTHER_LOADS and name in _names_of(i)]
    found += [READ for constant in code.co_consts if isinstance(constant, str) and constant == name]
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            found += uses_of(constant, name)
    return tuple(found)


@cache
def use_of(code: CodeType, offset: int, name: str) -> str:
    """Return what code does with the value that it loads by ``name`` at ``offset``: `READ`, `COUNTED`, `TESTED`,
    `KEYED`, `ITEM` or one of `WRITERS`. If it loads no such value there, `READ`."""
    instructions = _instructions(code)
    at = next((k for k, i in enumerate(instructions) if i.offset == offset), None)
    if at is None or instructions[at].opname not in _LOADS or instructions[at].argval != name:
        return READ
    load = instructions[at]
    owner = _owner(instructions, at) if load.opname == "LOAD_ATTR" else _OTHER
    if _is_method(load):
        return READ
    stack = [_OTHER] * 4 + [owner, _VALUE] if owner == _OWNER else [_OTHER] * 5 + [_VALUE]
    return _followed(instructions, at, owner, stack)


def _followed(code: tuple[dis.Instruction, ...], at: int, owner: str, stack: list[str]) -> str:
    """Return how code uses a value, like `use_of`, by following it through the instructions after number ``at``, which
    loads it; `READ` at a jump's target or an unknown instruction. ``stack``: symbols of the values on the stack, which
    this changes. ``owner``: the symbol of the object whose attribute is loaded."""
    before = load = code[at]
    rest = code[at + 1 :]
    for i in rest:
        name, last, before = i.opname, before, i
        if name in _NOTHING:
            before = last
            continue
        if i.is_jump_target:
            return READ
        if name in _NONE_JUMPS and stack[-1] == _VALUE and _VALUE not in stack[:-1]:
            return TESTED
        if name == "IS_OP" and stack[-2] == _VALUE and last.opname in _CONSTANTS and last.argval is None:
            return READ if _VALUE in (*stack[:-2], stack[-1]) else TESTED
        if name == "STORE_SUBSCR" and stack[-2] == _VALUE and _VALUE not in (stack[-1], stack[-3]):
            return ITEM
        if name == "STORE_FAST" and load.opname != "LOAD_FAST" and stack[-1] == _VALUE:
            return _use_of_local(code, i.argval) if stack.count(_VALUE) == 1 else READ
        if name == "CONTAINS_OP" and stack[-1] == _VALUE and _VALUE not in stack[:-1]:
            return KEYED
        if _is_subscript(i) and stack[-2] == _VALUE and stack.count(_VALUE) == 1:
            return KEYED
        if name in ("LOAD_METHOD", "LOAD_ATTR") and stack[-1] == _VALUE:
            return _method_use(rest, i, stack)
        if name == _LOADS[load.opname] and i.argval == load.argval:
            # A store of an attribute takes two symbols: for `self.n += 1` the value, and above it a copy of `self`.
            stored = -1 if owner == _OTHER else -2
            if owner != _OTHER and stack[-1] not in (_OWNER, owner):
                return READ
            taken = stack[stored:]
            del stack[stored:]
            if taken[0] == _VALUE and _VALUE not in stack:
                return COUNTED
            return READ
        if not _apply(i, stack):
            return READ
        if _VALUE not in stack:
            return COUNTED
    return READ


def _use_of_local(code: tuple[dis.Instruction, ...], name: str) -> str:
    """Return how ``code`` uses a dictionary that it stores in a local variable: `KEYED` if all loads of the variable
    only look up single keys or store items, else `READ`."""
    # An attribute may have the name of the variable, as in `cache = self.cache`.
    loads = [k for k, i in enumerate(code) if "LOAD_FAST" in i.opname and name in _names_of(i)]
    plain = all(code[k].opname == "LOAD_FAST" for k in loads)
    uses = {_followed(code, k, _OTHER, [_OTHER] * 5 + [_VALUE]) for k in loads if plain}
    return KEYED if KEYED in uses <= {KEYED, ITEM} else READ


def _names_of(i: dis.Instruction) -> tuple[Any, ...]:
    return i.argval if isinstance(i.argval, tuple) else (i.argval,)


def _method_use(rest: tuple[dis.Instruction, ...], load: dis.Instruction, stack: Sequence[str]) -> str:
    """Return how code uses a value whose method or attribute it loads by the instruction ``load`` in ``rest``."""
    if load.argval in WRITERS and _is_dropped(rest, load):
        return str(load.argval)
    called = load.opname == "LOAD_METHOD" or _is_method(load)
    return KEYED if called and load.argval in _LOOKUPS and _VALUE not in stack[:-1] else READ


def _is_subscript(i: dis.Instruction) -> bool:
    """Return whether an instruction computes ``a[b]``, which is a binary operation from Python 3.14 on."""
    return i.opname == "BINARY_SUBSCR" or (i.opname == "BINARY_OP" and i.argrepr == "[]")


def _apply(i: dis.Instruction, stack: list[str]) -> bool:
    """Apply an instruction to the symbols on the stack. Return False if it is unknown, or may reveal the value."""
    name = i.opname
    if name in _PUSHES:
        stack.append(f"{name}:{i.argval}")
    elif name == "LOAD_GLOBAL":
        stack += [_OTHER] * (1 + (i.arg or 0) % 2)
    elif name in _CONSTANTS:
        stack.append(_CONSTANT)
    elif name == "COPY":
        copied = stack[-(i.arg or 1)]
        stack.append(copied)
    elif name == "SWAP":
        at = -(i.arg or 1)
        stack[at], stack[-1] = stack[-1], stack[at]
    elif name == "BINARY_OP" and not _is_subscript(i):
        return _combined(stack)
    elif name == "COMPARE_OP":
        right, left = stack.pop(), stack.pop()
        stack.append(_OTHER)
        return left == _VALUE or (right == _VALUE and left == _CONSTANT) or _VALUE not in (left, right)
    elif name in (
        "POP_JUMP_FORWARD_IF_FALSE",
        "POP_JUMP_FORWARD_IF_TRUE",
        "POP_JUMP_IF_FALSE",
        "POP_JUMP_IF_TRUE",
    ):
        stack.pop()
        return _VALUE not in stack
    elif name in ("TO_BOOL", "UNARY_NOT"):
        stack[-1] = _OTHER
    elif name in _POPS or _is_subscript(i):
        return _replaced(stack, _POPS.get(name, 2))
    elif name in _BUILDS:
        return _replaced(stack, (i.arg or 0) * _BUILDS[name])
    elif name == "FORMAT_VALUE":
        return _replaced(stack, 1 + bool((i.arg or 0) & 4))  # the format
    elif name in ("LOAD_METHOD", "LOAD_ATTR"):
        stack[-1] = _OTHER
        stack += [_OTHER] * (name == "LOAD_METHOD" or _is_method(i))
    elif name == "CALL":
        return _replaced(stack, 2 + (i.arg or 0))
    else:
        return False
    return True


def _replaced(stack: list[str], count: int) -> bool:
    """Put one other value in the place of the uppermost ``count``; return whether the followed one is not of them."""
    taken = stack[len(stack) - count :]
    stack[len(stack) - count :] = [_OTHER]
    return _VALUE not in taken


def _combined(stack: list[str]) -> bool:
    """Apply a binary operation, and return whether the value can be followed: on the right only if the left is a
    constant or the value too."""
    right, left = stack.pop(), stack.pop()
    # A tensor on the left would not say that it reads the number.
    stack.append(_VALUE if _VALUE in (left, right) else _OTHER)
    return left in (_VALUE, _CONSTANT) or right != _VALUE


def _is_dropped(rest: tuple[dis.Instruction, ...], method: dis.Instruction) -> bool:
    """Return whether a loaded method is called without keywords and its result, None, is dropped or returned."""
    stack = ["callee", "callee"]
    for i in _after(rest, method):
        if i.opname in _NOTHING:
            continue
        if i.opname == "CALL" and len(stack) - (i.arg or 0) == 2:
            stack = [_METHOD]
        elif i.opname in ("POP_TOP", "RETURN_VALUE"):
            return stack == [_METHOD]
        elif i.opname in ("MAKE_FUNCTION", "LOAD_CLOSURE") or not _known(i, stack):
            return False
    return False


def _known(i: dis.Instruction, stack: list[str]) -> bool:
    """Apply an instruction that computes arguments of a method. Return False if the instruction is unknown, or takes
    the method or its result from the stack."""
    if stack == [_METHOD]:
        return False
    return _apply(i, stack) and stack[:2] == ["callee", "callee"]


def _after(rest: tuple[dis.Instruction, ...], one: dis.Instruction) -> Iterator[dis.Instruction]:
    return (i for i in rest if i.offset > one.offset)


def _owner(instructions: tuple[dis.Instruction, ...], at: int) -> str:
    """Return the symbol of the object whose attribute is loaded: `_OWNER` if a copy stays on the stack, else its
    instruction or "unknown"."""
    before = instructions[at - 1]
    if before.opname == "COPY" and before.arg == 1:
        return _OWNER
    return f"{before.opname}:{before.argval}" if before.opname in _PUSHES else "unknown"


def _is_method(load: dis.Instruction) -> bool:
    """Return whether an instruction loads an attribute in order to call it, and so loads two values (Python 3.12)."""
    return load.opname == "LOAD_ATTR" and dis.stack_effect(load.opcode, load.arg) > 0


@cache
def _instructions(code: CodeType) -> tuple[dis.Instruction, ...]:
    return tuple(dis.get_instructions(code))
