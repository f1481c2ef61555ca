"""Small templates, one feature each; template_golden.py renders them with jinja2."""

CONTEXT = {
    "s": "Hello, World", "u": "straße ÀÉ 你好 😀", "empty": "", "w": "  \t padded \n\n", "html": "<a href='x'>&\"</a>",
    "lines": "one\ntwo\n\n three", "i": 7, "n": -3, "f": 2.5, "big": 18446744073709551615, "t": True, "no": False, "none": None,
    "l": [3, 1, 2], "names": ["beta", "Alpha", "gamma", "alpha"], "mixed": [1, 1.0, True, "1", None, [2], {"k": "v"}],
    "d": {"b": 1, "a": 2, "C": 3}, "nested": {"x": {"y": [10, {"z": "deep"}]}, "items": "shadowed"},
    "users": [{"name": "Ann", "age": 30, "tags": ["x"]}, {"name": "bob", "age": 25}, {"name": "Cid", "age": 30, "admin": True}],
    "ctl": "tab\tnl\nquote'\"\\ \x01\x7f\u00a0\u2028\ufeff", "q1": "it's", "q2": "it's \"both\"",
    "floats": [0.1, 1.0, 1e16, 1e15, 1e-5, 0.0001, -0.0, 123456789.123, 1e300, 5e-324],
}

