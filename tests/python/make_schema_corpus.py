#!/usr/bin/env python3
"""Makes tests/data/schemas/corpus.jsonl.gz: JSON schemas with documents that they accept and documents that they do not.

The judge is the jsonschema package (Draft 2020-12, with its format checker); every document stands as text, in the forms that people and
programs write (compact, with blanks, indented). Documents that a schema accepts are written as quern promises to be able to write them:
properties in the schema's order, none beyond `properties` where additionalProperties is not said, no list items beyond `prefixItems` where
`items` is not said. A line is {"schema", "valid": [texts], "invalid": [texts]}. The same seed gives the same file.

  pip install jsonschema[format]==4.26.0
  python3 tests/python/make_schema_corpus.py tests/data/schemas/corpus.jsonl.gz
"""
import copy
import gzip
import json
import random
import sys

import jsonschema

NUM_SCHEMAS = 620
WORDS = ["id", "name", "age", "city", "tags", "price", "count", "ok", "note", "größe", "名前", "a b", "x-y", "_z", "items", "kind", "q\"uote", "back\\slash", "tab\there"]
STRINGS = ["", "a", "ab", "abc", "hello world", "größer", "日本語", "🙂", "tab\tnew\nline", "quote\"d", "back\\slash", "x" * 30, "2024-02-29", "Zed", "12", "true", "null", "a/b", "\u0001", "é" * 5]
PATTERNS = [
    (r"^[a-z]+$", ["a", "abc", "zzzzz"]), (r"^\d{3}-\d{4}$", ["123-4567", "000-0000"]), (r"[0-9]", ["a1b", "7", "x9"]),
    (r"^(foo|bar)", ["foo", "barista"]), (r"end$", ["end", "the end"]), (r"^.{2,4}$", ["ab", "日本語", "🙂🙂"]), (r"^[A-Z][a-z]*( [A-Z][a-z]*)*$", ["Zed", "New York"]),
    (r"^\w+@\w+\.com$", ["me@x.com"]), (r"^[^\s]+$", ["a", "größer"]), (r"^a*b?c+$", ["c", "aabcc"]), (r"\\", ["a\\b"]), (r"^\"x\"$", ["\"x\""]),
    (r"^(\+|-)?[1-9][0-9]{0,2}$", ["+1", "-999", "10"]), (r"^$|^x$", ["", "x"]), (r"^[\u4e00-\u9fff]{1,3}$", ["日本語", "名"]), (r"^x{25,30}$", ["x" * 25, "x" * 30]),
]
FORMATS = {
    "date": ["2024-02-29", "1999-12-31"], "time": ["12:34:56Z", "00:00:00+01:00"], "date-time": ["2024-02-29T12:34:56Z", "2001-01-01T00:00:00.5-08:00"],
    "email": ["a@b.co", "first.last+tag@example.org"], "ipv4": ["127.0.0.1", "255.255.255.255"], "ipv6": ["::1", "2001:db8::8a2e:370:7334", "1:2:3:4:5:6:7:8"],
    "uuid": ["123e4567-e89b-12d3-a456-426614174000"],
}
FORMAT_WRONG = {
    "date": ["2023-02-29", "2024-13-01", "24-01-01"], "time": ["25:00:00Z", "12:60:00Z"], "date-time": ["2024-02-30T00:00:00Z", "today"], "email": ["nobody", ""],
    "ipv4": ["256.1.1.1", "1.2.3"], "ipv6": ["12345::", "1::2::3"], "uuid": ["123", "g23e4567-e89b-12d3-a456-426614174000"],
}


