"""Turns the form of an answer into a compiled matcher of llguidance. The only module that imports it, and late.

A matcher knows, for one sequence, which tokens may come next. Everything here may run in any thread.
"""

import json
import re
from collections.abc import Sequence
from functools import cached_property
from typing import NoReturn

import llguidance
from llguidance.gbnf_to_lark import gbnf_to_lark

from trioengine.core.structured.json_schema import Schema, bound_schema, find_fault, json_for_grammar
from trioengine.errors import RequestError
from trioengine.tokenizer.tokenizer import Tokenizer
from trioengine.types.structured import PARAM, StructuralTag, StructuredOutputsParams, TagRules, parse_json

MAX_GRAMMAR_LINES = 500
"""Rules may form a chain, which is followed recursively; each begins a line."""
MAX_LEXER_STATES = 50_000
"""About 2 KB each, for each running request in the worst case. Past it the request ends with an error."""

_JSON_SPACE = r"[ \t\n\r]*"
_IS_LARK = re.compile(r"^\s*(%llguidance\b|start\s*(\[[^\]]*\])?\s*:(?!:=))", re.MULTILINE)
_NUMBERED = re.compile(r"\\\\|\\u([0-9A-Fa-f]{4})|\\U([0-9A-Fa-f]{8})")
_SOURCE_LINE = re.compile(r"\s+\d+ \| ")
_PLACE = re.compile(r"^(at )?\d+\(\d+\): ")