EXPRESSIONS = """
s | upper
s | lower
u | upper
u | lower
u | title
u | capitalize
u | length
u[0] ~ u[-1] ~ u[5]
u[2:6]
u[::-1]
u[-2:]
s[::2]
s[10:2:-3]
s[5:100]
s[100:]
l[::-1]
l[1:]
l[:-1]
l[-1]
l[5] is defined
l[5]
l.0
nested.x.y.1.z
nested['x']['y'][0]
nested.items is callable
nested['items']
nested.items() | list
nested.missing is undefined
nested.missing
nested.missing.deeper
missing
missing.attr
missing is defined
missing | default('fallback')
none | default('fallback')
none | default('fallback', true)
empty | default('x', boolean=true)
empty | d
s.startswith('Hello')
s.startswith(('x', 'Hel'))
s.endswith('x')
s.endswith('World')
s.split(', ')
s.split('l')
s.split('l', 1)
'a  b   c '.split()
'a  b   c '.split(None, 1)
' a b  c '.rsplit(None, 1)
'a,b,c'.rsplit(',', 1)
'a,b,,c'.split(',')
''.split(',')
''.split()
lines.splitlines()
lines.splitlines(true)
w.strip() ~ '|'
w.lstrip() ~ '|'
w.rstrip() ~ '|'
'xxabcxx'.strip('x')
'xxabcyx'.rstrip('xy')
'abc'.lstrip('')
s.replace('l', 'L')
s.replace('l', 'L', 1)
'abc'.replace('', '-')
s.find('o')
s.find('zz')
u.find('你')
s.rfind('o')
s.count('l')
'-'.join(['a', 'b'])
'x'.join('abc')
s.upper() ~ s.lower()
'hello world'.title()
"they're bill's".title()
'HELLO wORLD'.capitalize()
'ǆabc ßx'.title()
'ΑΣ ΌΣΟΣ'.lower()
'abc'.isalpha() ~ '12'.isdigit() ~ 'a1'.isalnum() ~ ' '.isspace()
'abc'.islower() ~ 'ABC'.isupper() ~ '1'.isupper()
'prefix-x'.removeprefix('prefix-')
'x.txt'.removesuffix('.txt')
w | trim ~ '|'
'xxhixx' | trim('x')
s | length
l | length
d | length
d | count
users | map(attribute='name') | join(', ')
users | map(attribute='admin', default='no') | list
users | map('length') | list
names | map('upper') | list
users | selectattr('age', 'equalto', 30) | map(attribute='name') | list
users | selectattr('admin') | list | length
users | selectattr('admin', 'defined') | list | length
users | rejectattr('admin', 'defined') | map(attribute='name') | join('+')
l | select('odd') | list
l | reject('odd') | list
l | select('>', 1) | list
l | select | list
names | select('in', ['beta']) | list
users | map(attribute='tags.0') | list
l | sort
l | sort(reverse=true)
names | sort
names | sort(case_sensitive=true)
users | sort(attribute='age') | map(attribute='name') | list
users | sort(attribute='age', reverse=true) | map(attribute='name') | list
names | unique | list
names | unique(case_sensitive=true) | list
[1, 1.0, 2, 2] | unique | list
l | reverse | list
s | reverse
l | first
l | last
[] | first is undefined
'' | last is undefined
l | sum
users | sum(attribute='age')
[0.5, 1] | sum(start=10)
l | min ~ l | max
names | min
users | max(attribute='age')
[] | max is undefined
d | dictsort
d | dictsort(true)
d | dictsort(by='value', reverse=true)
d | items | list
missing | items | list
d.items() | list
d.keys() | list
d.values() | list
d.get('a')
d.get('zz')
d.get('zz', 5)
d | list
d | first
s | list | length
'7' | int + 1
'7.9' | int
'x' | int
'x' | int(default=-1)
'0x1f' | int(base=16)
' 12 ' | int
3.99 | int
-3.99 | int
true | int
none | int
'2.5' | float
'x' | float
3 | float
7 | abs ~ -7 | abs ~ -2.5 | abs
2.5 | round
3.5 | round
2.675 | round(2)
2.1 | round(method='ceil')
2.9 | round(method='floor')
2.15 | round(1, 'ceil')
42 | round
1234.5 | round(-2)
html | escape
html | e
html | safe
html | tojson
lines | indent
lines | indent(2)
lines | indent(2, true)
lines | indent(2, false, true)
lines | indent('> ', first=true)
s | wordcount
i | string ~ 'x'
none | string
l | string
'%5B' | string
d | tojson
nested | tojson
mixed | tojson
floats | tojson
ctl | tojson
u | tojson
u | tojson(ensure_ascii=true)
nested | tojson(indent=2)
[] | tojson(indent=2)
{} | tojson(indent=2)
[[], {}, [1]] | tojson(indent=4)
d | tojson(sort_keys=true)
d | tojson(separators=(',', ':'))
{1: 'a', true: 'b', none: 'c', 1.5: 'd'} | tojson
(1, 2) | tojson
missing | tojson
big | tojson
big
big > 5
big == 18446744073709551615.0
none
true
false
True
None
none is none
f
floats
1e16
1.0
100000000000000000000.0
0.1 + 0.2
1/3
mixed
d
nested
ctl
[ctl]
[q1, q2, u, '\\\\']
(1,)
(1, 2, 'x')
()
[(1,), []]
1, 2
{'a': 1, 'b': [1, 2]}
{}
[1, 2, 3,]
{'a': 1,}
'a' 'b' "c"
"\\u4f60\\n\\x41\\t|\\101|\\q"
'it\\'s'
1_000 + 0x10 + 0b11 + 0o17
1.5e3
2e3
i + 1
i - 10
i * 2
i / 2
i // 2
n // 2
i % 3
n % 5
-7 // 2
7 // -2
-7 % 3
7 % -3
7.5 // 2
-7.5 // 2
-7.5 % 2
7.5 % -2
2 ** 10
2 ** -1
2 ** 0.5
2 ** 3 ** 2
-2 ** 2
1 / 0
1 // 0
1 % 0
6 / 3
s + '!'
s ~ i ~ none ~ f ~ t
'ab' * 3
3 * 'ab'
'ab' * -1
[1] * 3
[1] + [2]
(1,) + (2,)
1 + true
1 + 'a'
'a' + 1
'a' + missing
missing + 'a'
missing ~ 'a'
[1] + (2,)
-i
+i
-(-i)
not i
not empty
not not s
t and no
t or no
empty or 'x'
s and i
0 or none
1 < 2 < 3
1 < 3 < 2
1 == 1.0 == true
'a' < 'b'
'Z' < 'a'
'a' < 1
[1, 2] < [1, 3]
[1, 2] == [1, 2]
[1] == (1,)
{'a': 1, 'b': 2} == {'b': 2, 'a': 1}
none == missing
missing == missing2
missing != none
1 != 2
2 >= 2
2 <= 1
'ell' in s
'zz' not in s
1 in l
'a' in d
'zz' in d
1 in 'abc'
[1] in [[1]]
none in mixed
'x' in missing
1 in i
'a' if t else 'b'
'a' if no else 'b'
'a' if no
('a' if no) is undefined
'x' if t else missing.y
s if s is string else s | tojson
i is odd
i is even
i is divisibleby 7
i is divisibleby(2)
i is number and i is integer and i is not float
f is float
t is boolean
t is number
t is integer
t is true
i is true
no is false
none is none
s is string
l is iterable
s is iterable
i is iterable
d is mapping
l is mapping
l is sequence
d is sequence
s is sequence
missing is sequence
missing is iterable
i is sequence
range is callable
s is callable
i is eq 7
i is equalto(7)
i is ne 7
i is gt 5
i is lt(5)
i is ge 7
i is le 6
i is in [7, 8]
i is sameas 7
i is not none
not i is none
s is lower
'abc' is lower
'ABC' is upper
'upper' is filter
'nope' is filter
'odd' is test
i is defined and i > 5 or no
i is divisibleby 2 or t
range(5) | list
range(1, 10, 3) | list
range(5, 0, -2) | list
range(0) | list
range(0, 10, 0) | list
range(1000000) | list
dict(a=1, b=2)
dict(d, z=9)
dict([('x', 1)])
namespace(a=1).a
namespace(a=1).b is defined
namespace({'q': 2}).q
raise_exception('stop: ' ~ s)
s.nosuch
s.nosuch()
nosuch()
i()
none.x is undefined
none.x.y
l.x is undefined
i.x
s | nosuchfilter
s is nosuchtest
l | map('nosuch') | list
s[none:3]
s['a':]
s | attr('upper') is callable
d | attr('a') is defined
(l | map('string')) and 'generator is true'
([] | map('string')) and 'even an empty one'
l | map('string') | length
d | map('upper') | join(',')
u | list | join('|')
'a.b.c'.split('.')[-1]
'<think>\\nabc\\n</think>\\n\\nrest'.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n')
strftime_now('%%|plain')
{'a': {'b': 1}}.a.b
[1, [2, [3]]][1][1][0]
(s)[0]
(s ~ '!').upper()
s.split(',')[0].lower()|title
users[0].name
users[0]['age'] + users[1].age
users[-1].admin
users[0].admin
users|length - 1
i if i > 5 and i < 10 else 0
{'x': i}['x']
{i: 'seven'}[7]
d['a'] * d.b + d['C']
'{{ literal }}'
"'" ~ '"'
'你' < '😀'
9007199254740993
9007199254740993 == 9007199254740992.0
9223372036854775807
0.5 is number
'1' == 1
'abc'[1]
'abc'[-4] is undefined
true ~ false
[true, false, none]
1 if true else 2 if false else 3
(1 if false else 2) if true else 3
not true == false
1 + 2 ~ 3 + 4
2 * 3 ~ 4
-1 | abs
(-1) ** 2
3 | string | length
[3, 1] | sort | first
"a" in ["a"] and "b" not in ["a"]
'é' | length
'e\\u0301' | length
'😀👍🏽' | length
'😀👍🏽'[1:]
'İ' | lower | length
'ﬁ' | upper
'tab\\there'
'a\\\\b'
"""

