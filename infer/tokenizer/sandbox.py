"""A Jinja environment for chat templates, which come with model files and are not to be trusted.

Jinja's immutable sandbox keeps a template away from Python's internals, but does not bound what it
costs. Here the budget of `metering` is built into the compiled template, values are weighed before
they are made, and only those filters and methods of plain values exist that chat templates use.
"""

import json
import re
import time
from collections.abc import Callable
from functools import wraps
from typing import Any

from jinja2 import nodes
from jinja2.environment import Template
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from infer.tokenizer.metering import (
    BUDGET,
    OPERATORS,
    as_list,
    check_join,
    check_replace,
    check_text_method,
    spend_text,
    text_len,
    weigh,
)

_METHODS: dict[type, frozenset[str]] = {
    str: frozenset(
        "capitalize casefold count endswith find index isalnum isalpha isascii isdecimal isdigit "
        "islower isnumeric isspace istitle isupper join lower lstrip partition removeprefix "
        "removesuffix replace rfind rindex rpartition rsplit rstrip split splitlines startswith "
        "strip swapcase title upper".split()
    ),
    dict: frozenset({"get", "items", "keys", "values"}),
    list: frozenset({"count", "index"}),
    tuple: frozenset({"count", "index"}),
    **dict.fromkeys((int, float, complex, bytes, bytearray, set, frozenset, type), frozenset()),
}
_FORMATTING = ("format", "format_map")  # a width in the format can ask for any length
# Filters that make a text of their arguments, and those that look through what they are given.
_TEXT_FILTERS = "capitalize e escape join lower replace safe string title trim upper wordcount"
_ITEM_FILTERS = (
    "abs count d default dictsort first float int items last length list map max min "
    "reject rejectattr reverse select selectattr sort unique"
)


def _printed(value: Any) -> Any:
    if isinstance(value, str):
        spend_text(len(value))
    else:
        text_len(value)
    return value


def _weighed(value: Any) -> Any:
    weigh(value)
    return value


def _concat(values: list[Any]) -> str:
    text_len(values)
    return "".join(map(str, values))


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """`tojson` as chat templates expect it: plain JSON, nothing escaped for HTML."""
    if indent is not None and not 0 <= indent <= 16:
        raise SecurityError(f"tojson(indent={indent}); 0 to 16 are allowed")
    text_len(value)
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _indent(text: str, width: int = 4, first: bool = False, blank: bool = False) -> str:
    """`indent` as Jinja's, for a width in numbers."""
    if not isinstance(width, int) or not 0 <= width <= 64:
        raise SecurityError(f"indent({width!r:.20}); 0 to 64 are allowed")
    text = str(_printed(text))
    spend_text(len(text) + width * (1 + text.count("\n")))
    head, *rest = text.split("\n")
    pad = " " * width
    return "\n".join([pad + head if first else head, *(pad + s if s or blank else s for s in rest)])


def _raise_exception(message: Any) -> None:
    """What templates call to refuse the messages."""
    raise TemplateError(str(_printed(message)))


def _strftime_now(form: str) -> str:
    if len(form) > 100 or re.search(r"%[-_0^#+]*\d", form):
        raise SecurityError("strftime_now takes a format of at most 100 characters without widths")
    return time.strftime(form)


def _guarded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter of Jinja that charges for what it is given before it starts."""
    check = text_len if name in _TEXT_FILTERS.split() else weigh

    @wraps(function)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        at = next(i for i, a in enumerate(args) if not isinstance(a, _INTERNAL))
        if hasattr(args[at], "__next__"):  # what `map` and `select` return is lazy
            args = (*args[:at], as_list(args[at]), *args[at + 1 :])
        value, *others = args[at:]
        others += kwargs.values()
        check(others)
        if name in ("length", "count", "first", "last", "d", "default"):
            return function(*args, **kwargs)  # looks at one item at most
        check(value)
        if name == "list" and isinstance(value, str):
            as_list(value)
        if name == "replace" and len(others) >= 2:
            check_replace(str(value), str(others[0]), str(others[1]))
        if name == "join" and others:
            check_join(str(others[0]), value)
        return function(*args, **kwargs)

    return guarded


class GenerationTag(Extension):
    """`{% generation %}` marks what an assistant says, for training; here only its body counts."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's own form)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Return the body in place of the block."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