class MatcherCompiler:
    """Compiles for one vocabulary. Immutable."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        """Take half a second at most.

        Args:
            tokenizer: of the model.
            vocab_size: the number of tokens that can be sampled; it may differ from the tokenizer's.
        """
        self._tokenizer = tokenizer
        ends = [token_id for token_id in tokenizer.eos_token_ids if token_id < vocab_size]
        # A model without one still needs a token that stands for the end; `Grammar` never lets it be sampled.
        self.end_token_ids: tuple[int, ...] = tuple(ends) or (tokenizer.bos_token_id or 0,)
        self._vocabulary = llguidance.LLTokenizer(
            llguidance.TokenizerWrapper(_Vocabulary(tokenizer, vocab_size, self.end_token_ids[0])),
            n_vocab=vocab_size,
            eos_token=list(self.end_token_ids),
        )
        self._limits = llguidance.LLParserLimits(max_lexer_states=MAX_LEXER_STATES, verbose_errors=False)

    def compile(self, params: StructuredOutputsParams) -> llguidance.LLMatcher:
        """Return a matcher that has read nothing yet.

        Raises:
            RequestError: the form cannot be kept; naming the field, and for a JSON schema the keyword.
        """
        params.validate()
        if params.json is not None:
            return self._compile_json(parse_json(params.json, "json"), "json", params.whitespace_pattern)
        if params.json_object:
            return self._compile_json({"type": "object"}, "json_object", params.whitespace_pattern)
        if params.structural_tag is not None:
            return self._compile_tags(params.tags(), params.tag_rules())
        if params.regex is not None:
            # Digits are 0 to 9, as in patterns of JSON schemas: a model that may write any script's does so.
            pattern = llguidance.regex_to_lark(params.regex, use_ascii="d")
            return self._checked(_lark(f"start: /{pattern}/"), "regex")
        if params.choice is not None:
            # As a grammar's alternatives, thousands would be over the parser's limits.
            return self._checked(
                llguidance.LLMatcher.grammar_from_regex("|".join(map(_escaped, params.choice))), "choice"
            )
        return self._checked(_lark(_user_grammar(params.grammar or "")), "grammar")

    def _compile_json(self, content: object, field: str, whitespace: str | None) -> llguidance.LLMatcher:
        schema = bound_schema(content, f"{PARAM}.{field}")
        if whitespace is not None:
            self._check_whitespace(whitespace)
        return self._checked(_json_grammar(schema, whitespace), field, schema, whitespace=whitespace)

    def _compile_tags(self, tags: Sequence[StructuralTag], rules: TagRules) -> llguidance.LLMatcher:
        field = f"{PARAM}.structural_tag"
        schemas = [bound_schema(tag.schema, field, f"/structures/{index}/schema") for index, tag in enumerate(tags)]
        for index, schema in enumerate(schemas):
            self._checked(_json_grammar(schema, None), "structural_tag", schema, path=f"/structures/{index}/schema")
        if not rules.is_tags_only:
            return self._checked(_lark(self._tag_grammar(tags, schemas, rules)), "structural_tag")
        otherwise: Schema | None = None
        if rules.otherwise is not None:
            otherwise = bound_schema(rules.otherwise, field, "/otherwise")
            self._checked(_json_grammar(otherwise, None), "structural_tag", otherwise, path="/otherwise")
        return self._checked(_lark(self._only_tags_grammar(tags, schemas, rules, otherwise)), "structural_tag")

    def _only_tags_grammar(
        self, tags: Sequence[StructuralTag], schemas: Sequence[Schema], rules: TagRules, otherwise: Schema | None
    ) -> str:
        """Tags with white space between them, or JSON instead."""
        tag_rules = [
            f"tag{index}: {self._symbols(tag.begin)} %json {json_for_grammar(schema, None)} {self._symbols(tag.end)}"
            for index, (tag, schema) in enumerate(zip(tags, schemas, strict=True))
        ]
        any_tag = " | ".join(f"tag{index}" for index in range(len(tags)))
        answer = "SPACE? tag" if rules.stops_after_first else "(SPACE? tag)+"
        if otherwise is not None:
            answer += " | otherwise"
            tag_rules.append(f"otherwise: %json {json_for_grammar(otherwise, None)}")
        return "\n".join(
            ["%llguidance {}", f"start: {answer}", f"tag: {any_tag}", "SPACE: /[ \\t\\n\\r]{1,4}/", *tag_rules]
        )

    def _tag_grammar(self, tags: Sequence[StructuralTag], schemas: Sequence[Schema], rules: TagRules) -> str:
        """Free text that stops at the first trigger, a tag, and so on, then free text to the end.

        A trigger is found by a lazy lexeme: of all texts that end with it, the shortest.
        """
        heads: dict[str, list[str]] = {}
        lines: list[str] = []
        for index, (tag, schema) in enumerate(zip(tags, schemas, strict=True)):
            head = self._head(tag.trigger)
            body = f"{self._symbols(tag.begin[len(head) :])} %json {json_for_grammar(schema, None)} "
            lines.append(f"tag{index}: {body}{self._symbols(tag.end)}")
            heads.setdefault(head, []).append(f"tag{index}")
        for index, (head, bodies) in enumerate(heads.items()):
            token_id = self._special_tokens.get(head)
            lines.append(f"part{index}: head{index} ({' | '.join(bodies)})")
            lines.append(
                f"head{index}[lazy]: TEXT {_literal(head)}" if token_id is None else f"head{index}: TEXT <[{token_id}]>"
            )
        parts = " | ".join(f"part{index}" for index in range(len(heads)))
        start = f"({parts}) | rest" if rules.stops_after_first else f"({parts})* rest"
        return "\n".join(["%llguidance {}", f"start: {start}", "rest: TEXT", "TEXT: /(.|\\n)*/", *lines])

    def _head(self, trigger: str) -> str:
        """What the text is searched for: the trigger, or the control token with which it begins."""
        pieces = [piece for piece in self._special_pattern.split(trigger) if piece]
        if len(pieces) == 1 or pieces[0] in self._special_tokens:
            return pieces[0]
        self._refuse("structural_tag", f"the trigger {trigger[:40]!r} has a control token, so it must begin with it")

    def _symbols(self, text: str) -> str:
        """A text as Lark has it, with control tokens where it spells them."""
        tokens = self._special_tokens
        pieces = [piece for piece in self._special_pattern.split(text) if piece]
        if any(tokens.get(piece) in self.end_token_ids for piece in pieces):
            self._refuse("structural_tag", f"{text[:40]!r} has a token that ends the answer")
        return " ".join(f"<[{tokens[piece]}]>" if piece in tokens else _literal(piece) for piece in pieces)

    @cached_property
    def _special_tokens(self) -> dict[str, int]:
        tokenizer = self._tokenizer
        texts = {token_id: tokenizer.token_bytes(token_id) for token_id in tokenizer.special_token_ids}
        return {data.decode(errors="replace"): token_id for token_id, data in texts.items() if data}

    @cached_property
    def _special_pattern(self) -> re.Pattern[str]:
        longest_first = sorted(self._special_tokens, key=len, reverse=True)
        return re.compile(f"({'|'.join(map(re.escape, longest_first)) or '(?!)'})")

    def _check_whitespace(self, pattern: str) -> None:
        pattern_in_lark = llguidance.regex_to_lark(pattern, use_ascii="")
        self._checked(llguidance.LLMatcher.grammar_from_regex(pattern), "whitespace_pattern", may_be_empty=True)
        other = self._matcher(_lark(f"start: OTHER\nOTHER: /(?:{pattern_in_lark})/ & ~/{_JSON_SPACE}/"))
        if not other.is_error():
            other.compute_bitmask()
        if not other.is_error():
            self._refuse("whitespace_pattern", "it matches more than spaces, tabs and new lines")

    def _matcher(self, grammar: str) -> llguidance.LLMatcher:
        return llguidance.LLMatcher(self._vocabulary, grammar, log_level=0, limits=self._limits)

    def _checked(
        self,
        grammar: str,
        field: str,
        schema: Schema | None = None,
        *,
        whitespace: str | None = None,
        path: str = "",
        may_be_empty: bool = False,
    ) -> llguidance.LLMatcher:
        matcher, fault = self._try(grammar, may_be_empty)
        if fault is None:
            return matcher
        if schema is not None:
            place = find_fault(schema, lambda part: self._try(_json_grammar(part, whitespace), False)[1])
            fault = f"{path}{place or '/'}: {fault}"
        self._refuse(field, fault)

    def _try(self, grammar: str, may_be_empty: bool) -> tuple[llguidance.LLMatcher, str | None]:
        """The matcher, and what is wrong with it."""
        matcher = self._matcher(grammar)
        if not matcher.is_error():
            matcher.compute_bitmask()
        if matcher.is_error():
            return matcher, _words(matcher.get_error())
        allowed = int.from_bytes(matcher.compute_bitmask(), "little")
        for token_id in self.end_token_ids:
            allowed &= ~(1 << token_id)
        if not allowed:
            return matcher, None if may_be_empty else "only an empty answer satisfies it"
        # Some limits are first met by a token: of the mask's, the one with the lowest id.
        probe = matcher.deep_copy()
        if not probe.consume_token((allowed & -allowed).bit_length() - 1):
            return matcher, _words(probe.get_error())
        return matcher, None

    def _refuse(self, field: str, words: str) -> NoReturn:
        raise RequestError(f"{PARAM}.{field}: {words}.", param=f"{PARAM}.{field}")


class _Vocabulary:
    """A tokenizer as llguidance wants it: the bytes of each token, and a function that spells text inside an answer."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, end_token_id: int) -> None:
        self.eos_token_id = end_token_id
        self.bos_token_id = tokenizer.bos_token_id
        self.tokens = [tokenizer.token_bytes(token_id) for token_id in range(vocab_size)]
        self.special_token_ids = sorted(token_id for token_id in tokenizer.special_token_ids if token_id < vocab_size)
        self._tokenizer = tokenizer

    def __call__(self, text: str) -> list[int]:
        """Tokens of exactly these bytes. A tokenizer may put a space in front of a text, and change characters."""
        wanted = text.encode()
        for before in ("", "\n"):
            token_ids = self._encoded(before + text)
            first, num_left = len(token_ids), len(wanted)
            while first and num_left > 0:
                first -= 1
                num_left -= len(self.tokens[token_ids[first]])
            is_inside = bool(before) or not first
            if is_inside and b"".join([self.tokens[token_id] for token_id in token_ids[first:]]) == wanted:
                return token_ids[first:]
        return self._longest_first(wanted)

    def _encoded(self, text: str) -> list[int]:
        """As the tokenizer reads it; nothing where it cannot, or a token is not the model's."""
        try:
            token_ids = self._tokenizer.encode(text, add_special_tokens=False)
        except RequestError:
            return []
        return token_ids if max(token_ids, default=0) < len(self.tokens) else []

    def _longest_first(self, wanted: bytes) -> list[int]:
        """From the beginning on the longest token each time, as far as there is one."""
        token_ids: list[int] = []
        start = 0
        while start < len(wanted):
            for end in range(min(len(wanted), start + self._max_token_bytes), start, -1):
                token_id = self._ids_by_bytes.get(wanted[start:end])
                if token_id is not None:
                    token_ids.append(token_id)
                    start = end
                    break
            else:
                break
        return token_ids

    @cached_property
    def _ids_by_bytes(self) -> dict[bytes, int]:
        special = frozenset(self.special_token_ids)
        return {data: token_id for token_id, data in enumerate(self.tokens) if data and token_id not in special}

    @cached_property
    def _max_token_bytes(self) -> int:
        return max(map(len, self._ids_by_bytes), default=0)


