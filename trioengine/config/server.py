"""`ServerConfig`: what a user may decide about the HTTP server."""

import enum

import attrs
from attrs.validators import optional

from trioengine.config.options import (
    documented,
    flag,
    integer,
    member_of,
    number,
    text,
    texts,
    to_member_of,
    to_texts,
)
from trioengine.errors import ConfigError


class ToolCallParser(enum.StrEnum):
    """How a model writes tool calls."""

    HERMES = "hermes"
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`."""
    LLAMA3_JSON = "llama3_json"
    """`{"name": ..., "parameters": {...}}`."""
    MISTRAL = "mistral"
    """`[TOOL_CALLS]name[ARGS]{...}`, and `[TOOL_CALLS] [{...}]`."""
    PYTHONIC = "pythonic"
    """`[f(a=1), g()]`."""
    JSON = "json"
    """`[{"name": ..., "arguments": {...}}]`."""


class GenerationConfig(enum.StrEnum):
    """Where sampling parameters that a request leaves out come from."""

    AUTO = "auto"
    """The model's authors, as far as its files say something."""
    VLLM = "vllm"
    """The defaults of `SamplingParams`."""


@attrs.frozen(kw_only=True)
class ServerConfig:
    """The options of one HTTP server, checked one by one.

    Raises:
        ConfigError: a value cannot work. `option` is its name.
    """

    host: str = attrs.field(
        default="127.0.0.1",
        validator=text(),
        metadata=documented("The address to listen on. Anything but a loopback address opens the engine to others."),
    )
    port: int = attrs.field(
        default=8000,
        validator=integer(0, 65535),
        metadata=documented("The TCP port to listen on. 0 takes a free one, and the log says which."),
    )
    uds: str | None = attrs.field(
        default=None,
        validator=optional(text()),
        metadata=documented("Listen on this UNIX socket instead of host and port."),
    )
    uds_mode: str = attrs.field(
        default="600",
        validator=text("[0-7]{3,4}"),
        metadata=documented("The UNIX socket's permissions, octal: 600 for the same user, 660 for the group too."),
    )
    fd: int | None = attrs.field(
        default=None,
        validator=optional(integer(0, 2**31 - 1)),
        metadata=documented("Listen on this inherited file descriptor, a bound stream socket, instead."),
    )
    root_path: str = attrs.field(
        default="/",
        validator=text("/[^?#]*"),
        metadata=documented("The path below which a reverse proxy shows the server. Requests may have it or not."),
    )
    api_server_count: int = attrs.field(
        default=1,
        validator=integer(1, 256),
        metadata=documented("How many processes serve HTTP, sharing the address and the engine."),
    )
    api_key: tuple[str, ...] = attrs.field(
        default=(),
        converter=to_texts(),
        validator=texts(r"[!-~]+"),
        repr=False,
        metadata=documented(
            "Requests need one of these keys as Authorization: Bearer. TRIOENGINE_API_KEY keeps it out of `ps`."
        ),
    )
    allowed_hosts: tuple[str, ...] = attrs.field(
        default=(),
        converter=to_texts(),
        validator=texts(r"\*|(\*\.)?[^/\s\"]+"),
        metadata=documented(
            "Names that requests may call the server by, *.example.com for all below, * for any. On a loopback "
            "address they are checked always, and its own names are known."
        ),
    )
    allowed_origins: tuple[str, ...] = attrs.field(
        default=(),
        converter=to_texts(),
        validator=texts(r"\*|null|[a-z][a-z0-9+.-]*://[^/\s]+"),
        metadata=documented("Web pages of these origins may use the server, * for all. Others may not."),
    )
    allowed_methods: tuple[str, ...] = attrs.field(
        default=("*",),
        converter=to_texts(),
        validator=texts(r"\*|[A-Z]+"),
        metadata=documented("The methods that pages of allowed origins may use."),
    )
    allowed_headers: tuple[str, ...] = attrs.field(
        default=("*",),
        converter=to_texts(),
        validator=texts(r"\*|[A-Za-z0-9_-]+"),
        metadata=documented("The request headers that pages of allowed origins may send."),
    )
    allow_credentials: bool = attrs.field(
        default=False,
        validator=flag(),
        metadata=documented("Let pages of allowed origins send cookies."),
    )
    ssl_certfile: str | None = attrs.field(
        default=None,
        validator=optional(text()),
        metadata=documented("The certificate chain, PEM. With it the server speaks TLS, 1.2 or newer."),
    )
    ssl_keyfile: str | None = attrs.field(
        default=None,
        validator=optional(text()),
        metadata=documented("The certificate's private key, PEM, where it is not in the same file."),
    )
    ssl_keyfile_password: str | None = attrs.field(
        default=None,
        validator=optional(text()),
        repr=False,
        metadata=documented("What decrypts the private key."),
    )
    ssl_ca_certs: str | None = attrs.field(
        default=None,
        validator=optional(text()),
        metadata=documented("The authorities whose certificates clients may show, PEM."),
    )
    ssl_cert_reqs: int = attrs.field(
        default=0,
        validator=integer(0, 2),
        metadata=documented("Whether clients show a certificate: 0 they do not, 1 they may, 2 they must."),
    )
    http2: bool = attrs.field(
        default=False,
        validator=flag(),
        metadata=documented("Offer HTTP/2. Needs TLS: in clear text it is refused."),
    )
    access_log: bool = attrs.field(
        default=True,
        validator=flag(),
        metadata=documented("Log one line for each request, at its end."),
    )
    disable_access_log_for_endpoints: tuple[str, ...] = attrs.field(
        default=(),
        converter=to_texts(),
        validator=texts(r"/\S*"),
        metadata=documented("Paths whose requests are not logged."),
    )
    keep_alive_on_engine_death: bool = attrs.field(
        default=False,
        validator=flag(),
        metadata=documented("When the engine dies, go on and answer 503, instead of ending with a failure."),
    )
    max_body_bytes: int = attrs.field(
        default=32 * 1024 * 1024,
        validator=integer(1),
        metadata=documented("The largest request body. A larger one is answered with 413."),
    )
    responses_ttl_s: float = attrs.field(
        default=3600.0,
        validator=number(0.0),
        metadata=documented("Seconds after which the Responses API forgets a response that has ended. 0 keeps none."),
    )
    responses_max_bytes: int = attrs.field(
        default=256 * 1024 * 1024,
        validator=integer(0),
        metadata=documented("The memory that kept responses may take, about. The oldest make room."),
    )
    max_connections: int = attrs.field(
        default=4096,
        validator=integer(1),
        metadata=documented("The most connections at once. Others wait in the kernel's queue."),
    )
    max_header_bytes: int = attrs.field(
        default=64 * 1024,
        validator=integer(1024),
        metadata=documented("The largest head of a request. A larger one is answered with 431."),
    )
    keep_alive_timeout_s: float = attrs.field(
        default=75.0,
        validator=number(0.001),
        metadata=documented("Seconds after which a connection without a request is closed."),
    )
    header_timeout_s: float = attrs.field(
        default=20.0,
        validator=number(0.001),
        metadata=documented("Seconds that a client has to send the head of a request it has begun."),
    )
    body_timeout_s: float = attrs.field(
        default=30.0,
        validator=number(0.001),
        metadata=documented("Seconds that the server waits for a request's body, and one more for each KB. Then 408."),
    )
    write_timeout_s: float = attrs.field(
        default=60.0,
        validator=number(0.001),
        metadata=documented("Seconds after which a client that does not read is disconnected."),
    )
    shutdown_timeout_s: float = attrs.field(
        default=30.0,
        validator=number(0.0),
        metadata=documented("Seconds that running requests get to finish after a stop signal."),
    )
    strict: bool = attrs.field(
        default=False,
        validator=flag(),
        metadata=documented(
            "Refuse with 400 what is otherwise answered with a warning header: max_tokens above what the context"
            " leaves, and unknown fields."
        ),
    )
    model_alias: tuple[str, ...] = attrs.field(
        default=(),
        converter=to_texts(),
        validator=texts(),
        metadata=documented("Another name that requests may call the served model by."),
    )
    lora_modules: tuple[str, ...] = attrs.field(
        default=(),
        converter=to_texts(),
        validator=texts(r"[^=]+=.+"),
        metadata=documented("A LoRA adapter to begin with, as NAME=FOLDER. Needs enable_lora."),
    )
    web_page: bool = attrs.field(
        default=True,
        validator=flag(),
        metadata=documented("Serve the chat page at /."),
    )
    enable_admin: bool = attrs.field(
        default=False,
        validator=flag(),
        metadata=documented(
            "Serve the routes that operate the engine: sleep, pause, profiles, tasks. Whoever reaches them can stop it."
        ),
    )
    tool_call_parser: ToolCallParser | None = attrs.field(
        default=None,
        converter=attrs.converters.optional(to_member_of(ToolCallParser)),
        validator=optional(member_of(ToolCallParser)),
        metadata=documented("How the model writes tool calls. Unset is what its chat template shows."),
    )
    generation_config: GenerationConfig = attrs.field(
        default=GenerationConfig.AUTO,
        converter=to_member_of(GenerationConfig),
        validator=member_of(GenerationConfig),
        metadata=documented(
            "Sampling parameters that a request leaves out: auto is what the model's authors recommend in its files,"
            " vllm is the engine's own values."
        ),
    )
    chat_template: str | None = attrs.field(
        default=None,
        validator=optional(text()),
        metadata=documented("In place of the model's own chat template: a file, or the template itself."),
    )
    trust_request_chat_template: bool = attrs.field(
        default=False,
        validator=flag(),
        metadata=documented("Let requests bring a chat template of their own. It is a program, run in a sandbox."),
    )

    def __attrs_post_init__(self) -> None:
        if self.uds is not None and self.fd is not None:
            raise ConfigError("uds and fd exclude each other.", option="fd")
        if self.ssl_certfile is None:
            for option in ("ssl_keyfile", "ssl_keyfile_password", "ssl_ca_certs"):
                if getattr(self, option) is not None:
                    raise ConfigError(f"{option} needs ssl_certfile.", option=option)
        if self.ssl_cert_reqs and self.ssl_ca_certs is None:
            raise ConfigError("ssl_cert_reqs needs ssl_ca_certs.", option="ssl_cert_reqs")
        if self.allow_credentials and "*" in self.allowed_origins:
            raise ConfigError("allow_credentials needs origins by name, not *.", option="allow_credentials")
