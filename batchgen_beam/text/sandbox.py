"""The cage in which chat templates run: they are code from strangers.

Owns what a template may call, and that everything it does is charged to the `Meter` of its rendering.  Does not know
messages, models or rows.

Jinja's immutable sandbox is the base, without loader (no include, no import).  It has the filters of `_FILTERS` and
the methods of `_METHODS` only: others make bytes, or large texts out of small numbers, or take more than linear time.
The syntax tree is rewritten so that loop turns, output, `~`, comparisons, slices and literals pay; calls, filters and
arithmetic are intercepted.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import BlockReference, Context, LoopContext, Macro, TemplateReference, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from batchgen_beam.text.meter import Meter

__all__ = ["METER", "TemplateSandbox"]

METER = "meter of this rendering"
"""Name of the meter among a rendering's variables; no template can write a name with spaces."""

_TURNS, _VALUE, _JOINED = "charge turns", "charge value", "charge joined"
_FILTERS = (
    "abs", "capitalize", "count", "d", "default", "dictsort", "first", "float", "groupby", "indent", "int", "items",
    "join", "last", "length", "list", "lower", "map", "max", "min", "reject", "rejectattr", "replace", "reverse",
    "round", "safe", "select", "selectattr", "sort", "string", "title", "trim", "unique", "upper",
)
_CHARGED_TESTS = ("in", "eq", "==", "equalto", "ne", "!=", "lt", "<", "lessthan", "gt", ">", "greaterthan", "le", "<=",
                  "ge", ">=", "lower", "upper", "even", "odd", "divisibleby")
_SEQUENCE_METHODS = frozenset({"copy", "count", "index"})
_METHODS: tuple[tuple[type, frozenset[str]], ...] = (
    (str, frozenset({
        "capitalize", "casefold", "count", "endswith", "find", "index", "isalnum", "isalpha", "isascii", "isdecimal",
        "isdigit", "isidentifier", "islower", "isnumeric", "isprintable", "isspace", "istitle", "isupper", "join",
        "lower", "lstrip", "partition", "removeprefix", "removesuffix", "replace", "rfind", "rindex", "rpartition",
        "rsplit", "rstrip", "split", "splitlines", "startswith", "strip", "swapcase", "title", "upper"})),
    (int, frozenset({"bit_length"})),
    (float, frozenset({"is_integer"})),
    (dict, frozenset({"copy", "get", "items", "keys", "values"})),
    (list, _SEQUENCE_METHODS),
    (tuple, _SEQUENCE_METHODS | {"grouper", "list"}),
    (range, _SEQUENCE_METHODS),
)
"""What a template may read of a value of each type; `grouper` and `list` are fields of what `groupby` makes."""
_JINJA_TYPES = (BlockReference, LoopContext, Macro, Namespace, TemplateReference, Undefined)
_SLOW_SEARCHES = frozenset({"strip", "lstrip", "rstrip", "trim", "rfind", "rindex", "rsplit", "rpartition"})
"""They compare each character of the text with each of the operand's, at worst."""
_MAX_SOUGHT = 64
_MAX_INDENT = 64
_MAX_POWER = 64


def _meter(context: Context) -> Meter:
    meter = context.resolve_or_missing(METER)
    assert isinstance(meter, Meter)
    return meter


@jinja2.pass_context
def _charge_turns(context: Context, iterable: Iterable[Any]) -> Iterator[Any]:
    meter = _meter(context)
    for item in iterable:
        meter.charge()
        yield item


@jinja2.pass_context
def _charge_value(context: Context, value: Any) -> Any:
    _meter(context).charge_value(value)
    return value


@jinja2.pass_context
def _charge_joined(context: Context, *parts: Any) -> str:
    _meter(context).charge_value(parts)
    return "".join(map(str, parts))


