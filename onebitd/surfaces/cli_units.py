"""`onebitctl install-units` and `uninstall-units`. See `onebitctl(1)`.

What the other commands do not need is imported by the functions that do: those start faster.
"""

from __future__ import annotations

import argparse
import dataclasses
import grp
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Final

from onebitd import __version__
from onebitd.core.errors import OnebitError, UsageError
from onebitd.surfaces import cli_service
from onebitd.surfaces.cli_service import checked_instance, say, tell

if TYPE_CHECKING:
    from onebitd.adapters.unit_files import Changes, Tree
    from onebitd.core.unit_layout import Item, Manifest

DEFAULT_PREFIX: Final = "/usr/local"
CONFIG_DIRECTORY: Final = PurePosixPath("/etc/onebitd")
EXIT_PROBLEM: Final = 1

_SEARCHED_PREFIXES: Final = ("/usr/local", "/usr")
_PACKAGE_UNIT: Final = PurePosixPath("/usr/lib/systemd/system/onebitd@.service")
_ADMIN_UNITS: Final = PurePosixPath("/etc/systemd/system")
_WANTS: Final = re.compile(r".+\.(wants|requires|upholds)")
_RUNTIME: Final = PurePosixPath("/run/onebitd")
_KEPT: Final = (
    CONFIG_DIRECTORY,
    PurePosixPath("/var/lib/onebitd"),
    PurePosixPath("/var/cache/onebitd"),
)
_SERVICE_USER: Final = "onebitd"
_LOG_LINES: Final = 5
_FIRST_STATUS_OF_SYSTEMD: Final = 200
"""From here on, a status says what systemd could not set up: 226 a missing bind mount."""


class NeedsRoot(OnebitError):
    """Only root can do it."""

    exit_status = cli_service.EXIT_DENIED


@dataclasses.dataclass(frozen=True, slots=True)
class Installation:
    """Where the running onebitd is.

    Args:
        data: the prefix that the wheel's files went to.
        programs: the directory of onebitd and onebitctl.
        parts: what the service has to be able to see, real paths included.
        is_environment: it is a virtual environment.
    """

    data: Path
    programs: PurePosixPath
    parts: tuple[PurePosixPath, ...]
    is_environment: bool

    @classmethod
    def running(cls) -> Installation:
        """Return that of the running interpreter."""
        import sysconfig

        seen = (sys.prefix, os.path.realpath(sys.prefix), os.path.realpath(sys.executable))
        return cls(
            data=Path(sysconfig.get_path("data")),
            programs=PurePosixPath(sysconfig.get_path("scripts")),
            parts=tuple(map(PurePosixPath, (*seen, os.path.realpath(sys.base_prefix)))),
            is_environment=sys.prefix != sys.base_prefix,
        )

    def seen_from(self, root: Path) -> Installation:
        """Return the same with the paths of a machine that has `root` as its root directory."""

        def inside(path: PurePosixPath) -> PurePosixPath:
            if path.is_relative_to(root):
                return PurePosixPath("/") / path.relative_to(root)
            return path

        parts = tuple(map(inside, self.parts))
        return dataclasses.replace(self, programs=inside(self.programs), parts=parts)


@dataclasses.dataclass(slots=True)
class Site:
    """What is worked on: a machine that runs, or a tree that one will boot from.

    `problems` counts what went wrong after the files were in place.
    """

    root: Path
    prefix: PurePosixPath
    tree: Tree
    booted: bool
    problems: int = 0

    def problem(self, text: str) -> None:
        """Say what went wrong; the command goes on and ends with status 1."""
        tell(text)
        self.problems += 1

    @property
    def root_option(self) -> list[str]:
        """What tells systemd's programs to work on the tree."""
        return [] if self.root == Path("/") else [f"--root={self.root}"]