# Filters whose names have a space, so that no template can write them.
_LOOP, _CONCAT, _DATA, _NEW = "loop over", "concat of", "data of", "new container"


class _Metering(NodeTransformer):
    """Puts the budget into a parsed template: loops, `~`, literal text, and literal containers."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.iter = _filtered(node.iter, _LOOP)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _filtered(nodes.List(node.nodes, lineno=node.lineno), _CONCAT)

    def visit_TemplateData(self, node: nodes.TemplateData) -> nodes.Node:
        return _filtered(nodes.Const(node.data, lineno=node.lineno), _DATA)

    def visit_List(self, node: nodes.Expr) -> nodes.Node:
        self.generic_visit(node)
        return _filtered(node, _NEW)

    visit_Dict = visit_List

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        self.generic_visit(node)
        return _filtered(node, _NEW) if node.ctx == "load" else node


def _filtered(node: Any, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


class ChatEnvironment(ImmutableSandboxedEnvironment):
    """Templates compiled here cannot leave the sandbox, nor run or grow without end."""

    intercepted_binops = frozenset(OPERATORS)

    def __init__(self):
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[loopcontrols, GenerationTag],
            finalize=_printed,
            optimized=False,
        )
        names = (_TEXT_FILTERS + " " + _ITEM_FILTERS).split()
        self.filters = {name: _guarded(name, self.filters[name]) for name in names} | {
            "tojson": _tojson,
            "indent": _indent,
            _LOOP: as_list,
            _CONCAT: _concat,
            _DATA: _printed,
            _NEW: _weighed,
        }
        del self.globals["lipsum"]
        self.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}

    def compile_metered(self, source: str) -> Template:
        """A template with the budget built in; jinja2's errors where it cannot be read."""
        tree = _Metering().visit(self.parse(source))
        return self.from_string(tree.set_environment(self))

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Jinja's rule, and of plain values only the methods that templates need."""
        for kind, methods in _METHODS.items():
            if isinstance(obj, kind):
                return attr in methods
        return super().is_safe_attribute(obj, attr, value)

    def unsafe_undefined(self, obj: Any, attribute: str) -> Any:
        """Refuse at once, where Jinja waits until the value is used."""
        raise SecurityError(f"it reads {attribute!r} of a {type(obj).__name__}")

    def getattr(self, obj: Any, attribute: str) -> Any:
        """Refuse `format`, which Jinja lets through before it asks what is safe."""
        if isinstance(obj, str) and attribute in _FORMATTING:
            return self.unsafe_undefined(obj, attribute)
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        """The same by subscript; and charge a slice, which is a copy."""
        if isinstance(obj, str) and argument in _FORMATTING:
            return self.unsafe_undefined(obj, argument)
        if isinstance(argument, slice):
            if isinstance(obj, str):
                spend_text(len(obj))
            elif isinstance(obj, list | tuple):
                BUDGET.get().spend(steps=len(obj))
        return super().getitem(obj, argument)

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:  # pyright: ignore
        """Charge a call and its arguments, and what a method of a text makes."""
        weigh([args, kwargs])
        if isinstance(obj, LoopContext) and args:
            args = (as_list(args[0]), *args[1:])
        owner = getattr(obj, "__self__", None)
        if isinstance(owner, str):
            args = check_text_method(owner, getattr(obj, "__name__", ""), args)
        return super().call(context, obj, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Charge an operation, and refuse one whose result would be too large."""
        OPERATORS[operator](left, right)
        return super().call_binop(context, operator, left, right)


_INTERNAL = (Context, ChatEnvironment, nodes.EvalContext)