def _json_grammar(schema: Schema, whitespace: str | None) -> str:
    return f'{{"grammars": [{{"json_schema": {json_for_grammar(schema, whitespace)}}}]}}'


def _lark(grammar: str) -> str:
    # Wrapped, so that a text which looks like JSON is not taken for a list of grammars.
    return json.dumps({"grammars": [{"lark_grammar": grammar}]})


def _user_grammar(grammar: str) -> str:
    """A grammar in Lark's notation, from either."""
    if sum(1 for line in grammar.splitlines() if line.strip()) > MAX_GRAMMAR_LINES:
        raise RequestError(f"{PARAM}.grammar has more than {MAX_GRAMMAR_LINES} lines.", param=f"{PARAM}.grammar")
    if _IS_LARK.search(grammar):
        return grammar
    try:
        return gbnf_to_lark(_NUMBERED.sub(_character, grammar))
    except Exception as error:  # The converter raises `Exception` itself for what is wrong with the grammar.
        words = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)[:300]
        raise RequestError(
            f"{PARAM}.grammar is neither Lark (a rule `start: ...`) nor EBNF (a rule `root ::= ...`): {words}.",
            param=f"{PARAM}.grammar",
        ) from None


def _character(match: re.Match[str]) -> str:
    """An escape by number as the converter of EBNF reads it rightly."""
    number = int(match[1] or match[2] or "0", 16)
    if match[0] == r"\\" or number > 0x10FFFF:
        return match[0]
    return chr(number) if number > 0x7F else f"\\x{number:02x}"


def _escaped(text: str) -> str:
    """A regular expression that matches this text."""
    return "".join(
        character if character.isascii() and character.isalnum() else f"\\x{{{ord(character):x}}}" for character in text
    )


def _literal(text: str) -> str:
    """A string in Lark's notation."""
    quoted = json.dumps(text, ensure_ascii=False)
    return "".join(
        character if character.isprintable() or ord(character) > 0xFFFF else f"\\u{ord(character):04x}"
        for character in quoted
    )


def _words(error: str) -> str:
    """What the compiler says, without the grammar that it made of the request."""
    if error.startswith("NoExtension"):
        return "no text satisfies it"
    if error.startswith("oneOf"):
        return "it cannot be seen that no two of these schemas hold at once"
    if error.startswith("Resource"):
        return "it is not in here, and nothing is fetched"
    lines: list[str] = []
    for line in _PLACE.sub("", error.replace("<non-verbose/>", "")).splitlines():
        if _SOURCE_LINE.match(line):
            break
        lines.append(line.strip())
    return " ".join(filter(None, lines))[:300].rstrip(".")