def register(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
    where: argparse.ArgumentParser,
) -> None:
    """Add the commands to a parser; `where` has the option that names an instance."""
    cli_service.register(commands, where)
    install = commands.add_parser(
        "install-units",
        help="install systemd units, man pages and links from a virtual environment",
        description="Install systemd units, man pages, completions and links to the programs of"
        " the virtual environment that this command is run from, and make the service's user.",
        allow_abbrev=False,
    )
    _add_places(install)
    install.add_argument(
        "--enable",
        metavar="INSTANCE",
        action="append",
        default=[],
        help="start this instance now and at boot; write a configuration if there is none,"
        " and then do not start it yet (repeatable)",
    )
    install.set_defaults(run=run_install)

    uninstall = commands.add_parser(
        "uninstall-units",
        help="stop all instances and remove what install-units wrote",
        description="Stop and disable all instances, and remove what install-units wrote."
        " Configurations, state and the service's user stay.",
        allow_abbrev=False,
    )
    _add_places(uninstall)
    uninstall.set_defaults(run=run_uninstall)


def _add_places(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--prefix",
        metavar="DIR",
        default=DEFAULT_PREFIX,
        help=f"where the files are, or go to (default: {DEFAULT_PREFIX})",
    )
    parser.add_argument(
        "--root",
        metavar="DIR",
        default="/",
        help="work on the tree of another machine, such as an image that is being built",
    )


# --- install-units ------------------------------------------------------------------------------


def run_install(arguments: argparse.Namespace) -> int:
    """Install; 1 if a file is in the way, or if something after the files did not work."""
    from onebitd.core.unit_layout import UnitFilesError

    site = _site(arguments)
    instances = list(dict.fromkeys(map(checked_instance, arguments.enable)))
    try:
        _install(site, instances)
    except UnitFilesError as error:
        tell(str(error))
        return EXIT_PROBLEM
    return EXIT_PROBLEM if site.problems else 0


def _install(site: Site, instances: list[str]) -> None:
    from onebitd.adapters import unit_files
    from onebitd.core import unit_layout

    installation = Installation.running().seen_from(site.root)
    _refuse_unfit(site, installation, instances)
    sources = unit_files.read_sources(installation.data)
    items = unit_layout.plan(sources, prefix=site.prefix, programs=installation.programs)
    with unit_files.locked(site.tree, site.prefix) as made:
        running = _active_units() if site.booted else []
        changes = unit_files.install(
            site.tree, items, prefix=site.prefix, version=__version__, made=made
        )
        _tell_changes(site, items, changes)
        _prepare_system(site, sources)
        _hint_at_rocm(site)
        for instance in instances:
            _enable(site, instance, items[site.prefix / unit_layout.SAMPLE])
    services = [unit for unit in running if unit.endswith(".service")]
    is_new = changes.written + changes.removed > 0 or changes.before != __version__
    if services and is_new:
        say(f"still on what they were started with: {' '.join(services)} (systemctl restart)")


def _tell_changes(site: Site, items: Mapping[PurePosixPath, Item], changes: Changes) -> None:
    say(_installed_text(changes, site))
    for path in changes.kept:
        tell(f"{path} is not part of this version, and was kept because it was changed")
    _warn_of_hidden(site, items)


def _hint_at_rocm(site: Site) -> None:
    if site.booted and Path("/dev/kfd").exists():
        say(
            "this machine has ROCm's device: if the decoder or the provider uses ROCm, copy"
            f" {site.prefix}/share/onebitd/drop-ins/rocm.conf to"
            f" {_ADMIN_UNITS}/onebitd@NAME.service.d/, then systemctl daemon-reload and"
            " systemctl restart onebitd@NAME"
        )


def _refuse_unfit(site: Site, installation: Installation, instances: list[str]) -> None:
    """Refuse what could not work afterwards, before anything is changed."""
    from onebitd.core import unit_layout

    if str(site.prefix) != "/usr" and site.tree.fingerprint(_PACKAGE_UNIT) is not None:
        raise UsageError(
            f"a package has installed onebitd ({_PACKAGE_UNIT}), and its package manager owns the"
            f" units: those in {site.prefix} would come before them. Use them, with"
            " `systemctl enable --now onebitd@NAME`, or remove the package first"
        )
    if not installation.is_environment or PurePosixPath(installation.data) == site.prefix:
        raise UsageError(
            "this onebitd does not run from a virtual environment: what installed it put its units"
            f" below its own prefix, and they are not for this command to copy to {site.prefix}"
        )
    if not unit_layout.is_plain_path(installation.programs):
        raise UsageError(
            f"{installation.programs} has characters that a unit cannot hold: make the virtual"
            " environment elsewhere, in /opt/onebitd for example"
        )
    hidden = unit_layout.hidden_from_service(installation.parts)
    if hidden is not None:
        raise UsageError(
            f"{hidden} is out of the service's sight (ProtectHome=yes): make the virtual"
            " environment in /opt and with the system's Python, `/usr/bin/python3 -m venv"
            " /opt/onebitd`"
        )
    if instances and str(site.prefix) not in _SEARCHED_PREFIXES:
        raise UsageError(f"--enable: systemd does not look for units below {site.prefix}")


