"""Settings of a broker: declared once, read from RocketMQ's broker.conf, checked, then frozen.

    loaded = load_settings("broker.conf", pairs=["flushDiskType=SYNC_FLUSH"])
    for warning in loaded.warnings:
        print(warning)
    loaded.settings.check_for_writing()

Knows nothing of the rest of the project.
"""

from cometmq.conf.explain import (
    Explanation,
    ShownSetting,
    as_markdown,
    explain_option,
    explain_options,
    show_settings,
)
from cometmq.conf.option import Option, Unit, readable, to_number
from cometmq.conf.settings import (
    BrokerRole,
    BrokerSettings,
    CleaningSettings,
    FlushDiskType,
    FlushSettings,
    IdentitySettings,
    LogFormat,
    LoggingSettings,
    LogLevel,
    NetworkSettings,
    ReadSettings,
    SendSettings,
    SlaveSettings,
    StoreSettings,
    TopicSettings,
)
from cometmq.conf.sources import Assignment, Loaded, Origin, load_settings
from cometmq.protocol.errors import ConfigError

__all__ = [
    "Assignment",
    "BrokerRole",
    "BrokerSettings",
    "CleaningSettings",
    "ConfigError",
    "Explanation",
    "FlushDiskType",
    "FlushSettings",
    "IdentitySettings",
    "Loaded",
    "LogFormat",
    "LogLevel",
    "LoggingSettings",
    "NetworkSettings",
    "Option",
    "Origin",
    "ReadSettings",
    "SendSettings",
    "ShownSetting",
    "SlaveSettings",
    "StoreSettings",
    "TopicSettings",
    "Unit",
    "as_markdown",
    "explain_option",
    "explain_options",
    "load_settings",
    "readable",
    "show_settings",
    "to_number",
]
