"""Renders chat templates as transformers does: with Jinja2 and its environment for chat templates.

Reads a JSON list of {"template", "context", "now"} from standard input, and writes a list of {"text"} or {"error"}.
Used by the check `chat_templates_render_as_in_jinja2`; it needs jinja2.
"""

import datetime
import json
import sys

import jinja2
import jinja2.ext
import jinja2.sandbox


class Generation(jinja2.ext.Extension):
    """`{% generation %}` prints its body."""

    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller):
        return caller()


class Undefined(jinja2.Undefined):
    """Undefined value; adding it to a text gives the text, as in llama.cpp."""

    def __add__(self, other):
        return other if isinstance(other, str) else super().__add__(other)

    def __radd__(self, other):
        return other if isinstance(other, str) else super().__radd__(other)


def raise_exception(message):
    raise jinja2.exceptions.TemplateError(message)


def tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    # A template of llama.cpp writes the generator that `map` returns.
    options = {"ensure_ascii": ensure_ascii, "indent": indent, "separators": separators, "sort_keys": sort_keys}
    return json.dumps(value, default=list, **options)


def environment(now):
    env = jinja2.sandbox.SandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=Undefined,
        extensions=[Generation, jinja2.ext.loopcontrols],
    )
    env.filters["tojson"] = tojson
    # As in llama.cpp. Jinja2's own filter returns a text that escapes values inserted into it, even if escaping is off.
    env.filters["safe"] = str
    env.filters["from_json"] = json.loads
    env.globals["raise_exception"] = raise_exception
    env.globals["strftime_now"] = now.strftime
    return env


def render(case):
    now = datetime.datetime.fromtimestamp(case["now"], datetime.timezone.utc)
    try:
        template = environment(now).from_string(case["template"])
        try:
            return {"text": template.render(**case["context"])}
        except TypeError:
            # Without tools, transformers passes `None` and llama.cpp passes no variable; some templates accept only one
            # of the two.
            if case["context"]["tools"] is not None:
                raise
            del case["context"]["tools"]
            return {"text": template.render(**case["context"])}
    except Exception as error:  # A template may fail in any way.
        return {"error": f"{type(error).__name__}: {error}", "context": case["context"]}


json.dump([render(case) for case in json.load(sys.stdin)], sys.stdout)
