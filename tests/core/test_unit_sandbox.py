"""What a run that has to be like a service gets from the service's unit."""

from __future__ import annotations

from pathlib import Path

from onebitd.core import unit_sandbox

UNITS = Path(__file__).parents[2] / "units"
TEXT = (
    "# /usr/local/lib/systemd/system/onebitd@.service\n[Unit]\nUser=unit\n[Service]\n"
    "#User=comment\nUser=onebitd\nExecStart=/usr/bin/onebitd --instance %i\nProtectHome=yes\n"
    "EnvironmentFile=-/etc/onebitd/%i.env\nEnvironment=A=1 \\\n  B=2\n"
    "RuntimeDirectory=onebitd/%i\nStateDirectory=onebitd/%i other:link\n[Install]\nGroup=no\n"
    "# /etc/systemd/system/onebitd@qwen.service.d/x.conf\n[Service]\nProtectHome=tmpfs\n"
    "LoadCredential=api-key:%E/onebitd/credentials/%i.api-key\nEnvironment=P=50%% Q=%z\n"
    'ExecStart=\nExecStart=-/opt/x/onebitd --instance %i -m "/m/a b.gguf"\n'
)


def test_properties_are_those_of_the_service_and_its_drop_ins() -> None:
    """What the service sees and gets, in the order of the files, with the specifiers filled in."""
    assert unit_sandbox.properties(TEXT, "qwen") == [
        "User=onebitd",
        "ProtectHome=yes",
        "EnvironmentFile=-/etc/onebitd/qwen.env",
        "Environment=A=1    B=2",
        "ProtectHome=tmpfs",
        "LoadCredential=api-key:/etc/onebitd/credentials/qwen.api-key",
        "Environment=P=50% Q=%z",
    ]


def test_properties_empty_value_takes_earlier_ones_back() -> None:
    """As a drop-in does it; systemd-run would refuse the empty one, but for capabilities."""
    text = (
        "[Service]\nBindPaths=/a:/b\nUser=u\nCapabilityBoundingSet=CAP_CHOWN\nLimitNOFILE=5\n"
        "[Service]\nBindPaths=\nBindPaths=/c:/d\nLimitNOFILE=\nCapabilityBoundingSet=\nNice=\n"
    )
    found = unit_sandbox.properties(text, "qwen")
    assert found == ["User=u", "BindPaths=/c:/d", "CapabilityBoundingSet="]


def test_properties_of_a_user_have_the_users_places() -> None:
    """%E is the user's configuration, not the machine's."""
    places = unit_sandbox.user_specifiers({"HOME": "/h", "XDG_STATE_HOME": "/s"}, 7)
    found = unit_sandbox.properties(TEXT, "qwen", places)
    assert "LoadCredential=api-key:/h/.config/onebitd/credentials/qwen.api-key" in found
    assert unit_sandbox.directories(TEXT, "qwen", places) == {
        "RUNTIME_DIRECTORY": "/run/user/7/onebitd/qwen",
        "STATE_DIRECTORY": "/s/onebitd/qwen:/s/other",
    }


def test_directories_are_named_and_never_passed_on() -> None:
    """systemd would remove the running service's own at the end of a run that has them too."""
    assert unit_sandbox.directories(TEXT, "qwen") == {
        "RUNTIME_DIRECTORY": "/run/onebitd/qwen",
        "STATE_DIRECTORY": "/var/lib/onebitd/qwen:/var/lib/other",
    }
    for unit in (TEXT, *(path.read_text() for path in UNITS.rglob("onebitd@.service"))):
        keys = {line.partition("=")[0] for line in unit_sandbox.properties(unit, "q")}
        assert not {key for key in keys if key.endswith("Directory")}


def test_command_line_is_the_last_one() -> None:
    """Without the prefixes that are systemd's."""
    found = unit_sandbox.command_line(TEXT, "qwen")
    assert found == ["/opt/x/onebitd", "--instance", "qwen", "-m", "/m/a b.gguf"]
    assert unit_sandbox.command_line("[Service]\n", "qwen") == []


def test_properties_of_the_units_hold_every_line_that_confines() -> None:
    """A line of [Service] is passed on, or is known to be about the service's own life alone."""
    own_life = {
        "Type", "NotifyAccess", "ExecStart", "ExecReload", "Restart", "RestartSec",
        "RestartPreventExitStatus", "TimeoutStartSec", "TimeoutStopSec", "TimeoutAbortSec",
        "WatchdogSec", "KillMode", "SyslogIdentifier", "LogExtraFields",
        "LogRateLimitIntervalSec", "LogRateLimitBurst",
    }  # fmt: skip
    directories = {
        f"{kind}Directory{end}"
        for kind in ("Runtime", "State", "Cache")
        for end in ("", "Mode", "Preserve")
    }
    for path in UNITS.rglob("onebitd@.service"):
        text = path.read_text()
        service = text.partition("[Service]")[2].partition("[Install]")[0]
        keys = {
            line.partition("=")[0]
            for line in service.splitlines()
            if "=" in line and not line.startswith("#")
        }
        passed = {line.partition("=")[0] for line in unit_sandbox.properties(text, "q")}
        assert keys - passed == keys & (own_life | directories)