def _installed_text(changes: Changes, site: Site) -> str:
    what = f"{changes.written} written"
    if changes.unchanged:
        what += f", {changes.unchanged} unchanged"
    if changes.removed:
        what += f", {changes.removed} removed"
    before = f" in the place of {changes.before}" if changes.before not in ("", __version__) else ""
    return f"onebitd {__version__}{before}: files below {site.prefix}: {what}"


def _warn_of_hidden(site: Site, items: Mapping[PurePosixPath, Item]) -> None:
    from onebitd.core import unit_layout

    if str(site.prefix) not in _SEARCHED_PREFIXES:
        tell(f"systemd does not look for units below {site.prefix}: link them, or copy them")
    for path in items:
        admin = unit_layout.admin_path(path.relative_to(site.prefix))
        if admin is not None and site.tree.fingerprint(admin) is not None:
            tell(f"{admin} comes before {path}: remove it, unless it is what you want")


def _prepare_system(site: Site, sources: Mapping[PurePosixPath, bytes]) -> None:
    """Make user, groups and directories, and let systemd read the units."""
    from onebitd.adapters import systemd_tools
    from onebitd.core import unit_layout

    if os.geteuid() != 0:
        say("left out, because only root can: the service's user, its directories (made at boot)")
        return
    for program, name, option in (
        ("systemd-sysusers", unit_layout.SYSUSERS, []),
        ("systemd-tmpfiles", unit_layout.TMPFILES, ["--create"]),
    ):
        text = sources.get(name, b"").decode()
        done = systemd_tools.run(program, *site.root_option, *option, "-", stdin=text)
        if done.status != 0:
            site.problem(f"{program} {site.prefix / name}: {done.said}")
    if site.booted:
        done = systemd_tools.run("systemctl", "daemon-reload")
        if done.status != 0:
            site.problem(f"systemctl daemon-reload: {done.said}")
    elif not site.root_option:
        say("no systemd runs this machine: systemctl daemon-reload was left out")


def _enable(site: Site, instance: str, sample: Item) -> None:
    from onebitd.adapters import systemd_tools

    unit, config = f"onebitd@{instance}.service", CONFIG_DIRECTORY / f"{instance}.toml"
    is_new = site.tree.fingerprint(config) is None
    if is_new:
        if not _write_config(site, config, sample):
            return
    elif site.booted and not _is_configured(site, unit, instance):
        return
    done = systemd_tools.run("systemctl", *site.root_option, "--quiet", "enable", unit)
    if done.status != 0:
        site.problem(f"systemctl enable {unit}: {done.said}")
        return
    if is_new:
        start = f", then systemctl start {unit}" if not site.root_option else ""
        keys = "model.path, backend.llama_server and, for handoffs, provider.program"
        say(f"{unit} starts at boot; wrote {config}: set at least {keys} in it{start}")
        return
    if not site.booted:
        say(f"{unit} starts at boot; {config} was there already and was not checked")
        return
    done = systemd_tools.run("systemctl", "start", unit)
    if done.status != 0:
        site.problem(f"systemctl start {unit}: {done.said}{_last_lines(unit)}")
        return
    say(f"{unit} runs, and starts at boot")