class Maker:
    def __init__(self, seed):
        self.r = random.Random(seed)

    # Each returns (schema, [valid values]); values of objects have their keys in order.
    def schema(self, depth):
        makers = [self.string, self.integer, self.number, self.boolean, self.null, self.enum, self.const, self.types]
        if depth > 0:
            makers += [self.object, self.object, self.object, self.array, self.array, self.tuple, self.any_of, self.all_of, self.nullable, self.map]
        return self.r.choice(makers)(depth)

    def string(self, _):
        r, kind = self.r, self.r.randrange(5)
        if kind == 0:
            return {"type": "string"}, r.sample(STRINGS, 3)
        if kind == 1:
            low = r.randrange(4)
            high = low + r.randrange(1, 30)
            return {"type": "string", "minLength": low, "maxLength": high}, [s for s in STRINGS if low <= len(s) <= high][:3] + ["y" * low, "日" * high]
        if kind == 2:
            pattern, good = r.choice(PATTERNS)
            return {"type": "string", "pattern": pattern}, good
        if kind == 3:
            name = r.choice(list(FORMATS))
            return {"type": "string", "format": name}, FORMATS[name]
        pattern, good = r.choice(PATTERNS)
        high = max(len(s) for s in good)
        return {"type": "string", "pattern": pattern, "maxLength": high}, good

    def integer(self, _):
        r, kind = self.r, self.r.randrange(5)
        if kind == 0:
            return {"type": "integer"}, [0, 7, -12, 123456789, r.randrange(-10**15, 10**15)]
        low, high = sorted(r.randrange(-10**r.randrange(1, 7), 10**r.randrange(1, 7)) for _ in range(2))
        if kind == 1:
            return {"type": "integer", "minimum": low, "maximum": high}, [low, high, (low + high) // 2]
        if kind == 2:
            return {"type": "integer", "exclusiveMinimum": low, "exclusiveMaximum": high + 2}, [low + 1, high + 1]
        if kind == 3:
            m = r.choice([2, 3, 5, 7, 12, 100])
            return {"type": "integer", "multipleOf": m}, [0, m, -3 * m, m * r.randrange(10**6)]
        return {"type": "integer", "minimum": low}, [low, low + 1, low + 10**6]

    def number(self, _):
        r, kind = self.r, self.r.randrange(4)
        if kind == 0:
            return {"type": "number"}, [0, -1.5, 3.25, 1e-7, 2.5e20, r.random(), 10]
        low = round(r.uniform(-100, 100), r.randrange(3))
        high = low + round(r.uniform(0.5, 50), 2)
        high = round(high, 4)
        if kind == 1:
            return {"type": "number", "minimum": low, "maximum": high}, [low, high, round((low + high) / 2, 6)]
        if kind == 2:
            return {"type": "number", "exclusiveMinimum": low}, [round(low + 0.001, 6), low + 1, 10**6]
        return {"type": "number", "multipleOf": 0.5}, [0, 0.5, -7.5, 3, 1000.5]

    def boolean(self, _):
        return {"type": "boolean"}, [True, False]

    def null(self, _):
        return {"type": "null"}, [None]

    def enum(self, _):
        values = self.r.sample(STRINGS + [1, 2.5, True, None, "red", "green", "blue"], self.r.randrange(1, 6))
        return {"enum": values}, values

    def const(self, _):
        value = self.r.choice(STRINGS + [42, False, None, {"a": [1, "x"]}, [1, [2]]])
        return {"const": value}, [value]

    def types(self, _):
        names = self.r.sample(["string", "integer", "boolean", "null"], self.r.randrange(2, 4))
        examples = {"string": ["s", ""], "integer": [3, -4], "boolean": [True], "null": [None]}
        return {"type": names}, [v for n in names for v in examples[n]]

    def object(self, depth):
        r = self.r
        names = r.sample(WORDS, r.randrange(0, 5))
        properties, goods = {}, {}
        for name in names:
            properties[name], goods[name] = self.schema(depth - 1)
        required = [n for n in names if r.random() < 0.6]
        schema = {"type": "object", "properties": properties, "required": required}
        extra = r.randrange(4)
        if extra == 0:
            schema["additionalProperties"] = False
        elif extra == 1:
            schema["additionalProperties"] = {"type": "integer"}
        if r.random() < 0.2:
            del schema["type"]
        values = []
        for _ in range(3):
            value = {n: r.choice(goods[n]) for n in names if n in required or r.random() < 0.5}
            if extra == 1 and r.random() < 0.7:
                value["zz%d" % r.randrange(9)] = r.randrange(100)
            values.append(value)
        return schema, values

    def map(self, depth):
        r = self.r
        inner, good = self.schema(depth - 1)
        kind = r.randrange(3)
        if kind == 0:
            return {"type": "object", "additionalProperties": inner}, [{}, {"k": r.choice(good)}, {"k": r.choice(good), "l m": r.choice(good)}]
        if kind == 1:
            return {"type": "object", "patternProperties": {"^n_": inner}, "additionalProperties": False}, [{}, {"n_1": r.choice(good)}, {"n_": r.choice(good), "n_x": r.choice(good)}]
        return {"type": "object", "minProperties": 1, "maxProperties": 2}, [{"a": 1}, {"a": None, "b": [1, {"c": "d"}]}]

    def array(self, depth):
        r = self.r
        inner, good = self.schema(depth - 1)
        low = r.randrange(3)
        high = low + r.randrange(0, 30)
        schema = {"type": "array", "items": inner}
        if r.random() < 0.5:
            schema["minItems"] = low
        else:
            low = 0
        if r.random() < 0.5:
            schema["maxItems"] = high
        else:
            high = low + 4
        return schema, [[r.choice(good) for _ in range(n)] for n in {low, high, (low + high) // 2}]

    def tuple(self, depth):
        r = self.r
        inner = [self.schema(depth - 1) for _ in range(r.randrange(1, 4))]
        schema = {"type": "array", "prefixItems": [s for s, _ in inner]}
        whole = [r.choice(g) for _, g in inner]
        values = [whole, whole[:-1]]
        kind = r.randrange(3)
        if kind == 0:
            schema["items"] = False
        elif kind == 1:
            rest, good = self.schema(0)
            schema["items"] = rest
            values.append(whole + [r.choice(good), r.choice(good)])
        if r.random() < 0.4:
            schema["minItems"] = len(whole)
            values.remove(whole[:-1])
        return schema, values

    def any_of(self, depth):
        parts = [self.schema(depth - 1) for _ in range(self.r.randrange(2, 4))]
        return {"anyOf": [s for s, _ in parts]}, [v for _, g in parts for v in g[:2]]

    def all_of(self, depth):
        a, goods = self.object(depth)
        b, more = self.object(0)
        for s in (a, b):
            s.pop("additionalProperties", None)
        shared = set(a["properties"]) & set(b["properties"])
        for name in shared:
            del b["properties"][name]
            b["required"] = [n for n in b["required"] if n != name]
        values = []
        for x, y in zip(goods, more):
            value = {n: v for n, v in x.items() if n in a["properties"]}
            value.update({n: v for n, v in y.items() if n in b["properties"]})
            values.append(value)
        return {"allOf": [a, b]}, values

    def nullable(self, depth):
        s, good = self.schema(depth - 1)
        return {"anyOf": [s, {"type": "null"}]}, good + [None]

    # Values near valid ones, most of them wrong.
    def mutate(self, value):
        r = self.r
        value = copy.deepcopy(value)
        if isinstance(value, dict) and value and r.random() < 0.8:
            key = r.choice(list(value))
            kind = r.randrange(4)
            if kind == 0:
                del value[key]
            elif kind == 1:
                value["unknown_" + str(r.randrange(5))] = r.choice([1, "s", None])
            else:
                value[key] = self.mutate(value[key])
            return value
        if isinstance(value, list) and value and r.random() < 0.8:
            kind, i = r.randrange(4), r.randrange(len(value))
            if kind == 0:
                del value[i]
            elif kind == 1:
                value.append(r.choice([1, "s", None, {}]))
            else:
                value[i] = self.mutate(value[i])
            return value
        if isinstance(value, str) and r.random() < 0.7:
            wrong = [w for name, goods in FORMATS.items() if value in goods for w in FORMAT_WRONG[name]]
            return r.choice(wrong + [value + "!", value[:-1], value * 2 + "#", value.upper(), " " + value])
        if isinstance(value, (int, float)) and not isinstance(value, bool) and r.random() < 0.7:
            return r.choice([value + 1, value - 1, -value, value * 1000 + 1, value + 0.25, value - 0.125])
        return r.choice([None, True, 0, -1, 1.5, "", "zz", [], {}, [1], {"a": 1}, 99999])


def texts(value, r):
    forms = [dict(separators=(",", ":")), dict(), dict(indent=2)]
    return json.dumps(value, ensure_ascii=False, **r.choice(forms))


def recursive_schemas():
    node = {"type": "object", "properties": {"value": {"type": "integer"}, "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}}, "required": ["value", "next"], "additionalProperties": False}
    yield {"$ref": "#/$defs/node", "$defs": {"node": node}}, [{"value": 1, "next": None}, {"value": 1, "next": {"value": 2, "next": {"value": 3, "next": None}}}]
    tree = {"type": "object", "properties": {"name": {"type": "string"}, "children": {"type": "array", "items": {"$ref": "#"}}}, "required": ["name"]}
    yield tree, [{"name": "r"}, {"name": "r", "children": []}, {"name": "r", "children": [{"name": "a", "children": [{"name": "b"}]}, {"name": "c"}]}]
    expression = {"$defs": {"e": {"anyOf": [{"type": "number"}, {"type": "array", "prefixItems": [{"enum": ["+", "*"]}, {"$ref": "#/$defs/e"}, {"$ref": "#/$defs/e"}], "items": False, "minItems": 3}]}}, "$ref": "#/$defs/e"}
    yield expression, [1, ["+", 1, 2], ["*", ["+", 1, ["*", 2, 3]], 4.5]]
    yield {"type": "object", "properties": {"a~b/c": {"$ref": "#/definitions/x%20y"}}, "definitions": {"x y": {"type": "boolean"}}}, [{}, {"a~b/c": True}]
    yield {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 9}, {"multipleOf": 2}]}, [4, 6, 8]
    yield {"type": "string", "allOf": [{"pattern": "^a"}, {"pattern": "b$"}, {"minLength": 3}]}, ["aab", "a b"]
    yield {"type": "string", "enum": ["a", "bb", "ccc"], "minLength": 2}, ["bb", "ccc"]


def main():
    out = sys.argv[1]
    maker = Maker(20261130)
    checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
    sources = list(recursive_schemas())
    seen, lines, num_valid, num_invalid = set(), [], 0, 0
    while len(lines) < NUM_SCHEMAS:
        schema, values = sources.pop(0) if sources else maker.schema(maker.r.choice([0, 1, 1, 2, 2, 3]))
        text = json.dumps(schema, sort_keys=True)
        if text in seen or len(text) > 4000:
            continue
        seen.add(text)
        jsonschema.Draft202012Validator.check_schema(schema)
        judge = jsonschema.Draft202012Validator(schema, format_checker=checker)
        valid = [v for v in values if judge.is_valid(v)]
        if not valid:
            continue
        assert len(valid) == len(values) or "anyOf" in text or "allOf" in text or "const" in text, (schema, values)
        invalid = []
        for _ in range(40):
            candidate = maker.mutate(maker.r.choice(valid))
            if not judge.is_valid(candidate) and len(invalid) < 8:
                invalid.append(candidate)
        good = list(dict.fromkeys(texts(v, maker.r) for v in valid for _ in range(2)))
        bad = list(dict.fromkeys(texts(v, maker.r) for v in invalid))
        # Texts that are no JSON.
        bad += [good[0][:-1], good[0] + "}", good[0].replace(":", "=", 1) if good[0].startswith("{\"") else good[0] + ","]
        bad = [b for b in bad if b not in good and not is_accepted(b, judge)]
        lines.append(json.dumps({"schema": schema, "valid": good, "invalid": bad}, ensure_ascii=False))
        num_valid += len(good)
        num_invalid += len(bad)
    with gzip.GzipFile(out, "wb", mtime=0) as f:
        f.write(("\n".join(lines) + "\n").encode())
    print(f"{len(lines)} schemas, {num_valid} valid and {num_invalid} invalid documents")


def is_accepted(text, judge):
    try:
        return judge.is_valid(json.loads(text))
    except ValueError:
        return False


main()