def _charged(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter or test that pays for its operands before it runs, and for what it makes."""

    @jinja2.pass_context
    def run(context: Context, value: Any, *args: Any, **kwargs: Any) -> Any:
        meter = _meter(context)
        if isinstance(value, Iterator) or name == "join":
            value = list(_charge_turns(context, value))
        meter.charge_value((value, args, kwargs))
        _charge_growth(meter, name, value, [*args, *kwargs.values()])
        result = function(*_leading(function, context), value, *args, **kwargs)
        if isinstance(result, Iterator):
            return _charge_turns(context, result)
        meter.charge_value(result)
        return result

    return run


def _leading(function: Callable[..., Any], context: Context) -> tuple[Any, ...]:
    """What Jinja passes before the value: the context, the evaluation context or the environment."""
    wanted = getattr(function, "jinja_pass_arg", None)
    if wanted is None:
        return ()
    return ({"context": context, "eval_context": context.eval_ctx, "environment": context.environment}[wanted.name],)


def _charge_growth(meter: Meter, name: str, value: Any, operands: list[Any]) -> None:
    """Pay beforehand for what is larger or takes longer than its operands; refuse what small numbers make huge."""
    if name == "replace" and len(operands) > 1:
        old, new = str(operands[0]), str(operands[1])
        meter.charge(str(value).count(old) * len(new))
    elif name == "join" and operands:
        meter.charge(len(value) * len(str(operands[0])))
    elif name == "indent":
        widths = [_MAX_INDENT, *(int(width) if isinstance(width, int) else len(str(width)) for width in operands)]
        if max(widths) > _MAX_INDENT:
            raise jinja2.TemplateRuntimeError(f"indent is limited to {_MAX_INDENT} columns")
        meter.charge((str(value).count("\n") + 1) * _MAX_INDENT)
    elif name in _SLOW_SEARCHES and any(isinstance(sought, str) and len(sought) > _MAX_SOUGHT for sought in operands):
        raise jinja2.TemplateRuntimeError(f"{name} is limited to texts of {_MAX_SOUGHT} characters to look for")
    elif name == "round" and any(isinstance(digits, int) and abs(digits) > _MAX_POWER for digits in operands):
        raise jinja2.TemplateRuntimeError(f"round is limited to {_MAX_POWER} digits")
    elif name in ("even", "odd", "divisibleby") and isinstance(value, str):
        raise jinja2.TemplateRuntimeError(f"{name} is for numbers")


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None,
             separators: tuple[str, str] | None = None, sort_keys: bool = False) -> str:
    """JSON as transformers' chat templates expect it: no HTML escapes, any script as it is."""
    if indent is not None and not 0 <= int(indent) <= _MAX_INDENT:
        raise jinja2.TemplateRuntimeError(f"tojson: the indent is limited to {_MAX_INDENT} columns")
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _plain_dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    """The `dict` that templates see: a function, so that the type's attributes stay out of reach."""
    return dict(*args, **kwargs)


class _Namespace(Namespace):
    """A namespace without names that begin with an underscore, which reach into the interpreter."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, positional = args[0], args[1:]
        values = dict(*positional, **kwargs)
        for name in values:
            _check_name(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if str(name).startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace can't hold the name {name!r}")


class _Generation(Extension):
    """`{% generation %}…{% endgeneration %}` marks what an assistant wrote, for training; here it is its body."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class _Instrument(NodeTransformer):
    """Puts the charging filters into a syntax tree."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.iter = _through(_TURNS, node.iter)
        return node

    def visit_Output(self, node: nodes.Output) -> nodes.Node:
        self.generic_visit(node)
        node.nodes = [_through(_VALUE, _expression(part)) for part in node.nodes]
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _through(_JOINED, *node.nodes)

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        node.expr = _through(_VALUE, node.expr)
        for operand in node.ops:
            operand.expr = _through(_VALUE, operand.expr)
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        return _through(_VALUE, node) if isinstance(node.arg, nodes.Slice) else node

    def visit_List(self, node: nodes.List) -> nodes.Node:
        self.generic_visit(node)
        return _through(_VALUE, node)

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:
        self.generic_visit(node)
        return _through(_VALUE, node)

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        self.generic_visit(node)
        return _through(_VALUE, node) if node.ctx == "load" else node


def _through(name: str, node: nodes.Node, *more: nodes.Expr) -> nodes.Filter:
    assert isinstance(node, nodes.Expr)
    return nodes.Filter(node, name, list(more), [], None, None, lineno=node.lineno)


def _expression(part: nodes.Expr) -> nodes.Expr:
    """Text between tags as a constant: only an expression can pass through a filter."""
    return nodes.Const(part.data, lineno=part.lineno) if isinstance(part, nodes.TemplateData) else part


class TemplateSandbox(ImmutableSandboxedEnvironment):
    """The environment; whitespace rules, extensions and helpers are those of transformers' chat templates.

    Each rendering needs a `Meter` among its variables, under the name `METER`.
    """

    intercepted_binops = frozenset({"+", "-", "*", "/", "//", "%", "**"})

    def __init__(self) -> None:
        """Build the cage; `optimized=False`, so that nothing is computed while compiling."""
        super().__init__(trim_blocks=True, lstrip_blocks=True, optimized=False, extensions=[_Generation, loopcontrols])
        kept: dict[str, Callable[..., Any]] = {name: self.filters[name] for name in _FILTERS} | {"tojson": _to_json}
        tests: dict[str, Any] = dict(self.tests)
        self.filters = {name: _charged(name, function) for name, function in kept.items()}
        self.filters |= {_TURNS: _charge_turns, _VALUE: _charge_value, _JOINED: _charge_joined}
        self.tests = self.tests | {name: _charged(name, tests[name]) for name in _CHARGED_TESTS}
        self.globals = {"range": self.globals["range"], "dict": _plain_dict, "namespace": _Namespace,
                        "raise_exception": _raise_exception}

    def _generate(self, source: nodes.Template, name: str | None, filename: str | None,
                  defer_init: bool = False) -> str:
        return super()._generate(_Instrument().visit(source), name, filename, defer_init)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """No exception for `str.format`: a field's width makes any size of text."""
        return None

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Whether a template may read this attribute: known ones of plain values, and Jinja's own objects'."""
        if not super().is_safe_attribute(obj, attr, value):
            return False
        return isinstance(obj, _JINJA_TYPES) or any(attr in names for kind, names in _METHODS if isinstance(obj, kind))

    def call(self, context: Context, obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Call something for a template; costs its operands and what it returns.

        A macro's operands are free, its body pays; a dict's methods look at no more than they return.
        """
        owner, name = getattr(obj, "__self__", None), getattr(obj, "__name__", "")
        meter = _meter(context)
        if isinstance(owner, str) and name == "join" and args:
            args = (list(_charge_turns(context, args[0])),)
            _charge_growth(meter, "join", args[0], [owner])
        if not isinstance(obj, Macro):
            meter.charge_value((args, kwargs))
        if isinstance(owner, (str, list, tuple, range)):
            meter.charge_value(owner)
            if name != "join":
                _charge_growth(meter, name, owner, [*args, *kwargs.values()])
        result = super().call(context, obj, *args, **kwargs)
        meter.charge_value(result)
        return result

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Compute an arithmetic operation for a template; costs its operands and its result."""
        meter = _meter(context)
        meter.charge_value((left, right))
        if operator == "%" and isinstance(left, str):
            raise jinja2.TemplateRuntimeError("formatting text with % is refused")
        if operator == "**" and abs(right) > _MAX_POWER:
            raise jinja2.TemplateRuntimeError(f"powers over {_MAX_POWER} are refused")
        if operator == "*" and isinstance(left, int) != isinstance(right, int):
            sized, times = (right, left) if isinstance(left, int) else (left, right)
            if isinstance(times, int):
                meter.charge_value(sized, times)
        return super().call_binop(context, operator, left, right)