TEMPLATES = [
    "plain text\n", "trailing newline kept once\n\n", "\n", "", "a\r\nb\rc\n", "  {{ s }}  ", "{{- s -}}", "a {{- s -}} b", "a\n\n  {{- s -}}\n\n b",
    "{% if t %}\nyes\n{% endif %}\n", "  {% if t %}  \n  yes\n  {% endif %}\nend", "a  {% if t %}b{% endif %}  c", "a\n   {% if t %}\n  b\n   {% endif %}\nc",
    "a\n   {%- if t -%}\n  b\n   {%- endif -%}\nc", "a\n   {%+ if t +%}\n  b\n   {%+ endif +%}\nc", "{# comment #}x", "  {# comment #}\nx", "a {#- c -#} b", "a\n {#+ c +#}\n b",
    "{# multi\nline {{ nothing }} #}\nafter", "{% raw %}{{ not }} {% evaluated %}{% endraw %}", "a\n  {% raw %}\n  x\n  {% endraw %}\nb", "a {%- raw -%} x {%- endraw -%} b",
    "{% raw %}\n  {# kept #}\n{% endraw %}\nz", "{{ '}}' }}", "{{ {'a': {'b': 1}} }}", "{{ [1,2]|tojson }}}", "{ {{ i }} }", "{{{'a': 1}['a']}}", "{% if '%}' %}x{% endif %}",
    "{%if t%}a{%else%}b{%endif%}", "{% if no %}a{% elif i == 7 %}b{% else %}c{% endif %}", "{% if no %}a{% elif no %}b{% else %}c{% endif %}", "{% if no %}a{% endif %}|", "{% if l and d %}ok{% endif %}",
    "{% for x in l %}{{ x }},{% endfor %}", "{% for x in l %}{{ loop.index }}{{ loop.index0 }}{{ loop.revindex }}{{ loop.revindex0 }}{{ loop.first }}{{ loop.last }}{{ loop.length }};{% endfor %}",
    "{% for x in l %}{{ loop.previtem }}<{{ x }}>{{ loop.nextitem }} {% endfor %}", "{% for x in l %}{{ loop.previtem is defined }}{{ loop.nextitem is defined }} {% endfor %}",
    "{% for x in l %}{{ loop.cycle('a', 'b') }}{% endfor %}", "{% for x in [1,1,2] %}{{ loop.changed(x) }} {% endfor %}", "{% for x in l if x > 1 %}{{ x }}/{{ loop.length }} {% endfor %}",
    "{% for x in l if x > 9 %}{{ x }}{% else %}none{% endfor %}", "{% for x in [] %}x{% else %}empty{% endfor %}", "{% for x in missing %}x{% else %}undef{% endfor %}",
    "{% for k, v in d.items() %}{{ k }}={{ v }};{% endfor %}", "{% for k, v in d|items %}{{ k }}={{ v }};{% endfor %}", "{% for (a, b), c in [((1,2),3)] %}{{ a+b+c }}{% endfor %}", "{% for k in d %}{{ k }}{% endfor %}",
    "{% for c in u %}[{{ c }}]{% endfor %}", "{% for a, b in [(1,2,3)] %}{% endfor %}", "{% for x in i %}{% endfor %}", "{% for x in l %}{% if x == 1 %}{% break %}{% endif %}{{ x }}{% endfor %}",
    "{% for x in l %}{% if x == 1 %}{% continue %}{% endif %}{{ x }}{% endfor %}", "{% for x in l %}{% for y in l %}{% if y == 2 %}{% break %}{% endif %}{{ x }}{{ y }} {% endfor %}{% endfor %}", "{% break %}",
    "{% for x in l %}{% for y in 'ab' %}{{ loop.index }}{{ y }}{% endfor %}{{ loop.index }} {% endfor %}", "{% for x in l[::-1] %}{{ x }}{% endfor %}", "{% for x in range(3) %}{{ x }}{% endfor %}",
    "{% for x in 1, 2, 3 %}{{ x }}{% endfor %}", "{% for user in users %}\n  - {{ user.name }}\n{% endfor %}\ndone", "{% for x in l %}\n{{ x }}\n{%- endfor %}", "{% for x in l -%}\n  {{ x }}\n{% endfor %}",
    "{% set x = 1 %}{{ x }}", "{% set x = 1 %}{% if t %}{% set x = 2 %}{% endif %}{{ x }}", "{% set x = 1 %}{% for y in l %}{% set x = y %}{{ x }}{% endfor %}{{ x }}", "{% for y in l %}{{ z is defined }}{% set z = y %}{% endfor %}{{ z is defined }}",
    "{% set x = 0 %}{% for y in l %}{{ x }}{% set x = y %}{% endfor %}", "{% set a, b = 1, 2 %}{{ a }}{{ b }}", "{% set (a, b) = l[:2] %}{{ a }}{{ b }}", "{% set x %}block {{ i }}{% endset %}[{{ x }}]", "{% set x | upper | trim %}  block {{ s }} {% endset %}[{{ x }}]",
    "{% set x %}{% set inner = 1 %}{% endset %}{{ inner is defined }}", "{% set ns = namespace(n=0, l=[]) %}{% for x in l %}{% set ns.n = ns.n + x %}{% endfor %}{{ ns.n }}", "{% set ns = namespace() %}{% set ns.a = 'x' %}{{ ns.a }}{{ ns.b }}",
    "{% set d.x = 1 %}", "{% set ns.x = 1 %}", "{% set x = 1, 2 %}{{ x }}", "{% set true = 1 %}", "{% set loop = 5 %}{{ loop }}",
    "{% macro m(a, b=2, c='z') %}{{ a }}{{ b }}{{ c }}{% endmacro %}{{ m(1) }}|{{ m(1, c=3) }}|{{ m(b=5, a=4) }}|{{ m(1, 2, 3) }}", "{% macro m(a) %}[{{ a }}]{% endmacro %}{{ m() }}{{ m(none) }}", "{% macro m(a) %}{{ a }}{% endmacro %}{{ m(1, 2) }}",
    "{% macro m(a) %}{{ a }}{% endmacro %}{{ m(1, a=2) }}", "{% macro m(a) %}{{ a }}{% endmacro %}{{ m(zz=2) }}", "{% macro m() %}{{ varargs }}{{ kwargs }}{% endmacro %}{{ m(1, 2, k=3) }}", "{% macro m(a, b=a) %}{{ b }}{% endmacro %}{{ m(7) }}",
    "{% macro fact(n) %}{{ n if n <= 1 else n * (fact(n - 1) | int) }}{% endmacro %}{{ fact(5) }}", "{% macro f() %}{{ later }}{% endmacro %}{% set later = 'seen' %}{{ f() }}", "{% macro f() %}{% set hidden = 1 %}{% endmacro %}{{ f() }}{{ hidden is defined }}",
    "{% macro m(x) -%}\n  {{ x }}\n{%- endmacro %}[{{ m('a') }}]", "{% macro m(x) %}{{ x }}{% endmacro %}{{ m('<b>')|upper }}{{ m(1) is string }}{{ m('ab')|length }}", "{% macro outer() %}{% macro inner() %}in{% endmacro %}{{ inner() }}{% endmacro %}{{ outer() }}",
    "{% macro m(x) %}{{ x }}{{ caller() }}{% endmacro %}{% call m(1) %}body{{ s }}{% endcall %}", "{% macro m() %}{{ caller(1, 2) }}{% endmacro %}{% call(a, b=0) m() %}{{ a }}-{{ b }}{% endcall %}", "{% macro m() %}x{% endmacro %}{% call m() %}y{% endcall %}",
    "{% macro show(a, b) %}{{ a }}{{ b }}{% endmacro %}{{ show(*[1, 2]) }}{{ show(**{'a': 3, 'b': 4}) }}", "{% macro m(x) %}{% for y in x %}{% if y == 2 %}{% break %}{% endif %}{{ y }}{% endfor %}{% endmacro %}{{ m(l) }}",
    "{% filter upper %}abc {{ s }}{% endfilter %}", "{% filter replace('a', 'b') | upper %}banana{% endfilter %}", "{% with %}{% set q = 1 %}{{ q }}{% endwith %}{{ q is defined }}", "{% with a = 1, b = 2 %}{{ a + b }}{% endwith %}", "{% set a = 5 %}{% with a = 1, b = a %}{{ a }}{{ b }}{% endwith %}",
    "{% generation %}text {{ i }}{% endgeneration %}!", "{%- generation -%}\n x \n{%- endgeneration -%}\n!", "{{ raise_exception('exactly this, \u4f60') }}", "{% if no %}{{ raise_exception('never') }}{% endif %}ok",
    "{{ s", "{% if t %}", "{% endif %}", "{% for %}{% endfor %}", "{% unknown %}", "{{ 1 + }}", "{{ (1 }}", "{{ 'open }}", "{{ a b }}", "{# open", "{% raw %}open", "{{ ) }}", "{{ }}", "{% set %}", "{{ s | }}", "{{ s. }}", "{% if t %}{% endfor %}", "{{ $ }}", "{{ [1, 2 }}", "{{ {'a' 1} }}",
    "{% set x = [1, 2, 3] %}{{ x[0] }}{{ x[-1] }}{{ x | length }}", "{% set content = '<think>\\nr\\n</think>\\n\\nanswer' %}{% if '</think>' in content %}{{ content.split('</think>')[-1].lstrip('\\n') }}{% endif %}",
    "{%- for m in users -%}\n    {%- if loop.first -%}\n        first {{ m.name }}\n    {%- elif loop.last -%}\n        last {{ m.name }}\n    {%- endif -%}\n{%- endfor -%}", "x{% if t -%}   y   {%- endif %}z", "{% if t %}a{% endif +%}\nb", "{{ s }}\n{{ s }}\n", "{{ s }}\n\n", "\n\n{% if t %}\n\nx{% endif %}",
    "\t {% if t %}\t\n\tx{% endif %}", "a{% if t %}\n{% endif %}b", "{{ '\n' }}x", "{{- '\\n' }}\nx", "{% set x = 'a\nb' %}{{ x }}", "  {{- ' keep ' -}}  ", "a{#c#}{#d#}b\n{#e#}\nf", "line {{ i }}{# c #}\nnext", "{% for x in l %}{{ x }}{% if not loop.last %}, {% endif %}{% endfor %}",
    "{{ '{%' }}{{ '%}' }}{{ '{#' }}", "a %} b }} c #}", "{{ {'k': 'v'}.k }}{{ {}|length }}", "{% if x is defined and x %}a{% else %}b{% endif %}", "{{ (users | selectattr('name', 'equalto', 'bob') | first).age }}", "{% if not (s.startswith('x') and s.endswith('y')) %}ok{% endif %}",
    "{%- set a = 1 -%}\n\n{%- set b = 2 -%}\n{{ a }}{{ b }}", "{% set first = true %}{% for x in l %}{% if first %}{% set first = false %}F{% endif %}{{ x }}{% endfor %}", "{{ loop is defined }}{% for x in [1] %}{{ loop is defined }}{% endfor %}", "{% for loop in [1] %}{{ loop }}{% endfor %}",
    "{% for x in l %}{{ x }}{% endfor %}{{ x is defined }}", "{% for x in users | map(attribute='age') %}{{ x }} {% endfor %}", "{{ users | tojson(indent=2) }}", "\ufeffbom", "你好{{ u }}再见",
]
