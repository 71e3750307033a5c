"""The settings of the connection to a group's engine: a group of BrokerSettings."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple

from cometmq.conf.option import option


class EngineAccess(NamedTuple):
    """How an engine is spoken to: who it must be, and who we are. Names of files, no secrets."""

    ca_file: str = ""
    cert_file: str = ""
    key_file: str = ""
    user: str = ""
    password_file: str = ""


#: Without TLS, as nobody.
NO_ACCESS: Final = EngineAccess()

#: In the order of EngineAccess.
ENGINE_KEYS: Final = (
    "groupEngineCaFile", "groupEngineCertFile", "groupEngineKeyFile", "groupEngineUser",
    "groupEnginePasswordFile",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class EngineSettings:
    """The connection to a group's engine"""

    group_engine_ca_file: str = option(
        "",
        key="groupEngineCaFile",
        help="A file with the certificates (PEM) of those who may have signed the engine's; given, "
        "the engine is spoken to by TLS alone, and its certificate must name the host that "
        "groupEngine names. Empty: without TLS.",
    )
    group_engine_cert_file: str = option(
        "",
        key="groupEngineCertFile",
        help="The certificate (PEM) that this broker shows the engine. It is read again once it "
        "was replaced, as groupEngineKeyFile and groupEngineCaFile are.",
    )
    group_engine_key_file: str = option(
        "",
        key="groupEngineKeyFile",
        help="The private key (PEM, without a passphrase) of groupEngineCertFile; others may not "
        "read it.",
    )
    group_engine_user: str = option(
        "",
        key="groupEngineUser",
        help="User name of this broker in etcd.",
    )
    group_engine_password_file: str = option(
        "",
        key="groupEnginePasswordFile",
        help="A file with the password of groupEngineUser, one line, that nobody else may read. "
        "Without groupEngineCaFile it travels as it is.",
    )

    @property
    def engine_access(self) -> EngineAccess:
        return EngineAccess(
            self.group_engine_ca_file,
            self.group_engine_cert_file,
            self.group_engine_key_file,
            self.group_engine_user,
            self.group_engine_password_file,
        )

    def engine_problems(self) -> Iterator[str]:
        """What of these is given without what it needs."""
        needs = {
            "groupEngineCertFile": ("groupEngineKeyFile", "groupEngineCaFile"),
            "groupEngineKeyFile": ("groupEngineCertFile",),
            "groupEngineUser": ("groupEnginePasswordFile",),
            "groupEnginePasswordFile": ("groupEngineUser",),
        }
        given = dict(zip(ENGINE_KEYS, self.engine_access, strict=True))
        for key, others in needs.items():
            for other in others:
                if given[key] and not given[other]:
                    yield f"{key} = {given[key]:.200}: needs {other}"
