"""The TLS context that a server's options describe."""

import ssl

from trioengine.config.server import ServerConfig
from trioengine.errors import ConfigError


def load_server_tls(config: ServerConfig, tls: ssl.SSLContext | None = None) -> ssl.SSLContext | None:
    """The context of an HTTP server: `tls` where it is given, else as `load_tls`, with the protocols it offers.

    Raises:
        ConfigError: as `load_tls`; or HTTP/2 is asked for without TLS.
    """
    tls = load_tls(config) if tls is None else tls
    if config.http2 and tls is None:
        raise ConfigError("http2 needs TLS (ssl_certfile): HTTP/2 is chosen by ALPN only.", option="http2")
    if tls is not None:
        tls.set_alpn_protocols(["h2", "http/1.1"] if config.http2 else ["http/1.1"])
    return tls


def load_tls(config: ServerConfig) -> ssl.SSLContext | None:
    """A context for `serve` with the certificate of `config`, TLS 1.2 or newer; None where there is none.

    Raises:
        ConfigError: a file cannot be read, is none of PEM, or does not fit the others.
    """
    if config.ssl_certfile is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        # Without a password given, an encrypted key is an error here, and not a question on the terminal.
        context.load_cert_chain(config.ssl_certfile, config.ssl_keyfile, password=config.ssl_keyfile_password or "")
    except (OSError, ValueError) as error:
        files = f"{config.ssl_certfile} and {config.ssl_keyfile or 'its key in the same file'}"
        raise ConfigError(f"Cannot load {files}: {error}", option="ssl_certfile") from error
    if config.ssl_ca_certs is not None:
        try:
            context.load_verify_locations(config.ssl_ca_certs)
        except (OSError, ValueError) as error:
            raise ConfigError(f"Cannot load {config.ssl_ca_certs}: {error}", option="ssl_ca_certs") from error
        context.verify_mode = ssl.VerifyMode(config.ssl_cert_reqs)
    return context