def _last_lines(unit: str) -> str:
    """Return what a service that failed has said, as an addition to a message; "" if nothing."""
    from onebitd.adapters import systemd_tools

    shown = systemd_tools.run("systemctl", "show", "--value", "--property=InvocationID", unit)
    run = shown.stdout.strip()
    if not run:
        return ""
    lines = ("--quiet", "--no-pager", "--output=cat", f"--lines={_LOG_LINES}")
    said = systemd_tools.run("journalctl", *lines, f"_SYSTEMD_INVOCATION_ID={run}").stdout.rstrip()
    return f"\nit said:\n{said}" if said else ""


def _write_config(site: Site, config: PurePosixPath, sample: Item) -> bool:
    group = _group_id(site)
    if group is None or not site.tree.is_directory(config.parent):
        missing = f"group {_SERVICE_USER}" if group is None else str(config.parent)
        site.problem(f"{config} was not written: there is no {missing}")
        return False
    site.tree.write(config, sample, mode=0o640, group=group)
    return True


def _group_id(site: Site) -> int | None:
    if not site.root_option:
        try:
            return grp.getgrnam(_SERVICE_USER).gr_gid
        except KeyError:
            return None
    listed = (site.tree.read(PurePosixPath("/etc/group")) or b"").decode(errors="replace")
    found = re.search(rf"^{_SERVICE_USER}:[^:]*:(\d+):", listed, re.MULTILINE)
    return int(found[1]) if found else None


def _is_configured(site: Site, unit: str, instance: str) -> bool:
    """Run `onebitd --check-config` with the user, the sandbox and the settings of the service."""
    from onebitd.adapters import systemd_tools
    from onebitd.core import unit_sandbox

    shown = systemd_tools.run("systemctl", "cat", unit)
    if shown.status != 0:
        site.problem(f"systemctl cat {unit}: {shown.said}")
        return False
    properties = unit_sandbox.properties(shown.stdout, instance)
    done = systemd_tools.run(
        "systemd-run",
        *("--quiet", "--pipe", "--wait", "--collect"),
        *(f"--property={line}" for line in properties),
        "--",
        *(str(site.prefix / "bin" / "onebitd"), "--instance", instance, "--check-config"),
    )
    if done.status >= _FIRST_STATUS_OF_SYSTEMD:
        site.problem(
            f"{unit} was not started: systemd cannot give onebitd what the unit and its drop-ins"
            f" say: {done.said} (systemd.exec(5), PROCESS EXIT CODES)"
        )
        return False
    if done.status != 0:
        site.problem(f"{unit} was not started, its configuration is not good:\n{done.said}")
        return False
    if done.stderr.strip():
        tell(done.stderr.strip())
    return True


# --- uninstall-units ----------------------------------------------------------------------------


def run_uninstall(arguments: argparse.Namespace) -> int:
    """Remove; 0 as well when nothing was installed."""
    from onebitd.core.unit_layout import UnitFilesError

    site = _site(arguments)
    try:
        _uninstall(site)
    except UnitFilesError as error:
        tell(str(error))
        return EXIT_PROBLEM
    return EXIT_PROBLEM if site.problems else 0


def _uninstall(site: Site) -> None:
    from onebitd.adapters import unit_files
    from onebitd.core import unit_layout

    directory = site.prefix / unit_layout.MANIFEST.parent
    if site.tree.is_directory(directory):
        with site.tree.locked_directory(directory):
            manifest = unit_files.read_manifest(site.tree, site.prefix)
            if manifest is not None:
                _remove(site, manifest)
                return
            unit_files.remove_leftovers(site.tree, site.prefix)
    say(f"install-units has installed nothing below {site.prefix}")


def _remove(site: Site, manifest: Manifest) -> None:
    from onebitd.adapters import systemd_tools, unit_files

    has_package = site.tree.fingerprint(_PACKAGE_UNIT) is not None
    if not has_package:
        _stop_all(site)
        _remove_enable_links(site)
    changes = unit_files.uninstall(site.tree, manifest, prefix=site.prefix)
    say(f"onebitd {changes.before}: {changes.removed} files below {site.prefix} removed")
    for path in changes.kept:
        tell(f"{path} was changed since it was installed, and was kept")
    if site.booted:
        done = systemd_tools.run("systemctl", "daemon-reload")
        if done.status != 0:
            site.problem(f"systemctl daemon-reload: {done.said}")
    if has_package:
        say(f"instances go on with the units of the package ({_PACKAGE_UNIT})")
        return
    if site.booted:
        _remove_runtime(site)
    say(_left_text(site))


