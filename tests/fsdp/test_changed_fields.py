"""How many fields of fully_shard's objects are changed after construction: what is a value cannot be half changed."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

import terrazzo.fsdp

# At most so many, by class: what a unit is doing is in the planner's `State`, which is a value. Lower them when fewer
# are left; a new one needs a reason.
MOST = {
    "Bucket": 4,
    "Course": 1,
    "Executor": 2,  # one is the event after which an optimizer has stepped, which users set
    "Gradients": 4,
    "Group": 4,
    "Hooks": 1,  # what classes return; an object for each parameter
    "Kept": 1,
    "Registration": 1,
    "Root": 6,  # one is what users set, as the ranks compare it
    "ShardedParameter": 5,
    "Unit": 4,  # one says that an optimizer has written, which no rank need be asked about
    "_Parked": 1,  # a gradient on the CPU, of which several micro-batches decide whether it exists
}


def is_value(node: ast.ClassDef) -> bool:
    """Whether objects of a class cannot be changed."""
    decorators = [ast.unparse(each) for each in node.decorator_list]
    bases = {ast.unparse(each) for each in node.bases}
    frozen = any("frozen=True" in each for each in [*decorators, *(ast.unparse(k) for k in node.keywords)])
    frozen |= "msgspec.Struct" in bases and any(k.arg == "frozen" for k in node.keywords)
    return frozen or bool(bases & {"NamedTuple", "Enum", "StrEnum", "IntEnum", "Protocol"})


def stores(tree: ast.AST) -> list[tuple[str, str]]:
    """The attributes that code assigns: the object, if it has a name, and the attribute."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            found.append((node.value.id if isinstance(node.value, ast.Name) else "", node.attr))
    return found


def changed_fields(folder: Path) -> dict[str, set[str]]:
    """By class, the fields that methods other than `__init__` assign, or other code does. An assignment to an object of
    unknown class counts for each class with a field of this name. Containers that are filled do not count."""
    found: dict[str, set[str]] = defaultdict(set)
    fields: dict[str, set[str]] = {}
    elsewhere: set[str] = set()
    for path in sorted(folder.rglob("*.py")):
        tree = ast.parse(path.read_text())
        elsewhere |= {name for owner, name in stores(tree) if owner != "self"}
        for node in ast.walk(tree):
            if not isinstance(node, ast.ClassDef) or is_value(node):
                continue
            own = fields.setdefault(node.name, set())
            own |= {each.target.id for each in node.body if isinstance(each, ast.AnnAssign)}  # type: ignore[union-attr]
            for method in node.body:
                if isinstance(method, ast.FunctionDef):
                    names = {name for owner, name in stores(method) if owner == "self"}
                    own |= names
                    if method.name != "__init__":
                        found[node.name] |= names
    for name, own in fields.items():
        found[name] |= own & elsewhere
    return {name: names for name, names in found.items() if names}


def test_few_fields_are_changed_after_construction():
    found = changed_fields(Path(terrazzo.fsdp.__file__).parent)
    more = {name: names for name, names in found.items() if len(names) > MOST.get(name, 0)}
    assert not more, "what can be a value, should be"
    assert sum(map(len, found.values())) <= sum(MOST.values()) == 34


def test_what_counts(tmp_path):
    (tmp_path / "a.py").write_text(
        "class A:\n    def __init__(self):\n        self.one = self.two = self.three = 1\n        self.many = []\n"
        "    def f(self):\n        self.one += 1\n        self.many.append(2)\n"
        "def g(a):\n    a.two = 3\n"
        "class B(NamedTuple):\n    two: int\n"
    )
    assert changed_fields(tmp_path) == {"A": {"one", "two"}}
