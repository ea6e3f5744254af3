"""Configuration declared by a mod, and the schema for the validation of requests."""

import enum
import unittest
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Dict, List, Literal, NamedTuple, Optional, Tuple, TypedDict, Union

from thunder_mods import mod
from thunder_mods.config import fill_defaults, parse_config
from thunder_mods.testing import run
from thunder_mods.worker.serve import Run


class Level(enum.Enum):
    LOW = "low"
    HIGH = "high"


@dataclass
class Limits:
    high: int
    low: int = 1


@dataclass
class Settings:
    KIND: ClassVar[str] = "ignored"
    phrase: Annotated[str, "The phrase to ban."]
    every: int = 3
    rate: float = 0.5
    strict: bool = False
    words: List[str] = field(default_factory=lambda: ["a"])
    mode: Literal["cut", "keep"] = "cut"
    level: Level = Level.LOW
    note: Optional[str] = None
    pair: Tuple[int, str] = (1, "a")
    names: Dict[str, int] = field(default_factory=dict)
    limits: Limits = field(default_factory=lambda: Limits(2))
    any: Any = None
    either: Union[int, List[int]] = 0


class Declarations(unittest.TestCase):
    def test_dataclass_becomes_schema_with_defaults(self):
        found = parse_config(Settings)
        self.assertEqual(found.schema["required"], ["phrase"])
        self.assertIs(found.schema["additionalProperties"], False)
        self.assertNotIn("phrase", found.defaults)
        self.assertEqual(
            {name: found.schema["properties"][name] for name in found.schema["properties"] if name != "limits"},
            {
                "phrase": {"type": "string", "description": "The phrase to ban."},
                "every": {"type": "integer", "default": 3},
                "rate": {"type": "number", "default": 0.5},
                "strict": {"type": "boolean", "default": False},
                "words": {"type": "array", "items": {"type": "string"}, "default": ["a"]},
                "mode": {"enum": ["cut", "keep"], "default": "cut"},
                "level": {"enum": ["low", "high"], "default": "low"},
                "note": {"type": ["string", "null"], "default": None},
                "pair": {
                    "type": "array",
                    "prefixItems": [{"type": "integer"}, {"type": "string"}],
                    "minItems": 2,
                    "maxItems": 2,
                    "default": [1, "a"],
                },
                "names": {"type": "object", "additionalProperties": {"type": "integer"}, "default": {}},
                "any": {"default": None},
                "either": {"anyOf": [{"type": "integer"}, {"type": "array", "items": {"type": "integer"}}], "default": 0},
            },
        )
        limits = found.schema["properties"]["limits"]
        self.assertEqual((limits["required"], limits["default"]), (["high"], {"high": 2, "low": 1}))

    def test_typed_dict_named_tuple_and_plain_class_are_accepted(self):
        class Typed(TypedDict, total=False):
            a: int

        class Named(NamedTuple):
            a: int
            b: str = "x"

        class Base:
            a: "int"

        class Plain(Base):
            b: str = "x"

        self.assertNotIn("required", parse_config(Typed).schema)
        for cls in (Named, Plain):
            found = parse_config(cls)
            self.assertEqual((found.schema["required"], found.defaults), (["a"], {"b": "x"}), cls)

    def test_dictionary_defaults_determine_types(self):
        found = parse_config({"text": "", "count": 3, "on": True, "list": [], "map": {}, "any": None})
        kinds = {name: field.get("type") for name, field in found.schema["properties"].items()}
        expected = {"text": "string", "count": "number", "on": "boolean", "list": "array", "map": "object", "any": None}
        self.assertEqual(kinds, expected)
        self.assertNotIn("required", found.schema)

    def test_unsupported_declaration_raises_type_error(self):
        class Odd:
            callback: complex

        class Empty:
            pass

        for config, message in [
            (Odd, "Odd.callback: unsupported annotation"),
            (Empty, "Empty declares no annotations"),
            ({"a": object()}, "must be JSON"),
            (3, "must be a class with annotations or a dictionary"),
        ]:
            with self.assertRaisesRegex(TypeError, message):
                mod(config=config)(lambda event, actions: None)

    def test_mod_gets_defaults_and_requires_fields_without_one(self):
        seen = []

        @mod(config=Limits)
        def look(event, actions):
            seen.append(event.config)

        run((look, {"high": 5}), model="x", max_tokens=1).check()
        self.assertEqual(seen[0], {"low": 1, "high": 5})
        with self.assertRaisesRegex(ValueError, "missing configuration field high"):
            run(look, model="x")

    def test_defaults_of_nested_objects_are_filled(self):
        @dataclass
        class Nested:
            limits: Limits
            maybe: Optional[Limits] = None
            many: List[Limits] = field(default_factory=list)
            named: Dict[str, Limits] = field(default_factory=dict)
            pair: Tuple[int, Limits] = field(default_factory=lambda: (1, {"high": 9}))
            either: Union[str, List[int], List[Limits]] = ""

        declared = parse_config(Nested)
        given = {"limits": {"high": 5}, "maybe": {"high": 6, "low": 3}, "many": [{"high": 7}], "named": {"a": {"high": 8}}, "either": [{"high": 4}]}
        filled = fill_defaults(given, declared.defaults, declared.schema)
        self.assertEqual(filled["pair"], [1, {"high": 9, "low": 1}])
        self.assertEqual(
            {name: filled[name] for name in given},
            {
                "limits": {"high": 5, "low": 1},
                "maybe": {"high": 6, "low": 3},
                "many": [{"high": 7, "low": 1}],
                "named": {"a": {"high": 8, "low": 1}},
                "either": [{"high": 4, "low": 1}],
            },
        )
        self.assertEqual(given["limits"], {"high": 5}, "the given configuration is unchanged")
        filled = fill_defaults({"limits": {"high": 5}, "maybe": None, "pair": [2, {"high": 3}], "either": [4]}, declared.defaults, declared.schema)
        self.assertEqual((filled["maybe"], filled["many"], filled["pair"], filled["either"]), (None, [], [2, {"high": 3, "low": 1}], [4]))
        self.assertEqual(fill_defaults(None, None, None), {})
        self.assertEqual(fill_defaults({"a": 1}, None, None), {"a": 1})

    def test_integers_with_a_fraction_of_zero_become_ints(self):
        class Numbers:
            count: int = 1
            maybe: Optional[int] = None
            ratio: float = 0.5
            either: Union[int, float] = 1

        declared = parse_config(Numbers)
        given = {"count": 2.0, "maybe": 3.0, "ratio": 1.0, "either": 4.0}
        filled = fill_defaults(given, declared.defaults, declared.schema)
        self.assertEqual([type(filled[name]) for name in given], [int, int, float, float])

    def test_changes_of_configuration_do_not_reach_other_runs(self):
        seen = []

        @mod(events=["Prefilled"], config={"words": ["a"], "deep": {"counts": [0]}})
        def change(event, actions):
            seen.append((list(event.config["words"]), list(event.config["deep"]["counts"])))
            event.config["words"].append("b")
            event.config["deep"]["counts"].append(1)

        for _ in range(2):
            run(change, model="x", max_tokens=1).check()
        header = dict.fromkeys(("request_id", "model", "conversation", "tools", "images", "parameters", "seed", "config"))
        for _ in range(2):
            config = Run(header, None, change.__thunder_mod__).config
            seen.append((list(config["words"]), list(config["deep"]["counts"])))
            config["words"].append("c")
            config["deep"]["counts"].append(2)
        self.assertEqual(seen, [(["a"], [0])] * 4)


if __name__ == "__main__":
    unittest.main()