def _stop_all(site: Site) -> None:
    """Stop every instance; nothing is removed under one that does not stop.

    Raises:
        OnebitError: one could not be stopped.
    """
    from onebitd.adapters import systemd_tools

    units = _active_units() if site.booted else []
    if not units:
        return
    done = systemd_tools.run("systemctl", "stop", *units)
    if done.status != 0:
        raise OnebitError(f"nothing was removed: systemctl stop {' '.join(units)}: {done.said}")
    systemd_tools.run("systemctl", "reset-failed", *units)  # says so of those that had not failed
    say(f"stopped {' '.join(units)}")


def _active_units() -> list[str]:
    """Return the units of all instances that run, wait, or have failed."""
    from onebitd.adapters import systemd_tools
    from onebitd.core import unit_layout

    done = systemd_tools.run(
        "systemctl", "list-units", "--plain", "--no-legend", "--no-pager", "onebitd*@*"
    )
    names = [line.split()[0] for line in done.stdout.splitlines() if line.strip()]
    return [name for name in names if unit_layout.instance_of(name) is not None]


def _remove_enable_links(site: Site) -> None:
    """Do what `systemctl disable` does, on any tree."""
    from onebitd.core import unit_layout

    disabled = []
    for directory in filter(_WANTS.fullmatch, site.tree.names(_ADMIN_UNITS)):
        links = [
            name
            for name in site.tree.names(_ADMIN_UNITS / directory)
            if unit_layout.instance_of(name) is not None
        ]
        for name in links:
            if (site.tree.fingerprint(_ADMIN_UNITS / directory / name) or "").startswith("link:"):
                site.tree.remove(_ADMIN_UNITS / directory / name)
                disabled.append(name)
        if links:
            site.tree.remove_directory(_ADMIN_UNITS / directory)
    if disabled:
        say(f"disabled {' '.join(disabled)}")


def _remove_runtime(site: Site) -> None:
    """Remove what services have left in /run; not what a daemon that was started by hand uses."""
    import shutil

    from onebitd.client import find_instances

    for instance in find_instances([_RUNTIME]):
        if instance.state == "stopped":
            shutil.rmtree(_RUNTIME / instance.name, ignore_errors=True)
    site.tree.remove_directory(_RUNTIME)


def _left_text(site: Site) -> str:
    from onebitd.core import unit_layout

    there = [str(path) for path in _KEPT if site.tree.is_directory(path)]
    there += [
        str(_ADMIN_UNITS / name)
        for name in site.tree.names(_ADMIN_UNITS)
        if name.endswith(".d") and unit_layout.instance_of(name.removesuffix(".d")) is not None
    ]
    return f"kept: {', '.join([*there, f'the user {_SERVICE_USER}'])}"


# --- both ---------------------------------------------------------------------------------------


def _site(arguments: argparse.Namespace) -> Site:
    """Return what the options choose.

    Raises:
        UsageError: a directory cannot be what it is meant to be.
        NeedsRoot: it is this machine, and the user is not root.
    """
    from onebitd.adapters import systemd_tools, unit_files
    from onebitd.core import unit_layout

    root, prefix = Path(arguments.root).absolute(), PurePosixPath(arguments.prefix)
    if not root.is_dir():
        raise UsageError(f"--root: {root} is no directory")
    if prefix == PurePosixPath("/") or not unit_layout.is_plain_path(prefix):
        raise UsageError(f"--prefix: {prefix} is no absolute path that a unit can hold")
    is_here = root.resolve() == Path("/")
    if is_here and os.geteuid() != 0:
        raise NeedsRoot(
            "only root can do that here: run it with sudo and the path of the program, as in"
            f" `sudo {Path(sys.argv[0]).absolute()}`; --root DIR works on another tree"
        )
    tree = unit_files.Tree(root)
    return Site(tree.root, prefix, tree, booted=is_here and systemd_tools.is_booted())
