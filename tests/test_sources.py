"""Dynamo's names as trees: what Python's parser would make of them, at a fraction of its time."""

from __future__ import annotations

import ast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from piecewise_backend.sources import is_plain, parsed, root_of, text_of

KEYS = st.text(st.characters(blacklist_characters="'\\\"", blacklist_categories=["Cs", "Cc"]))
NAMES = st.from_regex(r"[a-z_][a-z_0-9]{0,5}x", fullmatch=True)  # no keyword ends in x
LINKS = st.one_of(
    NAMES.map(lambda name: f".{name}"),
    KEYS.map(lambda key: f"['{key}']"),
    st.integers(0, 99).map(lambda index: f"[{index}]"),
)
CHAINS = st.tuples(st.sampled_from(["L", "G", "L['self']"]), st.lists(LINKS)).map(
    lambda parts: parts[0] + "".join(parts[1])
)

OTHERS = [
    "f(L['a']).b",
    "L['a'].size()[0]",
    "list(L['self'].items())[2]",
    "L['a'].b if L['c'] else L['d'].e",
    "L['a'] + L['b'].c",
    "L[G['name']].x",
    "L['a'][-1]",
    "L['it\\'s'].b",
    'L["a"].b',
    "L['a'][None]",
    "L['a']['b' 'c']",
    "type(L['self']).__mro__[1].__dict__['forward']",
    "___dict_keys(L['self'])",
    "L['a'][1:2]",
    "L.self[0]['k']",
]


def dump(tree: ast.expr) -> str:
    """Without places in the text."""
    return ast.dump(tree)


def by_python(source: str) -> ast.expr:
    """What Python makes of it."""
    return ast.parse(source, mode="eval").body


@given(CHAINS)
def test_chains_are_what_python_makes_of_them(source: str) -> None:
    assert dump(parsed(source)) == dump(by_python(source))
    assert is_plain(source)


@given(CHAINS)
def test_the_root_of_a_chain_is_its_local_variable(source: str) -> None:
    locals_read = [
        node.slice.value
        for node in ast.walk(by_python(source))
        if isinstance(node, ast.Subscript)
        and isinstance(node.slice, ast.Constant)
        and isinstance(node.slice.value, str)
        and ast.dump(node.value) == ast.dump(by_python("L"))
    ]
    assert root_of(source) == (locals_read[0] if locals_read else None)


@pytest.mark.parametrize("source", OTHERS)
def test_what_is_no_chain_is_parsed_by_python(source: str) -> None:
    assert dump(parsed(source)) == dump(by_python(source))
    assert by_python(text_of(parsed(source))), "text of it is an expression again"


@pytest.mark.parametrize("source", ["", "L[", "L['a", "L['a'].", "1.b"])
def test_what_is_no_expression_is_refused(source: str) -> None:
    with pytest.raises(SyntaxError):
        parsed(source)
    assert not is_plain(source)


def test_a_large_model_is_parsed_once() -> None:
    # 80 layers have 8,000 sources, and each is asked for in turns by several.
    sources = [
        f"L['large']._modules['layers']._modules['{layer}']._parameters['w{i}']"
        for layer in range(100)
        for i in range(90)
    ]
    for source in sources:
        parsed(source)
    misses = parsed.cache_info().misses
    again = [parsed(source) for source in sources]
    assert parsed.cache_info().misses == misses
    assert text_of(again[-1]) == sources[-1]


def test_sources_of_one_module_share_what_they_start_with() -> None:
    one, other = parsed("L['self'].shared.one"), parsed("L['self'].shared.other")
    assert isinstance(one, ast.Attribute)
    assert isinstance(other, ast.Attribute)
    assert one.value is other.value
