"""The client and the CLI load with only click, httpx and rich, and `aenv --help` with click alone.

Each check runs in a fresh interpreter whose import system refuses what must not be needed.
"""

from __future__ import annotations

import ast
import json
import pkgutil
import subprocess
import sys
from pathlib import Path

import agentenv.cli
import agentenv.client

SERVER = {
    "agentenv.node", "agentenv.vmm", "agentenv.api", "agentenv.guest", "agentenv.network", "agentenv.block",
    "agentenv.images", "agentenv.snapshots", "agentenv.templates", "agentenv.routing", "agentenv.cluster",
    "agentenv.lifecycle", "agentenv.model", "starlette", "uvicorn", "uvloop", "httptools", "msgspec",
    "pyroute2", "structlog", "pydantic", "redis", "grpc", "obstore", "prometheus_client",
}  # fmt: skip
# Modules of the standard library that macOS does not have.
LINUX_ONLY = {"spwd", "ossaudiodev", "msvcrt", "winreg"}
# The same for names inside of modules that it has.
LINUX_ONLY_NAMES = {
    "epoll", "memfd_create", "pidfd_open", "setns", "unshare", "splice", "eventfd", "copy_file_range", "O_TMPFILE",
    "O_PATH", "sched_setaffinity", "sched_getaffinity", "getrandom", "posix_fallocate", "signalfd", "prlimit",
}  # fmt: skip
# The lead's server side of the CLI, loaded only when invoked.
SERVER_COMMANDS = {"agentenv.cli.server", "agentenv.cli.doctor", "agentenv.cli.template_build"}

BLOCKER = """
import importlib, json, sys
blocked = set(json.loads(sys.argv[1]))
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if any(name == item or name.startswith(item + ".") for item in blocked):
            raise ModuleNotFoundError(f"{name} must not be imported", name=name)
sys.meta_path.insert(0, Refuse())
for name in json.loads(sys.argv[2]):
    importlib.import_module(name)
print(json.dumps(sorted(sys.modules)))
"""


def loaded(blocked, names):
    done = subprocess.run(
        [sys.executable, "-c", BLOCKER, json.dumps(sorted(blocked)), json.dumps(names)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout))


def modules_of(package):
    return [f"{package.__name__}.{item.name}" for item in pkgutil.iter_modules(package.__path__)]


def test_every_module_loads_without_the_server():
    names = [*modules_of(agentenv.client), *modules_of(agentenv.cli)]
    names = [name for name in names if name not in SERVER_COMMANDS and not name.endswith("__main__")]
    modules = loaded(SERVER | LINUX_ONLY, names)
    assert "agentenv.client.process" in modules
    assert "agentenv.cli._shell" in modules


def test_no_source_names_what_macos_lacks():
    for package in (agentenv.client, agentenv.cli):
        for path in Path(package.__path__[0]).glob("*.py"):
            if f"agentenv.cli.{path.stem}" not in SERVER_COMMANDS:
                tree = ast.walk(ast.parse(path.read_text()))
                names = {node.attr for node in tree if isinstance(node, ast.Attribute)}
                assert not names & LINUX_ONLY_NAMES, path


def test_the_check_itself_refuses():
    done = subprocess.run(
        [sys.executable, "-c", BLOCKER, '["agentenv.node"]', '["agentenv.node.interface"]'],
        capture_output=True,
        text=True,
        check=False,
    )
    assert "agentenv.node must not be imported" in done.stderr


def test_only_base_dependencies_are_loaded():
    modules = loaded(SERVER, ["agentenv.client", "agentenv.cli._exec", "agentenv.cli._cp", "agentenv.cli._shell"])
    top = {name.partition(".")[0] for name in modules} - set(sys.stdlib_module_names)
    third_party = {name for name in top if not name.startswith("_")}
    of_httpx = {"anyio", "certifi", "h11", "httpcore", "httpx", "idna", "sniffio", "socksio", "exceptiongroup"}
    of_rich = {"rich", "pygments", "markdown_it", "mdurl"}
    # Debian's Python loads a sitecustomize of its own.
    of_debian = {"sitecustomize"}
    assert third_party <= {"agentenv", "click", "typing_extensions", "colorama"} | of_httpx | of_rich | of_debian


HELP = """
import json, sys
from agentenv.cli.app import root
try:
    root.main(args=json.loads(sys.argv[1]))
except SystemExit as error:
    print(json.dumps([error.code, sorted(sys.modules)]), file=sys.stderr)
"""
# Beyond the interpreter's own: click and what it needs. A new import here is felt at every keystroke of completion.
HELP_MODULES_MAX = 160


def help_modules(*args):
    done = subprocess.run([sys.executable, "-c", HELP, json.dumps(args)], capture_output=True, text=True, check=False)
    code, modules = json.loads(done.stderr.splitlines()[-1])
    assert code == 0, done.stderr
    return set(modules)


def test_help_loads_click_and_no_command():
    modules = help_modules("--help")
    for name in ("httpx", "rich", "asyncio", "ssl", "tarfile", "agentenv.client", "agentenv.config"):
        assert name not in modules
    ours = {name for name in modules if name.startswith("agentenv.")}
    assert ours == {"agentenv.cli", "agentenv.cli.app", "agentenv.cli.lazy", "agentenv.cli.settings"}
    assert len(modules) <= HELP_MODULES_MAX, len(modules)


def test_help_of_a_command_loads_no_http():
    assert not {"httpx", "rich", "agentenv.client"} & help_modules("exec", "--help")


def test_httpx_does_not_bring_rich_along():
    modules = loaded(set(), ["agentenv.cli.session"])
    assert "httpx" not in modules
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "import sys; from agentenv.cli.session import new_client; from agentenv.cli.settings import Settings;"
            "new_client(Settings(api_url='http://x', api_key='k')); "
            "print('rich' in sys.modules, 'httpx' in sys.modules)",
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "False True\n"
